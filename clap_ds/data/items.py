"""One item of a shard: its encoded audio becomes a waveform of the model's length and rate, its text file a caption.

Reading tars is left to `tar_items`, dividing and collating their items to `shard_list` and `shard_reader`.
"""

from __future__ import annotations

import functools
import io
import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from clap_ds.data.batch import to_int16
from clap_ds.model.torchaudio_compat import torchaudio

AUDIO_FORMATS = ("flac", "wav", "ogg", "mp3")
CAPTION_FORMATS = ("txt", "json")
CAPTION_FIELDS = ("caption", "text")

_LARGEST_RATIO_TERM = 1000  # bounds the resampling filter; every rate in use is exact (44100: 160/147)
_MP3_LEAD_IN_SECONDS = 30
_UNKNOWN_LENGTH = 2**62  # libsndfile counts this many frames or more, and then can't seek


Encoded = bytes | memoryview
"""A file's content."""


class BrokenItemError(ValueError):
    """An item that can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something in the shards that can't be used: an item or, by its path, a tar."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_audio(members: Mapping[str, Any]) -> Any:
    """The encoded audio among an item's members (extension → content); BrokenItemError where there is none."""
    for extension in AUDIO_FORMATS:
        if extension in members:
            return members[extension]
    found = sorted(name for name in members if not name.startswith("__"))
    raise BrokenItemError(f"no audio ({', '.join(AUDIO_FORMATS)}) among its files: {', '.join(found) or 'none'}")


def captions_of(members: Mapping[str, Any]) -> list[str]:
    """The captions among an item's members: `txt`, or `caption` or `text` in `json`; empty ones are left out.

    Raises:
        BrokenItemError: none there, not UTF-8, not valid JSON, or nothing but white space.
    """
    if not members.keys() & set(CAPTION_FORMATS):
        raise BrokenItemError("no caption (txt or json)")
    try:
        if "txt" in members:
            captions: Any = members["txt"].decode("utf-8-sig")
        else:
            content = json.loads(members["json"].decode("utf-8-sig"))
            field = next(name for name in CAPTION_FIELDS if isinstance(content, dict) and name in content)
            captions = content[field]
    except UnicodeDecodeError:
        raise BrokenItemError("caption isn't UTF-8") from None
    except json.JSONDecodeError as error:
        raise BrokenItemError(f"json isn't valid: {error}") from None
    except StopIteration:
        raise BrokenItemError("no caption in its json (field caption or text)") from None
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BrokenItemError(f"{field} in its json is neither a string nor a list of strings")
    usable = [caption.strip() for caption in captions if caption.strip()]
    if not usable:
        raise BrokenItemError("empty caption")
    return usable


def decode_audio(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> None:
    """Write a clip as the model takes it to `row`: mono (the mean of the channels), at `sample_rate` (Hz), as long as `row`.

    Longer audio is cropped at a place drawn from `rng`, or about its loudest sample where that place is silent; only that part
    is decoded. Shorter audio is repeated as often as it fits, then padded with zeros (LAION-CLAP's "repeatpad").

    Args:
        encoded: a whole file in one of `AUDIO_FORMATS` (or anything else libsndfile reads).
        row: (num_samples,), float32 of full scale ±1 or int16 (see `to_int16`). Of float32, louder samples, of floating-point
            files and of lossy ones, stay as they are, as `transformers.ClapFeatureExtractor` takes them.

    Raises:
        BrokenItemError: can't be decoded, or nothing in it could be heard (see `check_samples`).
    """
    num_samples = len(row)
    with open_audio(encoded) as file:
        ratio = _resampling_ratio(file.samplerate, sample_rate)
        expected = min(file.frames, math.ceil(num_samples / ratio))
        samples = _read_at(file, rng.randint(0, file.frames - expected), expected)
        if expected < file.frames and len(samples) and not samples.any():
            samples = _loudest_part(file, expected)
    check_samples(samples, expected)
    mono = sum(samples.T) / np.float32(samples.shape[1])  # much sooner than a mean over so short an axis
    waveform = resample(torch.from_numpy(mono), ratio.denominator, ratio.numerator)[:num_samples]
    repeated = waveform.repeat(num_samples // len(waveform))
    whole = torch.nn.functional.pad(repeated, (0, num_samples - len(repeated)))
    row.copy_(to_int16(whole) if row.dtype == torch.int16 else whole)


def read_mel(encoded: Encoded, row: Tensor, *, rng: random.Random) -> None:
    """Write a clip's features to `row`, (num_frames, mel_bins) float16, from a NumPy file that has at least as many frames:
    more are cropped at a place drawn from `rng`.

    Raises:
        BrokenItemError: it can't be read, is of another dtype or shape, or holds NaN.
    """
    raise NotImplementedError


@contextmanager
def open_audio(encoded: Encoded) -> Iterator[soundfile.SoundFile]:
    """An encoded file for decoding; raises BrokenItemError where that fails, inside the `with` too."""
    try:
        with soundfile.SoundFile(io.BytesIO(encoded)) as file:
            if file.frames >= _UNKNOWN_LENGTH:
                how = "as FLAC written to a pipe; encode it again to a file"
                raise BrokenItemError(f"audio doesn't state its length, {how}")
            yield file
    except BrokenItemError:
        raise
    except (soundfile.SoundFileError, MemoryError, ValueError) as error:  # the others of lengths that can't be
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(f"audio can't be decoded: {reason}") from None


def check_samples(samples: NDArray[np.float32], expected: int) -> None:
    """BrokenItemError for samples (frames, channels) of no use to training, or far fewer than `expected`."""
    if expected < 2:
        raise BrokenItemError("audio holds a single sample" if expected else "audio holds no samples")
    if len(samples) < max(1, expected // 2):
        raise BrokenItemError(f"audio breaks off: {len(samples)} of {expected} samples could be decoded")
    if not np.isfinite(samples).all():
        raise BrokenItemError("audio holds NaN or infinite samples")
    if not samples.any():
        raise BrokenItemError("audio is silent: every sample is 0")


def _read_at(file: soundfile.SoundFile, start: int, num_frames: int) -> NDArray[np.float32]:
    """Frames `start` to `start + num_frames`, or as many of them as can be decoded: (frames, channels)."""
    # After a jump in an MP3, libmpg123 lacks bits of earlier frames: it gives zeros at first, and complains on stderr.
    lead_in = min(start, _MP3_LEAD_IN_SECONDS * file.samplerate) if file.format == "MP3" else 0
    if start > lead_in:
        file.seek(start - lead_in)
    samples: NDArray[np.float32] = file.read(lead_in + num_frames, dtype="float32", always_2d=True)
    return samples[lead_in:]


def _loudest_part(file: soundfile.SoundFile, num_frames: int) -> NDArray[np.float32]:
    """`num_frames` about the loudest frame of the whole file: (frames, channels)."""
    file.seek(0)
    samples: NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
    loudest = int(np.abs(samples).max(axis=1).argmax())
    start = min(max(0, loudest - num_frames // 2), max(0, len(samples) - num_frames))
    return samples[start : start + num_frames]


def _resampling_ratio(from_rate: int, to_rate: int) -> Fraction:
    if ratio := Fraction(to_rate, from_rate).limit_denominator(_LARGEST_RATIO_TERM):
        return ratio
    raise BrokenItemError(f"audio has a sample rate of {from_rate} Hz")


def resample(waveform: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """(…, T) at another sample rate, rates in Hz or as the terms of their ratio."""
    ratio = _resampling_ratio(from_rate, to_rate)
    return waveform if ratio == 1 else _resampler(ratio.denominator, ratio.numerator)(waveform)


# Windowed-sinc resampling, whose filter is computed once per pair of rates.
_resampler = functools.lru_cache(maxsize=32)(torchaudio.transforms.Resample)
