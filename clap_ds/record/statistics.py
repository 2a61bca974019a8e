"""Medians with their intervals, and percentiles. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.record.schema import Rates


@dataclass(frozen=True)
class MedianInterval:
    """A median with an interval that covers it.

    Attributes:
        coverage: probability that the interval holds the true median, for independent values; below 0.95 where there are too
            few (fewer than six) for more.
    """

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], coverage: float = 0.95) -> MedianInterval:
    """Median and its distribution-free interval: the narrowest pair of order statistics with at least `coverage`.

    The count of values below the true median is binomial with p = 1/2, whatever the distribution (Conover, Practical
    Nonparametric Statistics, 3rd ed., section 3.2). Where no pair covers that much, it is the range.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take a median of")
    ordered = sorted(values)
    count = len(ordered)
    trim, covered = 0, _coverage(count, 0)
    for more in range(1, (count + 1) // 2):
        if _coverage(count, more) >= coverage:
            trim, covered = more, _coverage(count, more)
    return MedianInterval(statistics.median(ordered), ordered[trim], ordered[count - 1 - trim], covered)


def rates(windows: Sequence[float]) -> Rates:
    """What a record says of the samples/s of its timed windows, in order."""
    found = median_interval(windows)
    return Rates(median=found.median, low=found.low, high=found.high, coverage=found.coverage, windows=list(windows))


def _coverage(count: int, trim: int) -> float:
    """Probability that the (trim + 1)-th smallest and the (trim + 1)-th largest value have the median between them."""
    outside = sum(math.comb(count, k) for k in range(trim + 1)) / 2**count
    return max(0.0, 1 - 2 * outside)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by linear interpolation between order statistics."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
