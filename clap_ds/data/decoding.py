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

try:
    import miniaudio
except ImportError:  # there are no wheels of it for every machine
    miniaudio = None

AUDIO_FORMATS = ("flac", "wav", "ogg", "mp3")

_MP3_LEAD_IN_SECONDS = 30
_INTEGERS = ("PCM_16", "PCM_S8", "PCM_U8")  # libsndfile's names of samples that int16 holds
_BLOCK = 65536  # frames mixed at a time, so that they stay in the cache
_READ = 65536  # bytes
_UNKNOWN_LENGTH = 2**62  # libsndfile counts this many frames or more, and then can't seek


Encoded = bytes | memoryview
"""A file's content."""


def decode_audio(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Write a clip as the model takes it to `row`: mono (the mean of the channels), at `sample_rate` (Hz), as long as `row`.

    Longer audio is cropped at a place drawn from `rng`, or about its loudest sample where that place is silent; only that part
    is decoded. Shorter audio is repeated as often as it fits, then padded with zeros (LAION-CLAP's "repeatpad").

    Args:
        encoded: a whole file in one of `AUDIO_FORMATS` (or anything else libsndfile reads).
        row: (num_samples,), contiguous on the CPU, float32 of full scale ±1 or int16 (see `to_int16`). Of float32, louder
            samples, of floating-point files and of lossy ones, stay as they are, as `transformers.ClapFeatureExtractor` takes
            them. int16 is float32 rounded to nearest, halves to even; 16-bit audio of this rate gets there in integers.

    Returns:
        Samples in `row` before they are repeated.

    Raises:
        BrokenItemError: can't be decoded, or nothing in it could be heard (see `check_samples`).
    """
    target = row.numpy()
    with open_audio(encoded) as file:
        if not file.frames:
            how = "what was written to a pipe must be encoded again"
            raise BrokenItemError(f"audio holds no samples, by the header of its {len(encoded)} bytes; {how}")
        ratio = resampling_ratio(file.samplerate, sample_rate)
        expected = min(file.frames, math.ceil(len(target) / ratio))
        in_integers = row.dtype == torch.int16 and ratio == 1 and file.channels <= 2 and file.subtype in _INTEGERS
        dtype = "int16" if in_integers else "float32"
        start = rng.randint(0, file.frames - expected)
        samples: Any = _whole_flac(encoded, file) if expected == file.frames else None
        if samples is None and in_integers:
            samples = _in_wav(encoded, file, start, expected)
        if samples is None:
            is_final = file.channels == 1 and ratio == 1 and target.dtype == dtype
            samples = _read_at(file, start, expected, dtype, target[:expected] if is_final else None)
        elif not in_integers:
            samples = samples * np.float32(1 / INT16_SCALE)
        if expected < file.frames and len(samples) and _is_silent(samples):
            samples = _loudest_part(file, expected)
    check_samples(samples, expected)
    if samples.dtype == np.int16:
        length = len(samples)
        if samples.shape[1] == 2:
            _mean_of_pairs(samples, out=target[:length])
        elif not np.may_share_memory(samples, target):
            target[:length] = samples[:, 0]
    else:
        waveform = resample(torch.from_numpy(_mean(samples)), ratio.denominator, ratio.numerator)[: len(target)]
        length = len(waveform)
        row[:length] = to_int16(waveform) if row.dtype == torch.int16 else waveform
    _repeat(target, length)
    return length


class _View(io.RawIOBase):
    """A memoryview as a file: of a mapped tar, only the parts that are decoded are read. io.BytesIO would copy all of it."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._place = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._content)}[whence]
        return self._place


@contextmanager
def open_audio(encoded: Encoded) -> Iterator[soundfile.SoundFile]:
    """An encoded file for decoding; raises BrokenItemError where that fails, inside the `with` too."""
    try:
        stream = io.BufferedReader(_View(encoded), _READ) if isinstance(encoded, memoryview) else io.BytesIO(encoded)
        with soundfile.SoundFile(stream) as file:
            if file.frames >= _UNKNOWN_LENGTH:
                how = "as FLAC written to a pipe; encode it again to a file"
                raise BrokenItemError(f"audio doesn't state its length, {how}")
            yield file
    except BrokenItemError:
        raise
    except (soundfile.SoundFileError, MemoryError, ValueError) as error:  # the others of lengths that can't be
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(f"audio can't be decoded: {reason}") from None


def check_samples(samples: NDArray[Any], expected: int) -> None:
    """BrokenItemError for samples (frames, channels) of no use to training, or far fewer than `expected`."""
    if expected < 2:
        raise BrokenItemError("audio holds a single sample" if expected else "audio holds no samples")
    if len(samples) < max(1, expected // 2):
        raise BrokenItemError(f"audio breaks off: {len(samples)} of {expected} samples could be decoded")
    if samples.dtype != np.int16 and not np.isfinite(samples).all():
        raise BrokenItemError("audio holds NaN or infinite samples")
    if _is_silent(samples):
        raise BrokenItemError("audio is silent: every sample is 0")


def _is_silent(samples: NDArray[Any]) -> bool:
    """Mostly seen from the start of it."""
    return not (samples[:_BLOCK].any() or samples.any())


def _whole_flac(encoded: Encoded, file: soundfile.SoundFile) -> NDArray[np.int16] | None:
    """All of a FLAC file of 16 bits, (frames, channels), by miniaudio, which takes two thirds of libsndfile's time; None where
    that isn't there, or finds something else in the file."""
    if miniaudio is None or (file.format, file.subtype) != ("FLAC", "PCM_16"):
        return None
    try:
        found = miniaudio.flac_read_s16(bytes(encoded))
    except miniaudio.MiniaudioError:
        return None
    samples = np.frombuffer(found.samples, np.int16).reshape(-1, found.nchannels)
    return samples if samples.shape == (file.frames, file.channels) else None


def _in_wav(encoded: Encoded, file: soundfile.SoundFile, start: int, num_frames: int) -> NDArray[np.int16] | None:
    """Frames of a WAV file of 16 bits where they lie, (frames, channels); None where they aren't all there, or it is another.
    libsndfile would copy them in small parts."""
    if (file.format not in ("WAV", "WAVEX")) or file.subtype != "PCM_16" or encoded[:4] != b"RIFF":
        return None
    place, name, size = 12, b"", 0
    while place + 8 <= len(encoded) and name != b"data":
        name, size = struct.unpack_from("<4sI", encoded, place)
        place += 8 + (0 if name == b"data" else size + size % 2)
    first, count = place + 2 * file.channels * start, file.channels * num_frames
    if name != b"data" or first + 2 * count > min(len(encoded), place + size):
        return None
    return np.frombuffer(encoded, "<i2", count, first).reshape(-1, file.channels)


def _read_at(
    file: soundfile.SoundFile, start: int, num_frames: int, dtype: str, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Frames `start` to `start + num_frames`, or as many of them as can be decoded: (frames, channels), in `out` if they can be
    written there."""
    # After a jump in an MP3, libmpg123 lacks bits of earlier frames: it gives zeros at first, and complains on stderr.
    lead_in = min(start, _MP3_LEAD_IN_SECONDS * file.samplerate) if file.format == "MP3" else 0
    if start > lead_in:
        file.seek(start - lead_in)
    if out is not None and not lead_in:
        return file.read(out=out).reshape(-1, file.channels)
    samples: NDArray[Any] = file.read(lead_in + num_frames, dtype=dtype, always_2d=True)
    return samples[lead_in:]


def _loudest_part(file: soundfile.SoundFile, num_frames: int) -> NDArray[np.float32]:
    """`num_frames` about the loudest frame of the whole file: (frames, channels)."""
    file.seek(0)
    samples: NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
    loudest = int(np.abs(samples).max(axis=1).argmax())
    start = min(max(0, loudest - num_frames // 2), max(0, len(samples) - num_frames))
    return samples[start : start + num_frames]


def _mean(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the channels: (frames, channels) to (frames,)."""
    total: NDArray[np.float32] = functools.reduce(np.add, samples.T)  # much sooner than a mean over so short an axis
    return total / np.float32(samples.shape[1]) if samples.shape[1] > 1 else total


def _mean_of_pairs(samples: NDArray[np.int16], out: NDArray[np.int16]) -> None:
    """The mean of two channels, (frames, 2), rounded to nearest and halves to even, in `out` (frames,)."""
    both = samples.view(np.int32)[:, 0]  # operations on neighbours are vectorised, on every other sample they aren't
    others, differing = np.empty((2, min(_BLOCK, len(out))), np.int16)
    for start in range(0, len(out), _BLOCK):
        mean, pairs = out[start : start + _BLOCK], both[start : start + _BLOCK]
        other, differ = others[: len(mean)], differing[: len(mean)]
        mean[:] = pairs  # the lower half
        np.right_shift(pairs, 16, out=other, casting="unsafe")
        np.bitwise_xor(mean, other, out=differ)
        mean &= other
        mean += np.right_shift(differ, 1, out=other)  # the mean rounded down, within 16 bits
        differ &= mean
        differ &= 1
        mean += differ


def _repeat(target: NDArray[Any], length: int) -> None:
    """Repeat the first `length` samples as often as they fit, in place; zeros follow."""
    whole = len(target) // length * length
    while length < whole:
        step = min(length, whole - length)
        target[length : length + step] = target[:step]
        length += step
    target[whole:] = 0
