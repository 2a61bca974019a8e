"""Encoded audio becomes a waveform of the model's length and rate."""

from __future__ import annotations

import functools
import io
import math
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from clap_ds.config.model import INT16_SCALE
from clap_ds.data.batch import to_int16
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.resampling import resample, resampling_ratio

AUDIO_FORMATS = ("flac", "wav", "ogg", "mp3")

_FRAMES_LOST = 2 * 1152  # what decoding an MP3 may give less than its header states
_MP3_LEAD_IN_SECONDS = 30
_INTEGERS = ("PCM_16", "PCM_S8", "PCM_U8")  # libsndfile's names of samples that int16 holds
_MOST_SEARCHED = 2**24  # frames: hours of silence take a megabyte of FLAC, and gigabytes of memory
_LOUDEST = 1000  # beyond, floating-point samples are integers, or rubbish
LOUD = 1.5
_LONGEST_PAGE = 27 + 255 + 255 * 255  # bytes of an Ogg page (RFC 3533)
_OF_A_STREAM = 0x7FFF0000  # sizes from here on stand in WAVs written to a pipe: sox 0x7FFFF000, ffmpeg 0xFFFFFFFF
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"RIFF": "little", b"FORM": "big"}
_RATES = range(1000, 10**6 + 1)  # Hz; a second of a lower one would become an hour

Encoded = bytes | str
"""A file's content, or a path to it."""


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
        found, is_silent = mix(_read_at(file, start, expected), mixed)
        if expected < file.frames and found and is_silent:
            found, is_silent = mix(_about_loudest(file, expected), mixed)
    check_samples(found, expected, is_silent)
    if ratio != 1:
        waveform = resample(torch.from_numpy(mixed[:found]), ratio)[: len(target)].clamp_(-1, 1)
        found = len(waveform)
        row[:found] = to_int16(waveform) if row.dtype == torch.int16 else waveform
    return found


@contextmanager
def open_audio(encoded: Encoded) -> Iterator[soundfile.SoundFile]:
    """Open an encoded file for decoding; raises BrokenItemError where that fails, inside the `with` too."""
    try:
        with soundfile.SoundFile(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as file:
            with io.BytesIO(encoded) if isinstance(encoded, bytes) else open(encoded, "rb") as again:
                check_whole(again)
            if file.samplerate not in _RATES:
                raise BrokenItemError(f"audio has a sample rate of {file.samplerate} Hz: expected 1 kHz to 1 MHz")
            yield file
    except BrokenItemError:
        raise
    except (soundfile.SoundFileError, MemoryError, ValueError, OverflowError) as error:  # the last of odd lengths
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(f"audio can't be decoded: {reason}") from None


def check_whole(file: BinaryIO) -> None:
    """Raise BrokenItemError for a WAV or AIFF that ends within its samples, or an Ogg without its stream's last page. A cut
    FLAC or MP3 shows as it is decoded, by `check_samples`."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start, place = file.read(4), 12
    if start == b"OggS":
        file.seek(max(0, size - _LONGEST_PAGE))
        page = b"OggS\0" + file.read().rpartition(b"OggS\0")[2]
        if len(page) < 27 or not page[5] & 4 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]]):
            raise BrokenItemError("audio breaks off: the last page of its Ogg stream isn't there")
    for _ in range(1000 if start in _ORDERS else 0):  # chunks; most files have some ten
        file.seek(place)
        name, stated = file.read(4), int.from_bytes(file.read(4), _ORDERS[start])
        there = size - place - 8
        if name in (b"data", b"SSND"):
            if there < stated < _OF_A_STREAM:
                raise BrokenItemError(f"audio breaks off: {there} of {stated} bytes of samples are there")
            break
        place += 8 + stated + stated % 2


def check_samples(found: int, expected: int, is_silent: bool) -> None:
    """Raise BrokenItemError for so many samples of no use to training, or of a file that is cut."""
    if expected < 2:
        raise BrokenItemError("audio holds a single sample" if expected else "audio holds no samples")
    if found < max(1, expected // 2, expected - _FRAMES_LOST):
        raise BrokenItemError(f"audio breaks off: {found} of {expected} samples could be decoded")
    if is_silent:
        raise BrokenItemError("audio is silent: every sample is 0")


def check_peak(samples: NDArray[np.float32]) -> float:
    """Return the largest sample without sign. Raises BrokenItemError for NaN and for samples beyond `_LOUDEST`."""
    peak = float(np.abs(samples).max(initial=0))
    if not peak <= _LOUDEST:
        raise BrokenItemError(f"audio peaks at {peak:g}: expected full scale ±1 (integers kept as floating point?)")
    return peak


def clip_peaks(samples: NDArray[np.float32]) -> None:
    """Clip samples to ±1 in place, as LAION-CLAP's training does, and warn once per process of peaks above `LOUD`."""
    if check_peak(samples) > LOUD:
        warnings.warn(f"audio peaks above {LOUD}: samples are clipped to full scale ±1", stacklevel=2)
    np.clip(samples, -1, 1, out=samples)


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
    """Write the mean of the channels of (frames, channels) to `mixed` (frames,); return their number, and whether all are 0."""
    target = mixed[: len(frames)]
    if frames.dtype == mixed.dtype == np.int16 and frames.shape[1] == 1:
        target[:] = frames[:, 0]
    else:
        scale = frames.shape[1] * (INT16_SCALE if frames.dtype == np.int16 else 1)
        # Much sooner than a mean over so short an axis.
        mean = functools.reduce(np.add, frames.astype(np.float32, copy=False).T) / np.float32(scale)
        clip_peaks(mean)
        target[:] = to_int16(torch.from_numpy(mean)) if mixed.dtype == np.int16 else mean
    return len(frames), not frames.any()


def repeat(target: NDArray[Any], length: int) -> None:
    whole = len(target) // length * length
    while length < whole:
        step = min(length, whole - length)
        target[length : length + step] = target[:step]
        length += step
    target[whole:] = 0
