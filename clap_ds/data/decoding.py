"""Decode audio files to waveforms of the model's length and sample rate.

Resampling uses the windowed sinc of librosa's `kaiser_best`. Like librosa's default (soxr), which
made the inputs of published CLAP weights, it suppresses images above the file's Nyquist frequency.
The log of the mel spectrum would show weaker filters'.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from clap_ds.config.model import INT16_SCALE
from clap_ds.data.batch import to_int16
from clap_ds.data.stated_length import AudioFile, open_audio_file
from clap_ds.data.stated_length import BrokenItemError as BrokenItemError
from clap_ds.data.stated_length import Encoded as Encoded

AUDIO_FORMATS = ("flac", "wav", "ogg", "mp3")

_FRAMES_LOST = 2 * 1152  # samples by which a decoded MP3 may fall short of its header
_MP3_LEAD_IN_SECONDS = 30
_INTEGERS = ("PCM_16", "PCM_S8", "PCM_U8")  # libsndfile's names of subtypes that fit int16
_MOST_SEARCHED = 2**24  # frames; bounds memory: 1 MB of FLAC can decode to hours of silence
_LOUDEST = 1000  # floating-point samples beyond are unscaled integers or garbage
_RATES = range(1000, 10**6 + 1)  # Hz; at lower rates, a few samples would become hours

RESAMPLING_FILTER = "kaiser_best"
"""Recorded with prepared shards. A change of the next three numbers, librosa's, needs another
name."""
_ZERO_CROSSINGS = 64  # of the sinc, on either side of its center
_ROLLOFF = 0.9475937167399596  # cutoff relative to the lower of the two Nyquist frequencies
_KAISER_BETA = 14.769656459379492
_LARGEST_DENOMINATOR = (
    48_000  # of a ratio: bounds its filters to 30 MB, and keeps rates up to 48 kHz exact
)
_FILTERS_AT_ONCE = 32  # columns of a matrix product: fit registers, few zeros


def decode_audio(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Decode a clip to fill `row`, mono at `sample_rate` (Hz). Return its length in samples before
    repeating.

    Longer audio is cropped at a position drawn from `rng`, or around its loudest sample if that
    crop is silent. Shorter audio is repeated while it fits, then zero-padded (LAION-CLAP's
    "repeatpad"). `row` is a contiguous CPU tensor, float32 in ±1 or int16 (see `to_int16`). Raises
    BrokenItemError if audio is undecodable or silent.
    """
    found = decode_part(encoded, row, sample_rate=sample_rate, rng=rng)
    repeat(row.numpy(), found)
    return found


def decode_part(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Decode like `decode_audio`, but leave `row` unchanged after the returned number of
    samples."""
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
        if _is_silent(float(waveform.abs().max())):
            raise BrokenItemError(
                f"audio is silent at {sample_rate} Hz: all its sound is above half of that"
            )
    return found


@contextmanager
def open_audio(encoded: Encoded) -> Iterator[AudioFile]:
    """Open an encoded file for decoding. Raises BrokenItemError for decoding errors, also inside
    the `with`."""
    try:
        with open_audio_file(encoded) as file:
            if file.samplerate not in _RATES:
                raise BrokenItemError(
                    f"audio has a sample rate of {file.samplerate} Hz: expected 1 kHz to 1 MHz"
                )
            yield file
    except BrokenItemError:
        raise
    except (
        soundfile.SoundFileError,
        MemoryError,
        ValueError,
        OverflowError,
    ) as error:  # the last for invalid lengths
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        advice = "if it is neither truncated nor damaged, convert it, such as with `ffmpeg -i x.m4a x.flac`"
        raise BrokenItemError(f"audio can't be decoded: {reason}; {advice}") from None


def check_samples(found: int, expected: int, is_silent: bool) -> None:
    """Raise BrokenItemError if audio is too short, truncated or silent."""
    if expected < 2:
        raise BrokenItemError(
            "audio holds a single sample" if expected else "audio holds no samples"
        )
    if found < max(1, expected // 2, expected - _FRAMES_LOST):
        raise BrokenItemError(f"audio is truncated: decoded {found} of {expected} samples")
    if is_silent:
        raise BrokenItemError("audio is silent: the mean of its channels is 0 in 16 bits")


def _read_at(file: soundfile.SoundFile, start: int, num_frames: int) -> NDArray[Any]:
    """Read frames `start` to `start + num_frames`, or as many as can be decoded: (frames,
    channels)."""
    # After a seek in an MP3, libmpg123 lacks bits of earlier frames: it first returns zeros and
    # logs to stderr.
    lead_in = min(start, _MP3_LEAD_IN_SECONDS * file.samplerate) if file.format == "MP3" else 0
    if start - lead_in != file.tell():
        file.seek(start - lead_in)
    dtype = "int16" if file.subtype in _INTEGERS else "float32"
    samples: NDArray[Any] = file.read(lead_in + num_frames, dtype, always_2d=True)
    return samples[lead_in:]


def _about_loudest(file: soundfile.SoundFile, num_frames: int) -> NDArray[np.float32]:
    """Read `num_frames` around the loudest of the first `_MOST_SEARCHED` frames: (frames,
    channels)."""
    file.seek(0)
    samples: NDArray[np.float32] = file.read(
        min(file.frames, _MOST_SEARCHED), "float32", always_2d=True
    )
    start = int(np.abs(samples.mean(axis=1)).argmax()) - num_frames // 2  # channels may cancel
    return samples[max(0, min(start, len(samples) - num_frames)) :][:num_frames]


def mix(frames: NDArray[Any], mixed: NDArray[Any]) -> tuple[int, bool]:
    """Write the channel mean of (frames, channels) to `mixed` (frames,). Return the number of
    frames and if it is silent."""
    target = mixed[: len(frames)]
    if frames.dtype == mixed.dtype == np.int16 and frames.shape[1] == 1:
        target[:] = frames[:, 0]
        return len(frames), not frames.any()
    scale = frames.shape[1] * (INT16_SCALE if frames.dtype == np.int16 else 1)
    # Much faster than a mean over such a short axis.
    mean = functools.reduce(np.add, frames.astype(np.float32, copy=False).T) / np.float32(scale)
    peak = float(np.abs(mean).max(initial=0))
    if not peak <= _LOUDEST:  # or NaN
        raise BrokenItemError(
            f"audio peaks at {peak:g}: expected full scale ±1 (integers kept as floating point?)"
        )
    np.clip(mean, -1, 1, out=mean)  # as in LAION-CLAP's training
    target[:] = to_int16(torch.from_numpy(mean)) if mixed.dtype == np.int16 else mean
    return len(frames), _is_silent(peak)


def _is_silent(peak: float) -> bool:
    """Return whether samples up to this are 0 in 16 bits, as `clap-ds shards prepare` stores
    them."""
    return round(peak * INT16_SCALE) == 0


def repeat(target: NDArray[Any], length: int) -> None:
    whole = len(target) // length * length
    target[length:whole] = np.tile(target[:length], whole // length - 1)
    target[whole:] = 0


class _Filters(NamedTuple):
    input_period: int  # input samples after which the filters repeat
    output_period: int  # output samples after which they repeat: number of filters
    reach: int  # input samples on either side of an output sample's position that affect it
    parts: list[
        tuple[int, Tensor]
    ]  # first input sample, counted from `reach` before a period; taps (taps, filters)


@functools.lru_cache(maxsize=16)  # building takes 10 ms for usual ratios, a second for the longest
def _build_filters(ratio: Fraction) -> _Filters:
    """Build the filters that `torchaudio.transforms.Resample` defines, of which each part stores
    only the nonzero taps."""
    cutoff = _ROLLOFF * min(1.0, float(ratio))  # relative to the input's Nyquist frequency
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    most_taps = 2 * reach + math.ceil(_FILTERS_AT_ONCE / ratio) + 2
    periods = math.ceil(most_taps / ratio.denominator)  # BLAS copies a matrix whose rows overlap
    output_period = periods * ratio.numerator
    parts = []
    for outputs in torch.arange(output_period, dtype=torch.float64).split(_FILTERS_AT_ONCE):
        positions = outputs / float(ratio)  # in input samples
        first = math.floor(positions[0]) - reach
        last = math.ceil(positions[-1]) + reach
        distances = (
            torch.arange(first, last + 1)[:, None] - positions
        ) * cutoff  # in zero crossings
        distances.clamp_(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)  # where the sinc is zero
        window = torch.i0(_KAISER_BETA * (1 - (distances / _ZERO_CROSSINGS) ** 2).sqrt()) / float(
            np.i0(_KAISER_BETA)
        )
        taps = cutoff * torch.sinc(distances) * window
        parts.append((first + reach, taps.float()))
    return _Filters(periods * ratio.denominator, output_period, reach, parts)


def resampling_ratio(from_rate: int, to_rate: int) -> Fraction:
    """Return the ratio of two rates in Hz: exact if `from_rate` is at most 48 kHz, else within 1 in
    90,000."""
    return Fraction(to_rate, from_rate).limit_denominator(_LARGEST_DENOMINATOR)


def resample_blocks(blocks: Iterable[Tensor], ratio: Fraction) -> Iterator[Tensor]:
    """Resample block by block, equal up to rounding to `resample` of the concatenated blocks."""
    period = ratio.denominator  # input samples after which the filters repeat
    context = -(-_build_filters(ratio).reach // period) * period
    # number of held samples that were already resampled
    held = torch.empty(0)
    before = 0
    for block in blocks:
        held = torch.cat([held, block])
        ready = (len(held) - context - before) // period * period
        if ready > 0:
            yield resample(held, ratio)[int(before * ratio) : int((before + ready) * ratio)]
            keep = max(0, before + ready - context)
            held = held[keep:]
            before = before + ready - keep
    yield resample(held, ratio)[int(before * ratio) :]


def resample(waveform: Tensor, ratio: Fraction) -> Tensor:
    """Resample (T,) float32 to ceil(T * ratio) samples, as librosa does."""
    step, num_filters, reach, parts = _build_filters(ratio)
    num_steps = len(waveform) // step + 1
    padded = torch.nn.functional.pad(waveform, (reach, reach + step + 1))
    resampled = waveform.new_empty(num_steps, num_filters)
    for (first, taps), part in zip(parts, resampled.split(_FILTERS_AT_ONCE, dim=1), strict=True):
        torch.mm(padded.as_strided((num_steps, len(taps)), (step, 1), first), taps, out=part)
    return resampled.flatten()[: math.ceil(len(waveform) * ratio)]
