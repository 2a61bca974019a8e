"""Test windows of files of any length: equal to the whole file's, in constant memory, all formats,
unusable files."""

import contextlib
import itertools
import resource
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.decoding import resample, resampling_ratio
from clap_ds.inference import audio_windows
from clap_ds.inference.audio_windows import Window, read_windows
from tests.inference.conftest import noise, write_sound

AUDIO = load_preset("micro").audio


def windows_of(path: str, overlap: float = 0.0) -> list[Window]:
    return [*read_windows([path], AUDIO, "none", overlap, num_workers=0, ahead=1)]


@pytest.mark.parametrize(
    ("name", "rate", "overlap"),
    [("a.wav", 44100, 0), ("a.mp3", 8000, 0.5), ("a.ogg", 48000, 0.5)],
)
def test_windows_equal_parts_of_the_whole_file(tmp_path, name, rate, overlap, monkeypatch):
    # Shorter than a window, and no multiple of the filters' period.
    monkeypatch.setattr(audio_windows, "_BLOCK", 7001)
    path = write_sound(tmp_path / name, noise(4.3, rate, 2), rate)
    samples, _ = soundfile.read(path, dtype="float32", always_2d=True)
    whole = torch.from_numpy(samples.mean(axis=1))
    if rate != 48000:
        whole = resample(whole, resampling_ratio(rate, 48000))
    hop = round(48000 * (1 - overlap))
    last_start = len(whole) - 48000
    starts = sorted({*range(0, last_start + 1, hop), last_start})
    *windows, (_, end) = windows_of(path, overlap)
    assert end is None
    times = [(row.start_s, row.end_s) for row, _ in windows]
    assert times == [(start / 48000, start / 48000 + 1) for start in starts]
    for start, (_, waveform) in zip(starts, windows, strict=True):
        # Sums of about 140 products of samples up to 1, in another order.
        torch.testing.assert_close(waveform, whole[start : start + 48000], rtol=0, atol=2e-6)


def test_memory_is_constant_for_long_files(tmp_path, monkeypatch):
    # 18 minutes: 210 MB, or 420 resampled.
    block = audio_windows._BLOCK
    blocks = itertools.repeat(np.full((block, 2), 0.25, np.float32), 200)
    endless = SimpleNamespace(
        read=lambda *_, **__: next(blocks, []), frames=200 * block, samplerate=24000
    )
    monkeypatch.setattr(audio_windows, "open_audio", lambda _: contextlib.nullcontext(endless))
    path = write_sound(tmp_path / "a.wav", noise(0.1))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = read_windows([path], AUDIO, "none", 0.0, num_workers=0, ahead=1)
    num_windows = sum(1 for _ in stream)
    assert num_windows == 2 * 200 * block // 48000 + 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


def test_mean_pooling_normalizes_the_sum_of_windows(clap, tmp_path):
    sound = write_sound(tmp_path / "long.wav", noise(3.5))
    rows = list(clap.iter_windows([sound], overlap=0.25))
    assert [row.start_s for row in rows] == [0, 0.75, 1.5, 2.25, 2.5]
    total = np.sum([row.vector for row in rows], axis=0)
    (pooled,) = clap.iter_windows([sound], pooling="mean", overlap=0.25)
    assert (pooled.start_s, pooled.end_s) == (0, 3.5)
    # Roundings of numbers below 1.
    np.testing.assert_allclose(pooled.vector, total / np.linalg.norm(total), atol=3e-7)


def test_unusable_files_are_rows_in_their_place(clap, tmp_path, monkeypatch):
    monkeypatch.setattr(audio_windows, "_BLOCK", 7001)
    write_sound(tmp_path / "a.wav", noise(1.5))
    write_sound(tmp_path / "silent.wav", np.zeros((1, 100_000)))
    content = Path(write_sound(tmp_path / "cut.flac", noise(4))).read_bytes()
    (tmp_path / "cut.flac").write_bytes(content[: len(content) // 3])
    # The windows before the damage, and then a row with the error.
    num_rows = {"gone.wav": 1, "a.wav": 2, "silent.wav": 3, "cut.flac": 2}
    sources = [tmp_path / name for name in num_rows]
    rows = list(clap.iter_windows(sources, num_workers=2, batch_size=2))
    assert Counter(Path(row.source).name for row in rows) == num_rows
    errors = [(Path(row.source).name, row.error) for row in rows if row.vector is None]
    assert [name for name, _ in errors] == ["gone.wav", "silent.wav", "cut.flac"]
    assert "No such file" in errors[0][1]
    assert "silent" in errors[1][1]
    pooled = list(clap.iter_windows(sources, pooling="mean"))
    assert [bool(row.error) for row in pooled] == [True, False, True, True]
