"""Resample with torchaudio's windowed-sinc filters, skipping their zeros: the same samples in a fifth of the time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from clap_ds.model.torchaudio_compat import torchaudio

_LARGEST_RATIO_TERM = 1000  # bounds the filter; every rate in use is exact (44100: 160/147)
_FILTERS_AT_ONCE = 16  # columns of a matrix product: fit registers, few zeros
_SMALLEST_PERIOD = 128  # output samples; BLAS requires that the products' rows don't overlap


class _Filters(NamedTuple):
    step: int  # input samples
    num_filters: int  # output samples
    width: int  # zeros to add on the left
    parts: list[tuple[int, Tensor]]  # first input sample, taps (taps, filters)


@functools.lru_cache(maxsize=32)  # building filters takes milliseconds
def _filters(ratio: Fraction) -> _Filters:
    step, num_filters = ratio.denominator, ratio.numerator
    original = torchaudio.transforms.Resample(step, num_filters)
    periods, width = -(-_SMALLEST_PERIOD // num_filters), original.width
    filters = torch.zeros(periods, num_filters, step * periods + 2 * width)
    for period, rows in enumerate(filters):
        rows[:, period * step : (period + 1) * step + 2 * width] = original.kernel[:, 0]
    parts = []
    for rows in filters.flatten(0, 1).split(_FILTERS_AT_ONCE):
        used = (rows.abs().amax(0) > 1e-12).nonzero()  # smaller taps can't change a float32 sum near 1
        first, last = int(used[0]), int(used[-1])
        parts.append((first, rows[:, first : last + 1].T.contiguous()))
    return _Filters(step * periods, num_filters * periods, width, parts)


def resampling_ratio(from_rate: int, to_rate: int) -> Fraction:
    return Fraction(to_rate, from_rate).limit_denominator(_LARGEST_RATIO_TERM)


def resample_blocks(blocks: Iterable[Tensor], ratio: Fraction) -> Iterator[Tensor]:
    """Resample block by block, equal up to rounding to `resample` of the concatenated blocks."""
    period = ratio.denominator  # input samples after which the filters repeat
    context = -(-_filters(ratio).width // period) * period
    held, before = torch.empty(0), 0  # number of held samples that were already resampled
    for block in blocks:
        held = torch.cat([held, block])
        ready = (len(held) - context - before) // period * period
        if ready > 0:
            yield resample(held, ratio)[int(before * ratio) : int((before + ready) * ratio)]
            keep = max(0, before + ready - context)
            held, before = held[keep:], before + ready - keep
    yield resample(held, ratio)[int(before * ratio) :]


def resample(waveform: Tensor, ratio: Fraction) -> Tensor:
    """Resample (T,) float32 like `torchaudio.transforms.Resample`."""
    step, num_filters, width, parts = _filters(ratio)
    num_steps = len(waveform) // step + 1
    padded = torch.nn.functional.pad(waveform, (width, width + step))
    resampled = waveform.new_empty(num_steps, num_filters)
    for (first, taps), part in zip(parts, resampled.split(_FILTERS_AT_ONCE, dim=1), strict=True):
        torch.mm(padded.as_strided((num_steps, len(taps)), (step, 1), first), taps, out=part)
    return resampled.flatten()[: math.ceil(len(waveform) * ratio)]
