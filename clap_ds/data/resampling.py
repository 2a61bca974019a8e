"""Windowed-sinc resampling with torchaudio's filters, without the zeros in them: the same samples in a fifth of the time.

For 44.1 to 48 kHz, torchaudio convolves with 160 filters of 161 taps, of which all but 14 are zero, as each filter lies
elsewhere. Here neighbouring filters, which share their taps, are one matrix product.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from clap_ds.data.broken import BrokenItemError
from clap_ds.model.torchaudio_compat import torchaudio

_LARGEST_RATIO_TERM = 1000  # bounds the filter; every rate in use is exact (44100: 160/147)
_FILTERS_AT_ONCE = 16  # a product's columns: what a register holds, and few zeros
_SMALLEST_PERIOD = 128  # output samples: long enough that products' rows don't overlap, which BLAS doesn't take


class Resampler:
    """Resamples by a ratio of whole numbers; `Resampler.of` keeps them, as making one takes milliseconds."""

    def __init__(self, from_rate: int, to_rate: int) -> None:
        common = math.gcd(from_rate, to_rate)
        step, num_filters = from_rate // common, to_rate // common
        original = torchaudio.transforms.Resample(step, num_filters)
        periods = -(-_SMALLEST_PERIOD // num_filters)
        self.step, self.num_filters, self.width = step * periods, num_filters * periods, original.width
        filters = torch.zeros(periods, num_filters, self.step + 2 * self.width)
        for period, rows in enumerate(filters):
            rows[:, period * step : (period + 1) * step + 2 * self.width] = original.kernel[:, 0]
        self.parts = []  # first input sample, taps (taps, filters)
        for rows in filters.flatten(0, 1).split(_FILTERS_AT_ONCE):
            used = (rows.abs().amax(0) > 1e-12).nonzero()  # beside 1: float32 has no sum that the others would change
            first, last = int(used[0]), int(used[-1])
            self.parts.append((first, rows[:, first : last + 1].T.contiguous()))

    @staticmethod
    @functools.lru_cache(maxsize=32)
    def of(from_rate: int, to_rate: int) -> Resampler:
        return Resampler(from_rate, to_rate)

    def __call__(self, waveform: Tensor) -> Tensor:
        """(…, T) float32 at the other rate, as `torchaudio.transforms.Resample` gives it."""
        if waveform.dim() > 1:
            return torch.stack([self(channel) for channel in waveform])
        num_steps = len(waveform) // self.step + 1
        padded = torch.nn.functional.pad(waveform, (self.width, self.width + self.step))
        resampled = waveform.new_empty(num_steps, self.num_filters)
        columns = resampled.split(_FILTERS_AT_ONCE, dim=1)
        for (first, taps), part in zip(self.parts, columns, strict=True):
            torch.mm(padded.as_strided((num_steps, len(taps)), (self.step, 1), first), taps, out=part)
        return resampled.flatten()[: -(-len(waveform) * self.num_filters // self.step)]


def resampling_ratio(from_rate: int, to_rate: int) -> Fraction:
    """Samples that one becomes."""
    if ratio := Fraction(to_rate, from_rate).limit_denominator(_LARGEST_RATIO_TERM):
        return ratio
    raise BrokenItemError(f"audio has a sample rate of {from_rate} Hz")


def resample(waveform: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """(…, T) float32 at another sample rate, rates in Hz or as the terms of their ratio."""
    ratio = resampling_ratio(from_rate, to_rate)
    return waveform if ratio == 1 else Resampler.of(ratio.denominator, ratio.numerator)(waveform)
