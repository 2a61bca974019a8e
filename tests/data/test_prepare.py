"""Test that prepared shards equal live decoding, unusable items are reported and interrupted
commands resume."""

import hashlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from clap_ds import shards as command
from clap_ds.config.model import INT16_SCALE, load_preset
from clap_ds.data.build_shards import prepare
from clap_ds.data.clip import read_mel
from clap_ds.data.decoding import decode_audio
from clap_ds.data.shard_manifest import front_end_of, read_manifest
from clap_ds.model.mel import LogMel
from clap_ds.utils.errors import exit_code_of
from tests.data.tars import items_in, wav, write_tar

MICRO = load_preset("micro")  # clips of one second
RATE = MICRO.audio.sample_rate
HALF_STEP = 2**-5 + 1e-4
"""dB of maximal rounding error of features below 128 (half of float16's spacing), and of kernels'
differences."""


def sound(seconds: float, rate: int = RATE, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Return a falling tone in noise that differs by channel."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate))[:, None] / rate
    tones = 0.4 * np.sin(2 * np.pi * (900 - 300 * time) * time + np.arange(channels))
    return tones + rng.uniform(-0.02, 0.02, tones.shape)


CLIPS = {
    "short": wav(sound(0.3), RATE, "PCM_16"),
    "exact": wav(sound(1.0), RATE, "PCM_16"),
    "stereo": wav(sound(0.7, channels=2), RATE, "PCM_16"),
    "slow": wav(sound(0.5, 8000), 8000, "PCM_16"),
    "odd": wav(sound(0.9, 44100, 2), 44100, "PCM_24"),
    "float": wav(3 * sound(0.4), RATE, "FLOAT"),  # clipped at full scale
}


def members(clips: dict[str, bytes]) -> list[tuple[str, bytes]]:
    described = {
        name: json.dumps({"caption": f"a sound, {name}", "kind": name}).encode() for name in clips
    }
    return [
        each
        for name in clips
        for each in [(f"{name}.wav", clips[name]), (f"{name}.json", described[name])]
    ]


def run(*arguments: object) -> int:
    words = ["prepare", *map(str, arguments), "--preset", "micro", "--workers", "1"]
    return exit_code_of(lambda: command.main(words))


def live(clip: bytes, num_samples: int = RATE) -> torch.Tensor:
    """Decode like a run with `audio_dtype: int16`, (num_samples,) int16."""
    row = torch.empty(num_samples, dtype=torch.int16)
    decode_audio(clip, row, sample_rate=RATE, rng=random.Random(0))
    return row


def test_features_are_those_of_decoding_live(tmp_path: Path) -> None:
    """Up to rounding."""
    shard = write_tar(tmp_path / "a.tar", members(CLIPS))
    assert run(shard, tmp_path / "mel", "--kind", "mel") == 0
    items = items_in(tmp_path / "mel")
    assert list(items) == list(CLIPS)
    stored = torch.empty(
        len(items), MICRO.audio.num_frames, MICRO.audio.mel_bins, dtype=torch.float16
    )
    for row, (name, item) in zip(stored, items.items(), strict=True):
        read_mel(item["npy"], row, rng=random.Random(0))
        assert item.keys() == {"npy", "json"}
        assert json.loads(item["json"]) == {"caption": f"a sound, {name}", "kind": name}
    waveforms = torch.stack([live(clip) for clip in CLIPS.values()]).float() / INT16_SCALE
    assert (stored - LogMel(MICRO.audio)(waveforms)).abs().max() <= HALF_STEP
    manifest = read_manifest(str(tmp_path / "mel"))
    assert (manifest.kind, manifest.front_end) == ("mel", front_end_of(MICRO.audio))
    assert (manifest.shards["a.tar"].items, manifest.shards["a.tar"].seconds) == (
        6,
        pytest.approx(3.8),
    )


def test_a_tokenizer_beside_shards_is_copied_without_what_leads_outside(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", members({"short": CLIPS["short"]}))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "merges.txt").symlink_to(shard)
    assert run(shard, tmp_path / "wav", "--kind", "waveform") == 0
    assert [path.name for path in (tmp_path / "wav" / "tokenizer").iterdir()] == ["tokenizer.json"]


def test_waveforms_are_those_of_decoding_live(tmp_path: Path) -> None:
    """Standard WAV files of the clips' length that give the same features as the clips."""
    clips = {**CLIPS, "long": wav(sound(2.5, 44100, 2), 44100, "PCM_16")}
    shard = write_tar(tmp_path / "a.tar", members(clips))
    assert run(shard, tmp_path / "wav", "--kind", "waveform") == 0
    lengths = (0.3, 1, 0.7, 0.5, 0.9, 0.4, 2.5)
    for (name, item), seconds in zip(items_in(tmp_path / "wav").items(), lengths, strict=True):
        with soundfile.SoundFile(io.BytesIO(item["wav"])) as file:
            assert (file.samplerate, file.channels, file.subtype) == (RATE, 1, "PCM_16")
            samples = file.read(dtype="int16")
        assert len(samples) == seconds * RATE
        np.testing.assert_array_equal(samples, live(clips[name], len(samples)))
    assert run(shard, tmp_path / "mel", "--kind", "mel") == 0
    assert run(tmp_path / "wav" / "a.tar", tmp_path / "twice", "--kind", "mel") == 0
    assert (tmp_path / "mel" / "a.tar").read_bytes() == (tmp_path / "twice" / "a.tar").read_bytes()


def test_long_clips_are_stored_whole(tmp_path: Path) -> None:
    """Features of longer clips are equal whether computed in parts or at once."""
    clip = wav(sound(4 + 1 / RATE), RATE, "PCM_16")
    length = 4 * RATE
    assert (
        run(
            write_tar(tmp_path / "a.tar", members({"long": clip})),
            tmp_path / "mel",
            "--kind",
            "mel",
        )
        == 0
    )
    (item,) = items_in(tmp_path / "mel").values()
    log_mel = LogMel(MICRO.audio.model_copy(update={"num_samples": length}))
    expected = log_mel(live(clip, length + 1)[None, :length].float() / INT16_SCALE)[0].numpy()
    np.testing.assert_allclose(np.load(io.BytesIO(item["npy"])), expected, rtol=0, atol=HALF_STEP)


def test_the_same_command_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished shards stay, no partial ones remain, and those without a record are written
    again."""
    out = tmp_path / "out"
    for n in range(4):
        write_tar(
            tmp_path / f"{n}.tar", members({f"clip{n}": wav(sound(0.1, seed=n), RATE, "PCM_16")})
        )
    clip = prepare.Preparation.convert
    num_read = 0
    is_failing = True

    def fail(*arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if is_failing and num_read >= 3:  # also for items that a worker still starts
            raise OSError(28, os.strerror(28))
        return clip(*arguments)

    monkeypatch.setattr(prepare.Preparation, "convert", fail)
    command = [f"{tmp_path}/*.tar", out, "--kind", "mel"]
    assert run(*command) == 2
    is_failing = False
    finished = {path: path.stat().st_mtime_ns for path in sorted(out.glob("*.tar"))}
    assert len(finished) == 2
    assert not (out / "manifest.json").exists()
    (out / ".build" / "1.tar.json").unlink()  # as if killed between a shard and its record
    assert run(*command) == 0
    assert "1 of 4 shards already exist" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns == time_ns for path, time_ns in finished.items()] == [
        True,
        False,
    ]
    assert sorted(items_in(out)) == ["clip0", "clip1", "clip2", "clip3"]
    assert not list(out.glob(".*.tar.*"))
    for name, record in read_manifest(str(out)).shards.items():
        assert record.sha256 == hashlib.sha256((out / name).read_bytes()).hexdigest()
