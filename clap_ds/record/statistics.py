"""Medians with their intervals, correlation of windows, and percentiles. Standard library only.

An interval states the coverage it has, which for few values, or for values that follow each other's ups and downs, is less than
what was asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from clap_ds.record.schema import Rates

HIGHEST_CORRELATION = 0.9
"""Taken for windows that seem to follow each other even more closely."""


@dataclass(frozen=True)
class MedianInterval:
    """A median with an interval that covers it.

    Attributes:
        coverage: probability that the interval holds the true median; below 0.95 where there are too few values (six
            independent ones are enough) for more.
        count: of values.
    """

    median: float
    low: float
    high: float
    coverage: float
    count: int

    def label(self, values: str = "windows") -> str:
        """`96.9 % interval of 6 windows`."""
        return interval_label(self.coverage, self.count, values)


def interval_label(coverage: float, count: int, values: str = "windows") -> str:
    """What an interval is, with the coverage it has: `87.5 % interval of 4 windows`."""
    return f"{min(100 * coverage, 99.9):.3g} % interval of {count} {values if count != 1 else values.removesuffix('s')}"


def median_interval(values: Sequence[float], coverage: float = 0.95, correlation: float = 0.0) -> MedianInterval:
    """Median and its distribution-free interval: the narrowest pair of order statistics with at least `coverage`.

    The count of values below the true median is binomial with p = 1/2, whatever the distribution (Conover, Practical
    Nonparametric Statistics, 3rd ed., section 3.2). Where no pair covers that much, it is the range. With a
    `correlation` (lag 1, 0 to below 1) of values in the order they were taken, that count spreads more than a binomial
    one, and pairs cover less: by as much as for a first-order autoregressive series (`_inflation`).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take a median of")
    ordered = sorted(values)
    count, inflation = len(ordered), _inflation(correlation)
    trim, outside = 0, 1
    covered = _coverage(outside / 2**count, inflation)
    for more in range(1, (count + 1) // 2):
        outside += math.comb(count, more)
        if (less := _coverage(outside / 2**count, inflation)) < coverage:
            break
        trim, covered = more, less
    return MedianInterval(statistics.median(ordered), ordered[trim], ordered[count - 1 - trim], covered, count)


def _coverage(tail: float, inflation: float) -> float:
    """Of an interval beyond each end of which the true median lies with probability `tail` if values are independent, where
    their number below it varies `inflation` times as much."""
    if inflation > 1 and tail > 0:
        tail = NormalDist().cdf(NormalDist().inv_cdf(min(tail, 0.5)) / math.sqrt(inflation))
    return max(0.0, 1 - 2 * tail)


def _inflation(correlation: float) -> float:
    """How many times the variance of a median is that of as many independent values, for a long first-order autoregressive
    series: two of its values k apart are on one side of the median with correlation 2/π·asin(ρᵏ) (Gastwirth and Rubin, The
    behavior of robust estimators on dependent data, 1975)."""
    return 1 + 4 / math.pi * sum(math.asin(correlation**lag) for lag in range(1, 60))


def serial_correlation(values: Sequence[float]) -> float:
    """Lag-1 correlation of values in the order they were taken, from 0 to `HIGHEST_CORRELATION`.

    The usual estimate falls short of the true ρ by (1 + 3ρ)/n on average (Kendall, Biometrika 41, 1954), which is put right.
    Fewer than four values say nothing about it: 0.
    """
    count, mean = len(values), statistics.fmean(values)
    deviations = [value - mean for value in values]
    square = sum(deviation**2 for deviation in deviations)
    if count < 4 or square == 0:
        return 0.0
    found = sum(a * b for a, b in pairwise(deviations)) / square
    return min(max(found + (1 + 3 * found) / count, 0.0), HIGHEST_CORRELATION)


def window_interval(windows: Sequence[float]) -> MedianInterval:
    """`median_interval` of windows timed one after the other, with the correlation they show."""
    return median_interval(windows, correlation=serial_correlation(windows))


def median_variance(windows: Sequence[float]) -> float:
    """Variance of the median of at least two windows timed one after the other, for normal values."""
    inflation = _inflation(serial_correlation(windows))
    return math.pi / 2 * statistics.variance(windows) * inflation / len(windows)


def student_t(coverage: float, degrees: float) -> float:
    """Deviations either side of the mean that Student's t is within with probability `coverage`. At 99 %
    it is 12 % too many at two degrees of freedom and under 2 % from four on (Wallace, Ann. Math. Statist. 30, 1959)."""
    z = NormalDist().inv_cdf((1 + coverage) / 2) * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(z * z / degrees))


def rates(windows: Sequence[float]) -> Rates:
    """What a record says of the samples/s of its timed windows, in order."""
    found = window_interval(windows)
    return Rates(median=found.median, low=found.low, high=found.high, coverage=found.coverage, windows=list(windows))


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by linear interpolation between order statistics."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
