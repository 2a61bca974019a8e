"""Test which audio files are merged, converted, or skipped as unreadable or truncated."""

import contextlib
import io
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.decoding import BrokenItemError, decode_audio
from clap_ds.inference.audio_windows import read_windows
from tests.data.builds import RATE, items_by_source, reasons_in, run, tone, write_list
from tests.data.tars import wav

NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 8 * RATE)


def test_rows_of_a_file_are_one_item_and_only_regular_files_are_read(tmp_path: Path) -> None:
    """Captions and other columns of all rows are kept. Reading a pipe without a writer would block
    forever."""
    path = write_list(
        tmp_path,
        2,
        "./audio/../audio/clip 00.wav,again,2\naudio/pipe.wav,x,1\naudio/gone.wav,x,1\n",
    )
    path.write_text(
        path.read_text().replace("path,caption", "path,caption,take").replace("wav\n", "wav,1\n")
    )
    os.mkfifo(tmp_path / "audio" / "pipe.wav")
    assert run(path, tmp_path / "out") == 0
    found = {
        name: json.loads(item["json"]) for name, item in items_by_source(tmp_path / "out").items()
    }
    assert {name: (each["caption"], each["take"]) for name, each in found.items()} == {
        "clip 00.wav": (["a tone clip 00.wav", "again"], ["1", "2"]),
        "clip 01.wav": ("a tone clip 01.wav", "1"),
    }
    assert reasons_in(tmp_path / "out").keys() == {"pipe.wav", "gone.wav"}


def build_one(folder: Path, files: dict[str, bytes]) -> tuple[set[str], dict[str, str]]:
    """Return the names of files that become items, and the reasons for the others."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "list.csv").write_text("path,caption\n" + "".join(f"{name},x\n" for name in files))
    assert run(folder / "list.csv", folder / "out") == 0
    return set(items_by_source(folder / "out")), reasons_in(folder / "out")


def with_tag(content: bytes, text: bytes) -> bytes:
    """Append a chunk of metadata to a WAV."""
    chunk = (
        b"LIST"
        + (len(text) + 12).to_bytes(4, "little")
        + b"INFOINAM"
        + len(text).to_bytes(4, "little")
        + text
    )
    return content[:4] + (len(content) + len(chunk) - 8).to_bytes(4, "little") + content[8:] + chunk


def converted(content: bytes, file_format: str, subtype: str, channels: int = 1) -> bytes:
    samples, rate = soundfile.read(io.BytesIO(content), always_2d=True)
    soundfile.write(
        buffer := io.BytesIO(),
        np.repeat(samples, channels, axis=1),
        rate,
        subtype,
        format=file_format,
    )
    return buffer.getvalue()


def write_copies(folder: Path, num_sounds: int = 10) -> Path:
    """Write sounds with equal beginnings, each as it is, copied, with a tag, as FLAC and as stereo,
    and a CSV of them."""
    beginning = tone(0, 3.0)
    rows = ["path,caption,kind,split"]
    for number in range(num_sounds):
        sound = wav(np.concatenate([beginning, tone(number)]), RATE, "PCM_16")
        copies = {
            "a.wav": sound,
            "b.wav": sound,
            "tag.wav": with_tag(sound, b"name"),
            "c.flac": converted(sound, "FLAC", "PCM_16"),
            "d.wav": converted(sound, "WAV", "FLOAT", channels=2),
        }
        for place, (name, content) in enumerate(copies.items()):
            (folder / f"{number} {name}").write_bytes(content)
            split = "test" if place == number % 7 else "train"
            rows.append(f"{number} {name},sound {number} caption {place},kind {place % 2},{split}")
    path = folder / "copies.csv"
    path.write_text("\n".join(rows))
    return path


def test_files_of_equal_audio_are_one_item_with_the_captions_and_classes_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write_copies(tmp_path), tmp_path / "out", "--held_out", 1) == 0
    assert "merged 40 of 50 files" in capsys.readouterr().out
    items = items_by_source(tmp_path / "out")
    assert items.keys() == {f"{number} a.wav" for number in range(10)}
    for number in range(10):
        described = json.loads(items[f"{number} a.wav"]["json"])
        assert described["caption"] == [f"sound {number} caption {place}" for place in range(5)]
        assert described["kind"] == ["kind 0", "kind 1"]


@pytest.mark.parametrize(
    ("options", "num_held_out"),
    [
        (("--held_out", 0.2), 2),
        (("--split_column", "split"), 8),
        (("--fold_column", "split", "--held_out_fold", "test"), 8),
    ],
)
def test_no_audio_is_in_both_sets(
    tmp_path: Path, options: tuple[object, ...], num_held_out: int
) -> None:
    """With a column, audio of both sets is held out."""
    assert run(write_copies(tmp_path), tmp_path / "out", *options) == 0
    sides = [items_by_source(tmp_path / "out", f"{side}-*.tar") for side in ("train", "held_out")]
    train, held_out = (
        {json.loads(item["json"])["caption"][0].split()[1] for item in side.values()}
        for side in sides
    )
    assert (len(train), len(held_out), len(train & held_out)) == (
        10 - num_held_out,
        num_held_out,
        0,
    )


def test_unusable_files_of_equal_content_are_each_listed(tmp_path: Path) -> None:
    mute = wav(np.zeros(99))
    cut = encoded("PCM_16", "WAV")[:5000]
    files = {
        "a mute.wav": mute,
        "b mute.wav": mute,
        "a cut.wav": cut,
        "b cut.wav": cut,
        "tone.wav": wav(tone(0), RATE),
    }
    used, reasons = build_one(tmp_path, files)
    assert (used, reasons.keys()) == ({"tone.wav"}, files.keys() - {"tone.wav"})


def encoded(subtype: str, file_format: str) -> bytes:
    soundfile.write(buffer := io.BytesIO(), NOISE, RATE, format=file_format, subtype=subtype)
    return buffer.getvalue()


def test_files_whose_end_is_missing_are_of_no_use_wherever_they_are_read(tmp_path: Path) -> None:
    names = [
        "PCM_16.WAV",
        "PCM_16.AIFF",
        "PCM_16.FLAC",
        "VORBIS.OGG",
        "OPUS.OGG",
        "MPEG_LAYER_III.MP3",
    ]
    whole = {name: encoded(*name.split(".")) for name in names}
    cut = {
        f"{part} {name}": whole[name][: int(len(whole[name]) * part)]
        for name in names
        for part in (0.33, 0.97)
    }
    start, samples = whole[names[0]].split(b"data", 1)
    for sizes in (
        (8, 0),
        (0, 256_000),
        (0, 2**32 - 1),
        (2**32 - 1, 2**32 - 1),
        (0x7FFFF024, 0x7FFFF000),
    ):  # streamed
        of_file, of_samples = (size.to_bytes(4, "little") for size in sizes)
        whole[f"stream {sizes[0]} {sizes[1]}.wav"] = (
            start[:4] + of_file + start[8:] + b"data" + of_samples + samples[4:]
        )
    whole["before a cut chunk.wav"] = whole[names[0]] + b"LIST" + 99 * b"\x01"
    used, reasons = build_one(tmp_path, whole | cut)
    equal = whole.keys() - {
        "PCM_16.WAV",
        *names[2:],
    }  # the first one's samples; FLAC is written with other rounding
    assert (used, reasons.keys()) == (whole.keys() - equal, cut.keys())
    assert all("truncated" in reason or "lost sync" in reason for reason in reasons.values())
    paths = [tmp_path / name for name in whole | cut]
    audio = load_preset("micro").audio
    rows = [row for row, _ in read_windows(paths, audio, "none", 0, num_workers=0, ahead=1)]
    assert {Path(row.source).name for row in rows if row.error} == cut.keys()
    for name, content in (whole | cut).items():
        with pytest.raises(BrokenItemError) if name in cut else contextlib.nullcontext():
            decode_audio(content, torch.zeros(9 * RATE), sample_rate=RATE, rng=random.Random(0))


def test_other_audio_of_no_use_is_left_out_and_what_training_cannot_read_becomes_flac(
    tmp_path: Path,
) -> None:
    stereo = np.stack([tone(0, 1.0), np.zeros(RATE)], axis=1)
    soundfile.write(aiff := io.BytesIO(), stereo, RATE, format="AIFF")
    files = {"a.wav": wav(stereo, RATE), "b.aiff": aiff.getvalue()}
    bad = {
        "text.wav": b"no audio",
        "mute.wav": wav(np.zeros(99)),
        "nan.wav": wav(np.full(99, np.nan)),
        "slow.wav": wav(tone(0), 1),
    }
    used, reasons = build_one(tmp_path, files | bad)
    assert used == files.keys()
    for name, word in zip(
        bad, ("decoded", "silent", "peaks at nan", "sample rate of 1 Hz"), strict=True
    ):
        assert word in reasons[name]
    items = items_by_source(tmp_path / "out")
    assert items["a.wav"]["wav"] == files["a.wav"]
    found, rate = soundfile.read(io.BytesIO(items["b.aiff"]["flac"]))
    assert rate == RATE
    np.testing.assert_allclose(found, stereo.mean(axis=1), atol=1e-4)
