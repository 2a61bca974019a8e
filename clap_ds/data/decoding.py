"""Decode audio files to waveforms of the model's length and sample rate.

Resampling uses the windowed sinc of librosa's `kaiser_best`. Like librosa's default (soxr), which
made the inputs of published CLAP weights, it suppresses images above the file's Nyquist frequency.
The log of the mel spectrum would show weaker filters'.
"""

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

# samples by which a decoded MP3 may fall short of its header
_MAX_MISSING_SAMPLES = 2 * 1152
_MP3_LEAD_IN_SECONDS = 30
# libsndfile's names of subtypes that fit int16
_INTEGERS = ("PCM_16", "PCM_S8", "PCM_U8")
# frames; bounds memory: 1 MB of FLAC can decode to hours of silence
_MAX_SEARCHED_FRAMES = 2**24
# Floating-point samples beyond are unscaled integers or garbage.
_MAX_PEAK = 1000
# Hz; at lower rates, a few samples would become hours
_SAMPLE_RATES = range(1000, 10**6 + 1)

RESAMPLING_FILTER = "kaiser_best"
"""Recorded with prepared shards. A change of the next three numbers, librosa's, needs another
name."""
# of the sinc, on either side of its center
_ZERO_CROSSINGS = 64
# cutoff relative to the lower of the two Nyquist frequencies
_ROLLOFF = 0.9475937167399596
_KAISER_BETA = 14.769656459379492
# of a ratio: bounds its filters to 30 MB, and keeps rates up to 48 kHz exact
_MAX_DENOMINATOR = 48_000
# columns of a matrix product: fit registers, few zeros
_FILTERS_AT_ONCE = 32


def decode_audio(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> None:
    """Decode a clip to fill `row`, mono at `sample_rate` (Hz).

    Longer audio is cropped at a position drawn from `rng`, or around its loudest sample if that
    crop is silent. Shorter audio is repeated while it fits, then zero-padded (LAION-CLAP's
    "repeatpad"). `row` is a contiguous CPU tensor, float32 in ±1 or int16 (see `to_int16`). Raises
    BrokenItemError if audio is undecodable or silent.
    """
    repeat(row.numpy(), decode_part(encoded, row, sample_rate=sample_rate, rng=rng))


def decode_part(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> int:
    """Decode like `decode_audio`, but leave `row` unchanged after the returned number of
    samples."""
    target = row.numpy()
    with open_audio(encoded) as file:
        ratio = resampling_ratio(file.samplerate, sample_rate)
        num_expected = min(file.frames, math.ceil(len(target) / ratio))
        mixed = target[:num_expected] if ratio == 1 else np.empty(num_expected, np.float32)
        start = rng.randint(0, file.frames - num_expected)
        num_frames, is_silent = mix(_read_at(file, start, num_expected), mixed)
        if num_frames and is_silent and num_expected < file.frames:
            num_frames, is_silent = mix(_read_about_loudest(file, num_expected), mixed)
    check_samples(num_frames, num_expected, is_silent)
    if ratio == 1:
        return num_frames
    waveform = resample(torch.from_numpy(mixed[:num_frames]), ratio)[: len(target)].clamp_(-1, 1)
    row[: len(waveform)] = to_int16(waveform) if row.dtype == torch.int16 else waveform
    if _is_silent(float(waveform.abs().max())):
        raise BrokenItemError(
            f"audio is silent at {sample_rate} Hz: all its sound is above half of that"
        )
    return len(waveform)


@contextmanager
def open_audio(encoded: Encoded) -> Iterator[AudioFile]:
    """Open an encoded file for decoding. Raises BrokenItemError for decoding errors, also inside
    the `with`."""
    try:
        with open_audio_file(encoded) as file:
            if file.samplerate not in _SAMPLE_RATES:
                raise BrokenItemError(
                    f"audio has a sample rate of {file.samplerate} Hz: expected 1 kHz to 1 MHz"
                )
            yield file
    except BrokenItemError:
        raise
    # OverflowError: for invalid lengths
    except (soundfile.SoundFileError, MemoryError, ValueError, OverflowError) as error:
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(
            f"audio can't be decoded: {reason}; if it is neither truncated nor "
            "damaged, convert it, such as with `ffmpeg -i x.m4a x.flac`"
        ) from None


def check_samples(num_decoded: int, num_expected: int, is_silent: bool) -> None:
    """Raise BrokenItemError if audio is too short, truncated or silent."""
    if num_expected < 2:
        contents = "a single sample" if num_expected else "no samples"
        raise BrokenItemError(f"audio holds {contents}")
    if num_decoded < max(1, num_expected // 2, num_expected - _MAX_MISSING_SAMPLES):
        raise BrokenItemError(
            f"audio is truncated: decoded {num_decoded} of {num_expected} samples"
        )
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


def _read_about_loudest(file: soundfile.SoundFile, num_frames: int) -> NDArray[np.float32]:
    """Read `num_frames` around the loudest of the first `_MAX_SEARCHED_FRAMES` frames: (frames,
    channels)."""
    file.seek(0)
    num_searched = min(file.frames, _MAX_SEARCHED_FRAMES)
    samples: NDArray[np.float32] = file.read(num_searched, "float32", always_2d=True)
    # The loudest of the mean, because channels may cancel.
    loudest = int(np.abs(samples.mean(axis=1)).argmax())
    start = max(0, min(loudest - num_frames // 2, len(samples) - num_frames))
    return samples[start : start + num_frames]


def mix(frames: NDArray[Any], mixed: NDArray[Any]) -> tuple[int, bool]:
    """Write the channel mean of (frames, channels) to `mixed` (frames,). Return the number of
    frames and if it is silent."""
    target = mixed[: len(frames)]
    num_channels = frames.shape[1]
    if frames.dtype == mixed.dtype == np.int16 and num_channels == 1:
        target[:] = frames[:, 0]
        return len(frames), not frames.any()
    scale = num_channels * (INT16_SCALE if frames.dtype == np.int16 else 1)
    # Much faster than a mean over such a short axis.
    mean = functools.reduce(np.add, frames.astype(np.float32, copy=False).T) / np.float32(scale)
    peak = float(np.abs(mean).max(initial=0))
    # Written so that NaN is found, too.
    if not peak <= _MAX_PEAK:
        raise BrokenItemError(
            f"audio peaks at {peak:g}: expected full scale ±1 (integers kept as floating point?)"
        )
    # As in LAION-CLAP's training.
    np.clip(mean, -1, 1, out=mean)
    target[:] = to_int16(torch.from_numpy(mean)) if mixed.dtype == np.int16 else mean
    return len(frames), _is_silent(peak)


def _is_silent(peak: float) -> bool:
    """Return whether samples up to this are 0 in 16 bits, as `clap-ds shards prepare` stores
    them."""
    return round(peak * INT16_SCALE) == 0


def repeat(target: NDArray[Any], length: int) -> None:
    """Fill `target` with its first `length` samples while they fit, then with zeros."""
    whole = len(target) // length * length
    target[length:whole] = np.tile(target[:length], whole // length - 1)
    target[whole:] = 0


class _Filters(NamedTuple):
    # input samples after which the filters repeat
    input_period: int
    # output samples after which they repeat: number of filters
    output_period: int
    # input samples on either side of an output sample's position that affect it
    reach: int
    # first input sample, counted from `reach` before a period; taps (taps, filters)
    parts: list[tuple[int, Tensor]]


# Building takes 10 ms for usual ratios, a second for the longest.
@functools.lru_cache(maxsize=16)
def _build_filters(ratio: Fraction) -> _Filters:
    """Build the filters that `torchaudio.transforms.Resample` defines, of which each part stores
    only the nonzero taps."""
    # relative to the input's Nyquist frequency
    cutoff = _ROLLOFF * min(1.0, float(ratio))
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    # BLAS copies a matrix whose rows overlap, so a row advances by at least its length.
    max_taps = 2 * reach + math.ceil(_FILTERS_AT_ONCE / ratio) + 2
    num_periods = math.ceil(max_taps / ratio.denominator)
    output_period = num_periods * ratio.numerator
    parts = []
    for outputs in torch.arange(output_period, dtype=torch.float64).split(_FILTERS_AT_ONCE):
        # in input samples
        positions = outputs / float(ratio)
        start = math.floor(positions[0]) - reach
        stop = math.ceil(positions[-1]) + reach + 1
        # in zero crossings, beyond which the sinc is zero
        distances = (torch.arange(start, stop)[:, None] - positions) * cutoff
        distances.clamp_(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
        # Kaiser's: I0(beta * sqrt(1 - x^2)) / I0(beta)
        arch = (1 - (distances / _ZERO_CROSSINGS) ** 2).sqrt()
        window = torch.i0(_KAISER_BETA * arch) / float(np.i0(_KAISER_BETA))
        taps = cutoff * torch.sinc(distances) * window
        parts.append((start + reach, taps.float()))
    return _Filters(num_periods * ratio.denominator, output_period, reach, parts)


def resampling_ratio(from_rate: int, to_rate: int) -> Fraction:
    """Return the ratio of two rates in Hz: exact if `from_rate` is at most 48 kHz, else within 1 in
    90,000."""
    return Fraction(to_rate, from_rate).limit_denominator(_MAX_DENOMINATOR)


def resample_blocks(blocks: Iterable[Tensor], ratio: Fraction) -> Iterator[Tensor]:
    """Resample block by block, equal up to rounding to `resample` of the concatenated blocks."""
    # input samples after which the filters repeat
    period = ratio.denominator
    # whole periods that the filters reach to either side
    context = math.ceil(_build_filters(ratio).reach / period) * period
    buffer = torch.empty(0)
    # number of samples in it that were already resampled
    num_done = 0
    for block in blocks:
        buffer = torch.cat([buffer, block])
        num_ready = (len(buffer) - context - num_done) // period * period
        if num_ready > 0:
            stop = num_done + num_ready
            yield resample(buffer, ratio)[int(num_done * ratio) : int(stop * ratio)]
            num_dropped = max(0, stop - context)
            buffer = buffer[num_dropped:]
            num_done = stop - num_dropped
    yield resample(buffer, ratio)[int(num_done * ratio) :]


def resample(waveform: Tensor, ratio: Fraction) -> Tensor:
    """Resample (T,) float32 to ceil(T * ratio) samples, as librosa does."""
    step, num_filters, reach, parts = _build_filters(ratio)
    num_steps = len(waveform) // step + 1
    padded = torch.nn.functional.pad(waveform, (reach, reach + step + 1))
    # (steps, filters) in the order of output samples
    resampled = waveform.new_empty(num_steps, num_filters)
    for (start, taps), part in zip(parts, resampled.split(_FILTERS_AT_ONCE, dim=1), strict=True):
        inputs = padded.as_strided((num_steps, len(taps)), (step, 1), start)
        torch.mm(inputs, taps, out=part)
    return resampled.flatten()[: math.ceil(len(waveform) * ratio)]
