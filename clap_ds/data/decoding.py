"""Encoded audio becomes a waveform of the model's length and rate."""

from __future__ import annotations

import functools
import io
import math
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from clap_ds.data.batch import INT16_SCALE, to_int16
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.resampling import resample, resampling_ratio

AUDIO_FORMATS = ("flac", "wav", "ogg", "mp3")

_MP3_LEAD_IN_SECONDS = 30
_INTEGERS = ("PCM_16", "PCM_S8", "PCM_U8")  # libsndfile's names of samples that int16 holds
_MOST_SEARCHED = 2**24  # frames: hours of silence take a megabyte of FLAC, and gigabytes of memory
_LOUDEST = 1e15  # the square of the sum of a window of such samples still is finite in 32 bits
_BLOCK = 65536  # frames mixed at a time, so that they stay in the cache
_RATES = range(1000, 10**6 + 1)  # Hz; a second of a lower one would become an hour


Encoded = bytes | memoryview
"""A file's content."""


def decode_audio(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Write a clip as the model takes it to `row`: mono, at `sample_rate` (Hz), as long as `row`. Return its length before
    repeating.

    Longer audio is cropped at a place drawn from `rng`, or about its loudest sample where that place is silent. Shorter audio
    is repeated as often as it fits, then padded with zeros (LAION-CLAP's "repeatpad"). `row` is contiguous on the CPU, float32
    of full scale ±1 or int16 (see `to_int16`). BrokenItemError where nothing can be decoded or heard.
    """
    found = decode_part(encoded, row, sample_rate=sample_rate, rng=rng)
    repeat(row.numpy(), found)
    return found


def decode_part(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Decode as `decode_audio`, but leave `row` as it is behind the returned number of samples."""
    target = row.numpy()
    with open_audio(encoded) as file:
        ratio = resampling_ratio(file.samplerate, sample_rate)
        expected = min(file.frames, math.ceil(len(target) / ratio))
        mixed = target[:expected] if ratio == 1 else np.empty(expected, np.float32)
        start = rng.randint(0, file.frames - expected)
        is_wav = file.subtype == "PCM_16" and file.format in ("WAV", "WAVEX")
        samples = _in_wav(encoded, file.channels, start, expected) if is_wav else None
        if samples is None:
            samples = _read_at(file, start, expected)
        found, is_silent = mix(samples, mixed)
        if expected < file.frames and found and is_silent:
            found, is_silent = mix(_about_loudest(file, expected), mixed)
    check_samples(found, expected, is_silent)
    if ratio != 1:
        waveform = resample(torch.from_numpy(mixed[:found]), ratio)[: len(target)]
        found = len(waveform)
        row[:found] = to_int16(waveform) if row.dtype == torch.int16 else waveform
    return found


class _View:
    """A memoryview as a file: of a mapped tar, only the parts that are decoded are read. io.BytesIO would copy all of it."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._place = content, 0

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._content)}[whence]

    def tell(self) -> int:
        return self._place


@contextmanager
def open_audio(encoded: Encoded | str) -> Iterator[soundfile.SoundFile]:
    """Open an encoded file, or a path to one, for decoding; raises BrokenItemError where that fails, inside the `with` too."""
    content = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    try:
        with soundfile.SoundFile(_View(content) if isinstance(content, memoryview) else content) as file:
            if file.samplerate not in _RATES:
                raise BrokenItemError(f"audio has a sample rate of {file.samplerate} Hz: expected 1 kHz to 1 MHz")
            yield file
    except BrokenItemError:
        raise
    except (soundfile.SoundFileError, MemoryError, ValueError, OverflowError) as error:  # the last of odd lengths
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(f"audio can't be decoded: {reason}") from None


def check_samples(found: int, expected: int, is_silent: bool) -> None:
    """Raise BrokenItemError for so many samples of no use to training, or far fewer than `expected`."""
    if expected < 2:
        raise BrokenItemError("audio holds a single sample" if expected else "audio holds no samples")
    if found < max(1, expected // 2):
        raise BrokenItemError(f"audio breaks off: {found} of {expected} samples could be decoded")
    if is_silent:
        raise BrokenItemError("audio is silent: every sample is 0")


def check_finite(samples: NDArray[np.float32]) -> None:
    """Raise BrokenItemError unless all samples and their power are finite: else each step with the clip would be skipped."""
    if not np.abs(samples).max(initial=0) <= _LOUDEST:
        raise BrokenItemError(f"audio holds NaN or infinite samples: expected none beyond {_LOUDEST:g}")


def _in_wav(encoded: Encoded, channels: int, start: int, num_frames: int) -> NDArray[np.int16] | None:
    """Find frames of a 16-bit WAV where they lie, or None. libsndfile would copy them in small parts."""
    place, name, size = 12, b"", 0
    while encoded[:4] == b"RIFF" and place + 8 <= len(encoded) and name != b"data":
        name, size = struct.unpack_from("<4sI", encoded, place)
        place += 8 + (0 if name == b"data" else size + size % 2)
    first, count = place + 2 * channels * start, channels * num_frames
    if name != b"data" or first + 2 * count > min(len(encoded), place + size):
        return None
    return np.frombuffer(encoded, "<i2", count, first).reshape(-1, channels)


def _read_at(file: soundfile.SoundFile, start: int, num_frames: int) -> NDArray[Any]:
    """Read frames `start` to `start + num_frames`, or as many of them as can be decoded: (frames, channels)."""
    # After a jump in an MP3, libmpg123 lacks bits of earlier frames: it gives zeros at first, and complains on stderr.
    lead_in = min(start, _MP3_LEAD_IN_SECONDS * file.samplerate) if file.format == "MP3" else 0
    if start - lead_in != file.tell():
        file.seek(start - lead_in)
    dtype = "int16" if file.subtype in _INTEGERS else "float32"
    samples: NDArray[Any] = file.read(lead_in + num_frames, dtype, always_2d=True)
    return samples[lead_in:]


def _about_loudest(file: soundfile.SoundFile, num_frames: int) -> NDArray[np.float32]:
    """Read `num_frames` about the loudest frame of the file's first `_MOST_SEARCHED`: (frames, channels)."""
    file.seek(0)
    samples: NDArray[np.float32] = file.read(min(file.frames, _MOST_SEARCHED), "float32", always_2d=True)
    loudest = int(np.abs(samples).max(axis=1).argmax())
    start = min(max(0, loudest - num_frames // 2), max(0, len(samples) - num_frames))
    return samples[start : start + num_frames]


def mix(frames: NDArray[Any], mixed: NDArray[Any]) -> tuple[int, bool]:
    """Write the mean of the channels of frames (frames, channels), float32 or int16, to `mixed` (frames,), int16 or float32,
    block by block. Returns how many frames there were, and whether each was 0."""
    is_silent = True
    for place in range(0, len(frames), _BLOCK):
        samples = frames[place : place + _BLOCK]
        is_silent = is_silent and not samples.any()
        target = mixed[place : place + len(samples)]
        if samples.dtype == mixed.dtype == np.int16 and samples.shape[1] == 1:
            target[:] = samples[:, 0]
            continue
        channels = samples.astype(np.float32, copy=False).T
        mean: NDArray[np.float32] = functools.reduce(np.add, channels)  # much sooner than a mean over so short an axis
        if len(channels) > 1:
            mean /= np.float32(len(channels))
        if samples.dtype == np.int16:
            mean /= np.float32(INT16_SCALE)
        check_finite(mean)
        target[:] = to_int16(torch.from_numpy(mean)) if mixed.dtype == np.int16 else mean
    return len(frames), is_silent


def repeat(target: NDArray[Any], length: int) -> None:
    whole = len(target) // length * length
    while length < whole:
        step = min(length, whole - length)
        target[length : length + step] = target[:step]
        length += step
    target[whole:] = 0
