"""Clips of a tar: what is found in it, what can't be used and why, and the audio itself."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.data.items import BrokenItemError, captions_of
from clap_ds.data.workers import WorkerError
from clap_ds.evaluation.clips import classes_of, list_clips, load_audio
from tests.data.tars import wav, write_tar
from tests.evaluation.conftest import ITEM_BYTES, WriteClips, clip_members, tone


@pytest.fixture
def audio() -> AudioConfig:
    """The micro preset's audio with clips of 4800 samples."""
    return load_preset("micro").audio.model_copy(update={"num_samples": 4800})


def test_clips_are_listed_in_order_with_what_describes_them(write_clips: WriteClips) -> None:
    clips, broken = list_clips(write_clips(2, 1, extra=[("0009.txt", b"a caption")]))
    assert [clip.key for clip in clips] == ["0000", "0001", "0002"]
    assert [captions_of(clip.described) for clip in clips] == [
        ["a hum number 0", "hum again, 0"],
        ["a click number 1"],
        ["a hiss number 2", "hiss again, 2"],
    ]
    assert [classes_of(clip.described, "kind") for clip in clips] == [["hum"], ["click"], ["hiss"]]
    (unusable,) = broken
    assert unusable.name.endswith("clips-0.tar: 0009")
    assert unusable.reason.startswith("no audio (flac, wav, ogg, mp3) among its files")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_audio_is_that_of_the_file(write_clips: WriteClips, audio: AudioConfig, num_workers: int) -> None:
    loaded = list(load_audio(list_clips(write_clips(18, 3))[0], audio, num_workers=num_workers))
    assert len(loaded) == 21
    for number, waveform in enumerate(loaded):
        np.testing.assert_allclose(waveform, tone(number), atol=1e-6)


def test_long_audio_is_cropped_in_its_middle(tmp_path: Path, audio: AudioConfig) -> None:
    ramp = np.linspace(-0.9, 0.9, 14401, dtype=np.float32)
    clips, _ = list_clips([str(write_tar(tmp_path / "a.tar", clip_members(0, {}, ramp)))])
    (waveform,) = load_audio(clips, audio, num_workers=0)
    np.testing.assert_allclose(waveform, ramp[4800:9600], atol=1e-6)


def test_compressed_and_remote_tars(write_clips: WriteClips, tmp_path: Path, audio: AudioConfig) -> None:
    (plain,) = write_clips(3)
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    with fsspec.open("memory://evaluation/remote.tar", "wb") as file:
        file.write(Path(plain).read_bytes())
    expected = torch.stack(list(load_audio(list_clips([plain])[0], audio, num_workers=0)))
    for shard in (str(packed), "memory://evaluation/remote.tar"):
        clips, broken = list_clips([shard])
        assert not broken
        assert torch.equal(torch.stack(list(load_audio(clips, audio, num_workers=0))), expected)


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (b'{"label": "hum"}', "no kind in its json"),
        (b'{"kind": []}', r"expected a class name or a list of them, found \[\]"),
        (b'{"kind": 3}', "expected a class name or a list of them, found 3"),
        (b"{", "json isn't valid"),
        (b"\xff", "json isn't valid"),
        (b'["hum"]', "no kind in its json"),
        (None, "no json"),
    ],
)
def test_a_clip_without_a_class_says_why(description: bytes | None, reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        classes_of({} if description is None else {"json": description}, "kind")


def test_several_classes() -> None:
    content = json.dumps({"kind": ["hum", " click", "hum"]}).encode()
    assert classes_of({"json": content}, "kind") == ["hum", "click"]


@pytest.mark.parametrize("cut", [2 * ITEM_BYTES, 2 * ITEM_BYTES + 100, 2 * ITEM_BYTES + 9000])
def test_a_tar_cut_short_gives_what_can_be_read(write_clips: WriteClips, audio: AudioConfig, cut: int) -> None:
    (path,) = write_clips(4)
    clips_before, _ = list_clips([path])
    Path(path).write_bytes(Path(path).read_bytes()[:cut])
    clips, broken = list_clips([path])
    assert clips == clips_before[:2]
    loaded = list(load_audio(clips_before, audio, num_workers=0))
    assert [isinstance(each, str) for each in loaded] == [False, False, True, True]
    assert loaded[3] == "its tar can't be read: the tar ends within it"
    assert [each.name for each in broken] == [path]
    assert "tar is truncated or damaged" in broken[0].reason


def test_what_is_no_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    clips, broken = list_clips([str(tmp_path / "a.tar"), str(tmp_path / "missing.tar")])
    assert not clips
    assert [each.name for each in broken] == [str(tmp_path / "a.tar"), str(tmp_path / "missing.tar")]


def test_audio_that_cannot_be_decoded_says_why(tmp_path: Path, audio: AudioConfig) -> None:
    members = [("a.wav", b"RIFF nothing"), ("b.wav", wav(np.zeros(0, dtype=np.float32)))]
    clips, _ = list_clips([str(write_tar(tmp_path / "a.tar", members))])
    undecodable, empty = load_audio(clips, audio, num_workers=0)
    assert "can't be decoded" in undecodable
    assert "no samples" in empty


@pytest.mark.end_to_end
def test_a_killed_decoding_process_is_reported(write_clips: WriteClips, audio: AudioConfig) -> None:
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    loading = load_audio(list_clips(write_clips(16 * 8))[0], audio, num_workers=1)
    next(loading)
    assert signal.getsignal(signal.SIGCHLD) == handler
    (worker,) = set(multiprocessing.active_children()) - others
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"clap\.evaluation\.num_workers: .* SIGKILL"):
        list(loading)
