"""Test that prepared shards equal live decoding, and interrupted commands resume."""

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

from clap_ds import shards
from clap_ds.config.model import INT16_SCALE, load_preset
from clap_ds.data.build_shards import prepare
from clap_ds.data.decoding import decode_audio
from clap_ds.data.shard_manifest import front_end_of, read_manifest
from clap_ds.model.mel import LogMel
from clap_ds.utils.errors import exit_code_of
from tests.data.tars import items_in, wav, write_tar
from tests.inference.conftest import noise

AUDIO = load_preset("micro").audio
"""Clips of one second."""
RATE = AUDIO.sample_rate
# dB: half of float16's spacing below 128, and kernels' differences
HALF_STEP = 2**-5 + 1e-4


CLIPS = {
    # file, seconds
    "short": (wav(noise(0.3).T, RATE, "PCM_16"), 0.3),
    "exact": (wav(noise(1.0).T, RATE, "PCM_16"), 1.0),
    "slow": (wav(noise(0.5, 8000).T, 8000, "PCM_16"), 0.5),
    "odd": (wav(noise(0.9, 44100, 2).T, 44100, "PCM_24"), 0.9),
    # clipped at full scale
    "float": (wav(3 * noise(0.4).T, RATE, "FLOAT"), 0.4),
    "long": (wav(noise(2.5, 44100, 2).T, 44100, "PCM_16"), 2.5),
}


def write_clips(path: Path, clips: dict[str, bytes]) -> Path:
    members = []
    for name, clip in clips.items():
        fields = json.dumps({"caption": f"a sound, {name}", "kind": name})
        members += [(f"{name}.wav", clip), (f"{name}.json", fields.encode())]
    return write_tar(path, members)


def run(*arguments: object) -> int:
    command = ["prepare", *map(str, arguments), "--preset", "micro", "--workers", "1"]
    return exit_code_of(lambda: shards.main(command))


def decode(clip: bytes, num_samples: int = RATE) -> torch.Tensor:
    """Decode like a run with `audio_dtype: int16`, (num_samples,) int16."""
    row = torch.empty(num_samples, dtype=torch.int16)
    decode_audio(clip, row, sample_rate=RATE, rng=random.Random(0))
    return row


def test_prepared_mel_equals_live_features(tmp_path):
    """Short clips are repeated. Longer ones stay whole, and end at a frame."""
    names = ("short", "slow", "odd", "exact", "long")
    clips = {name: CLIPS[name][0] for name in names}
    shard = write_clips(tmp_path / "a.tar", clips)
    assert run(shard, tmp_path / "mel", "--kind", "mel") == 0
    items = items_in(tmp_path / "mel")
    assert list(items) == list(clips)
    log_mel = LogMel(AUDIO)
    for name, item in items.items():
        num_samples = 5 * RATE // 2 if name == "long" else RATE
        samples = decode(clips[name], num_samples)[None].float() / INT16_SCALE
        expected = log_mel.of_any_length(samples)[0].numpy()
        features = np.load(io.BytesIO(item["npy"]))
        np.testing.assert_allclose(features, expected, rtol=0, atol=HALF_STEP)
        assert item.keys() == {"npy", "json"}
        assert json.loads(item["json"]) == {"caption": f"a sound, {name}", "kind": name}
    manifest = read_manifest(str(tmp_path / "mel"))
    assert (manifest.kind, manifest.front_end) == ("mel", front_end_of(AUDIO))
    assert manifest.shards["a.tar"].seconds == pytest.approx(5.2)


def test_prepared_waveform_equals_live_decoding(tmp_path):
    shard = write_clips(tmp_path / "a.tar", {name: clip for name, (clip, _) in CLIPS.items()})
    assert run(shard, tmp_path / "wav", "--kind", "waveform") == 0
    for name, item in items_in(tmp_path / "wav").items():
        clip, seconds = CLIPS[name]
        with soundfile.SoundFile(io.BytesIO(item["wav"])) as file:
            assert (file.samplerate, file.channels, file.subtype) == (RATE, 1, "PCM_16")
            samples = file.read(dtype="int16")
        assert len(samples) == seconds * RATE
        np.testing.assert_array_equal(samples, decode(clip, len(samples)))


def test_tokenizer_beside_shards_is_copied_without_links_outside(tmp_path):
    shard = write_clips(tmp_path / "a.tar", {"short": CLIPS["short"][0]})
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "merges.txt").symlink_to(shard)
    assert run(shard, tmp_path / "wav", "--kind", "waveform") == 0
    assert [path.name for path in (tmp_path / "wav" / "tokenizer").iterdir()] == ["tokenizer.json"]


def test_interrupted_prepare_resumes(tmp_path, capsys, monkeypatch):
    """Finished shards stay, no partial ones remain, and those without a record are written
    again."""
    out = tmp_path / "out"
    for number in range(4):
        write_clips(tmp_path / f"{number}.tar", {f"clip{number}": CLIPS["short"][0]})
    convert = prepare.Preparation.convert
    disk = iter("ab")

    def fill_disk(*arguments: Any) -> Any:
        # also for items that a worker still starts
        if next(disk, None) is None:
            raise OSError(28, os.strerror(28))
        return convert(*arguments)

    command = [f"{tmp_path}/*.tar", out, "--kind", "mel"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare.Preparation, "convert", fill_disk)
        assert run(*command) == 2
    first, _ = sorted(out.glob("*.tar"))
    written_ns = first.stat().st_mtime_ns
    assert not (out / "manifest.json").exists()
    # as if killed between a shard and its record
    (out / ".build" / "1.tar.json").unlink()
    assert run(*command) == 0
    assert "1 of 4 shards already exist" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == written_ns
    assert sorted(items_in(out)) == ["clip0", "clip1", "clip2", "clip3"]
    for name, record in read_manifest(str(out)).shards.items():
        assert record.sha256 == hashlib.sha256((out / name).read_bytes()).hexdigest()
