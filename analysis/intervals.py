"""Medians with intervals, and how they combine. Plain Python, as the samples are tens of windows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median, stdev

OUTLIER_DEVIATIONS = 3.5
"""Modified z-score beyond which a repeat is pointed out (Iglewicz and Hoaglin, 1993)."""


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """A median's interval from order statistics, with no assumption about the distribution.

    Args:
        values: independent measurements, at least one.

    Returns:
        (low, high, coverage): the narrowest symmetric pair of order statistics covering the true median with at least
        95 %; with fewer than 6 values no pair does, and it is the range, with the coverage it has.
    """
    ordered = sorted(values)
    n = len(ordered)
    assert n > 0
    below = 0.5**n  # P(at most k values lie below the median), k = 0
    k = 0
    while k + 1 < (n + 1) // 2:
        wider = below + math.comb(n, k + 1) * 0.5**n
        if 1 - 2 * wider < 0.95:
            break
        below, k = wider, k + 1
    return ordered[k], ordered[n - 1 - k], max(0.0, 1 - 2 * below)


def two_sigma(values: Sequence[float]) -> float | None:
    """Twice the sample standard deviation: the spread of one repeat, not the mean's error. None for one value."""
    return 2 * stdev(values) if len(values) > 1 else None


def ratio_uncertainty(top: float, top_error: float, bottom: float, bottom_error: float) -> float:
    """Error of top / bottom for independent errors, to first order (delta method)."""
    return top / bottom * math.hypot(top_error / top, bottom_error / bottom)


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of values far from the median by the median absolute deviation; none among fewer than 4 values."""
    if len(values) < 4:
        return []
    centre = median(values)
    deviations = [abs(value - centre) for value in values]
    scale = 1.4826 * median(deviations)
    if scale == 0:
        scale = 1e-6 * abs(centre)
    return [index for index, deviation in enumerate(deviations) if deviation > OUTLIER_DEVIATIONS * scale]


def bootstrap_ratio(
    top: Sequence[float], bottom: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of median(top) / median(bottom), the two resampled independently."""
    generator = random.Random(seed)
    ratios = sorted(
        median(generator.choices(top, k=len(top))) / median(generator.choices(bottom, k=len(bottom)))
        for _ in range(resamples)
    )
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples) - 1]
