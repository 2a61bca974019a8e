"""Test windows of files of any length: equal to the whole file's, in constant memory, all formats,
broken files."""

import contextlib
import itertools
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.data.decoding import resample, resampling_ratio
from clap_ds.inference import audio_windows
from clap_ds.inference.audio_windows import read_windows
from clap_ds.inference.model import Clap
from tests.inference.conftest import noise, write_sound


@pytest.mark.parametrize(
    ("name", "rate", "overlap"),
    [("a.wav", 44100, 0), ("a.flac", 8000, 0.5), ("a.mp3", 44100, 0.5), ("a.ogg", 48000, 0)],
)
def test_windows_are_those_of_the_whole_file(
    clap: Clap,
    tmp_path: Path,
    name: str,
    rate: int,
    overlap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        audio_windows, "_BLOCK", 7001
    )  # shorter than a window, and no multiple of the filters' period
    path = write_sound(tmp_path / name, noise(4.3, rate, 2), rate)
    samples, _ = soundfile.read(path, dtype="float32", always_2d=True)
    mono = torch.from_numpy(samples.mean(axis=1))
    whole = mono if rate == 48000 else resample(mono, resampling_ratio(rate, 48000))
    hop = round(48000 * (1 - overlap))
    starts = sorted({*range(0, len(whole) - 48000 + 1, hop), len(whole) - 48000})
    found = list(read_windows([path], clap.config.audio, "none", overlap, num_workers=0, ahead=1))
    assert found.pop()[1] is None
    assert [(row.start_s, row.end_s) for row, _ in found] == [
        (n / 48000, n / 48000 + 1) for n in starts
    ]
    for start, (_, waveform) in zip(starts, found, strict=True):
        # Sums of about 140 products of samples up to 1, in another order.
        torch.testing.assert_close(waveform, whole[start : start + 48000], rtol=0, atol=2e-6)


def test_memory_does_not_grow_with_the_file(
    clap: Clap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 18 minutes: 210 MB, or 420 resampled.
    blocks = itertools.repeat(np.full((audio_windows._BLOCK, 2), 0.25, np.float32), 200)
    endless = SimpleNamespace(
        read=lambda *_, **__: next(blocks, []), frames=200 * audio_windows._BLOCK, samplerate=24000
    )
    monkeypatch.setattr(audio_windows, "open_audio", lambda _: contextlib.nullcontext(endless))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = write_sound(tmp_path / "a.wav", noise(0.1))
    number = sum(
        1 for _ in read_windows([path], clap.config.audio, "none", 0.0, num_workers=0, ahead=1)
    )
    assert number == 2 * 200 * audio_windows._BLOCK // 48000 + 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_means(clap: Clap, tmp_path: Path) -> None:
    long = write_sound(tmp_path / "long.wav", noise(3.5))
    short = write_sound(tmp_path / "short.wav", noise(0.7))
    rows = list(clap.iter_windows([long, short], overlap=0.25))
    assert [row.source for row in rows] == [long] * 5 + [short]
    assert [row.start_s for row in rows] == [0, 0.75, 1.5, 2.25, 2.5, 0]
    total = np.mean([row.vector for row in rows[:5]], axis=0)
    mean, alone = clap.iter_windows([long, short], pooling="mean", overlap=0.25)
    assert (mean.start_s, mean.end_s, alone.start_s, alone.end_s) == (0, 3.5, 0, 0.7)
    np.testing.assert_allclose(
        mean.vector, total / np.linalg.norm(total), atol=3e-7
    )  # roundings of numbers below 1
    assert np.array_equal(alone.vector, rows[5].vector)


@pytest.mark.parametrize(("which", "num_workers"), [("none", 2), ("mean", 0)])
def test_what_is_broken_is_a_row_in_its_place(
    clap: Clap, tmp_path: Path, which: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_windows, "_BLOCK", 7001)
    late = noise(4)
    whole = noise(4)
    late[:, :72000] = late[:, 90000:] = 0  # silent windows before and after one with sound
    paths = [
        write_sound(tmp_path / f"{name}.wav", made)
        for name, made in (("a", noise(1.5)), ("late", late))
    ]
    write_sound(tmp_path / "silent.wav", np.zeros((1, 100_000)))
    content = Path(write_sound(tmp_path / "cut.flac", whole)).read_bytes()
    (tmp_path / "cut.flac").write_bytes(content[: len(content) // 3])
    (tmp_path / "text.wav").write_text("no sound")
    broken = [tmp_path / name for name in ("gone.wav", ".", "silent.wav", "cut.flac", "text.wav")]
    sources = [paths[0], broken[0], paths[1], *broken[1:]]
    rows = list(clap.iter_windows(sources, pooling=which, num_workers=num_workers, batch_size=2))
    errors = {Path(row.source).name: row.error for row in rows if row.vector is None}
    assert errors.keys() == {"gone.wav", tmp_path.name, "silent.wav", "cut.flac", "text.wav"}
    assert "No such file" in errors["gone.wav"]
    assert "silent" in errors["silent.wav"]
    number = {"none": {"a.wav": 2, "late.wav": 4, "silent.wav": 3, "cut.flac": 2}, "mean": {}}[
        which
    ]
    assert [Path(row.source).name for row in rows] == [
        Path(source).name for source in sources for _ in range(number.get(Path(source).name, 1))
    ]
