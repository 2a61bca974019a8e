"""Test which audio files are merged, converted, or skipped as unreadable or truncated."""

import io
import os
from pathlib import Path

import numpy as np
import soundfile

from tests.data.builds import (
    RATE,
    fields_in,
    items_by_source,
    reasons_in,
    run,
    tone,
    write_list,
)
from tests.data.tars import encode, wav


def write_copies(folder: Path, num_sounds: int = 5) -> Path:
    """Write sounds with equal beginnings, each as it is, as FLAC and as stereo, and a CSV of
    them."""
    rows = ["path,caption,kind,take"]
    for number in range(num_sounds):
        samples = np.concatenate([tone(0, 3.0), tone(number)])
        sound = wav(samples, RATE, "PCM_16")
        decoded, _ = soundfile.read(io.BytesIO(sound))
        copies = {
            "a.wav": sound,
            "c.flac": encode(decoded, RATE, "FLAC", "PCM_16"),
            "d.wav": wav(np.stack([decoded, decoded], axis=1), RATE),
        }
        for copy, (name, content) in enumerate(copies.items()):
            (folder / f"{number} {name}").write_bytes(content)
            rows.append(f"{number} {name},sound {number} caption {copy},kind {copy % 2},1")
    path = folder / "copies.csv"
    path.write_text("\n".join(rows))
    return path


def test_equal_audio_becomes_one_item_with_all_captions(tmp_path, capsys):
    assert run(write_copies(tmp_path), tmp_path / "out", "--held_out", 1) == 0
    assert "merged 10 of 15 files" in capsys.readouterr().out
    fields = fields_in(tmp_path / "out")
    assert fields.keys() == {f"{number} a.wav" for number in range(5)}
    for number in range(5):
        item = fields[f"{number} a.wav"]
        assert item["caption"] == [f"sound {number} caption {copy}" for copy in range(3)]
        assert item["kind"] == ["kind 0", "kind 1"]
        assert item["take"] == "1"


def test_unusable_files_are_each_listed_with_reason(tmp_path):
    """Also if their contents are equal. Reading a pipe without a writer would block forever."""
    mute = wav(np.zeros(99))
    contents = {"text.wav": b"no audio", "mute.wav": mute, "copy.wav": mute}
    names = (*contents, "pipe.wav", "gone.wav")
    path = write_list(tmp_path, 1, "".join(f"audio/{name},x\n" for name in names))
    for name, content in contents.items():
        (tmp_path / "audio" / name).write_bytes(content)
    os.mkfifo(tmp_path / "audio" / "pipe.wav")
    assert run(path, tmp_path / "out") == 0
    assert items_by_source(tmp_path / "out").keys() == {"clip 00.wav"}
    reasons = reasons_in(tmp_path / "out")
    assert reasons.keys() == {*names}
    assert "decoded" in reasons["text.wav"]
    assert "silent" in reasons["mute.wav"]


def test_format_unknown_to_training_becomes_flac(tmp_path):
    stereo = np.stack([tone(0, 1.0), np.zeros(RATE)], axis=1)
    path = write_list(tmp_path, 1, "b.aiff,x\n")
    (tmp_path / "b.aiff").write_bytes(encode(stereo, RATE, "AIFF"))
    assert run(path, tmp_path / "out") == 0
    items = items_by_source(tmp_path / "out")
    original = (tmp_path / "audio" / "clip 00.wav").read_bytes()
    assert items["clip 00.wav"]["wav"] == original
    samples, rate = soundfile.read(io.BytesIO(items["b.aiff"]["flac"]))
    assert rate == RATE
    np.testing.assert_allclose(samples, stereo.mean(axis=1), atol=1e-4)
