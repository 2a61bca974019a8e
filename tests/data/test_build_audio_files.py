"""Test which audio files are merged, converted, or skipped as unreadable or truncated."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
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


def test_rows_of_one_file_become_one_item(tmp_path: Path) -> None:
    """Captions and other columns of all rows are kept."""
    path = write_list(tmp_path, 2)
    path.write_text(
        "path,caption,take\n"
        "audio/clip 00.wav,x,1\n"
        "audio/clip 01.wav,y,1\n"
        "./audio/../audio/clip 00.wav,again,2\n"
    )
    assert run(path, tmp_path / "out") == 0
    fields = fields_in(tmp_path / "out")
    assert fields["clip 00.wav"]["caption"] == ["x", "again"]
    assert fields["clip 00.wav"]["take"] == ["1", "2"]
    assert fields["clip 01.wav"]["take"] == "1"


def test_pipe_and_missing_file_are_skipped(tmp_path: Path) -> None:
    """Reading a pipe without a writer would block forever."""
    path = write_list(tmp_path, 1, "audio/pipe.wav,x\naudio/gone.wav,x\n")
    os.mkfifo(tmp_path / "audio" / "pipe.wav")
    assert run(path, tmp_path / "out") == 0
    assert reasons_in(tmp_path / "out").keys() == {"pipe.wav", "gone.wav"}


def with_tag(content: bytes, text: bytes) -> bytes:
    """Append a chunk of metadata to a WAV."""
    info = b"INFOINAM" + len(text).to_bytes(4, "little") + text
    chunk = b"LIST" + len(info).to_bytes(4, "little") + info
    size = len(content) + len(chunk) - 8
    return content[:4] + size.to_bytes(4, "little") + content[8:] + chunk


def write_copies(folder: Path, num_sounds: int = 5) -> Path:
    """Write sounds with equal beginnings, each as it is, copied, with a tag, as FLAC and as stereo,
    and a CSV of them."""
    rows = ["path,caption,kind,split"]
    for number in range(num_sounds):
        samples = np.concatenate([tone(0, 3.0), tone(number)])
        sound = wav(samples, RATE, "PCM_16")
        decoded, _ = soundfile.read(io.BytesIO(sound))
        copies = {
            "a.wav": sound,
            "b.wav": sound,
            "tag.wav": with_tag(sound, b"name"),
            "c.flac": encode(decoded, RATE, "FLAC", "PCM_16"),
            "d.wav": wav(np.stack([decoded, decoded], axis=1), RATE),
        }
        for copy, (name, content) in enumerate(copies.items()):
            (folder / f"{number} {name}").write_bytes(content)
            split = "test" if copy == number % 7 and number < 3 else "train"
            rows.append(f"{number} {name},sound {number} caption {copy},kind {copy % 2},{split}")
    path = folder / "copies.csv"
    path.write_text("\n".join(rows))
    return path


def test_equal_audio_becomes_one_item_with_all_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write_copies(tmp_path), tmp_path / "out", "--held_out", 1) == 0
    assert "merged 20 of 25 files" in capsys.readouterr().out
    fields = fields_in(tmp_path / "out")
    assert fields.keys() == {f"{number} a.wav" for number in range(5)}
    for number in range(5):
        item = fields[f"{number} a.wav"]
        assert item["caption"] == [f"sound {number} caption {copy}" for copy in range(5)]
        assert item["kind"] == ["kind 0", "kind 1"]


def test_equal_audio_of_both_splits_is_held_out(tmp_path: Path) -> None:
    assert run(write_copies(tmp_path), tmp_path / "out", "--split_column", "split") == 0
    assert len(fields_in(tmp_path / "out", "held_out-*.tar")) == 3
    assert len(fields_in(tmp_path / "out", "train-*.tar")) == 2


def build(folder: Path, files: dict[str, bytes]) -> tuple[set[str], dict[str, str]]:
    """Return the names of files that become items, and the reasons for the others."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "list.csv").write_text("path,caption\n" + "".join(f"{name},x\n" for name in files))
    assert run(folder / "list.csv", folder / "out") == 0
    return set(items_by_source(folder / "out")), reasons_in(folder / "out")


def test_unusable_files_are_each_listed_with_reason(tmp_path: Path) -> None:
    """Also if their contents are equal."""
    mute = wav(np.zeros(99))
    files = {"text.wav": b"no audio", "mute.wav": mute, "copy.wav": mute}
    used, reasons = build(tmp_path, files | {"tone.wav": wav(tone(0), RATE)})
    assert used == {"tone.wav"}
    assert reasons.keys() == files.keys()
    assert "decoded" in reasons["text.wav"]
    assert "silent" in reasons["mute.wav"]


def test_format_unknown_to_training_becomes_flac(tmp_path: Path) -> None:
    stereo = np.stack([tone(0, 1.0), np.zeros(RATE)], axis=1)
    files = {"a.wav": wav(tone(1), RATE), "b.aiff": encode(stereo, RATE, "AIFF")}
    used, _ = build(tmp_path, files)
    assert used == files.keys()
    items = items_by_source(tmp_path / "out")
    assert items["a.wav"]["wav"] == files["a.wav"]
    samples, rate = soundfile.read(io.BytesIO(items["b.aiff"]["flac"]))
    assert rate == RATE
    np.testing.assert_allclose(samples, stereo.mean(axis=1), atol=1e-4)
