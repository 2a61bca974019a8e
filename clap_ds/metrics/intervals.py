"""Throughput over time, intervals of medians and Student's t. Standard library and numpy only.

Throughput is always total samples over total seconds after warm-up. A median of windows differs if
step times vary.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np

from clap_ds.run_records.schema import Rates

COVERAGE = 0.95
# Standard deviations on each side of a normal interval.
Z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)


def rates(samples: Sequence[float], window_s: Sequence[float]) -> Rates:
    """Compute total samples over total seconds from each window's samples and seconds, in order.

    `min` and `max` are the range of the windows. The windows of one run support no confidence
    interval: rare stalls may have hit none of them. Repeat the run to get one.
    """
    windows = [number / seconds for number, seconds in zip(samples, window_s, strict=True)]
    return Rates(
        mean=sum(samples) / sum(window_s),
        min=min(windows),
        max=max(windows),
        windows=windows,
        window_s=list(window_s),
    )


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Compute the `median` and its distribution-free interval, the narrowest pair of order
    statistics with `COVERAGE`.

    The count of values below the true median is binomial with p = 1/2 (Conover, Practical
    Nonparametric Statistics, 3rd ed., section 3.2). If no pair covers that much, the interval is
    the range.
    """
    ordered = sorted(values)
    count = len(values)
    # By number of values excluded on each side: the probability that the median is among them.
    tails = accumulate(math.comb(count, below) for below in range((count + 1) // 2))
    outside = [2 * tail / 2**count for tail in tails]
    num_allowed = sum(probability <= 1 - COVERAGE for probability in outside)
    trim = max(num_allowed - 1, 0)
    return {
        "low": ordered[trim],
        "high": ordered[count - 1 - trim],
        "coverage": max(0.0, 1 - outside[trim]),
        "count": count,
        "median": statistics.median(ordered),
    }


@cache
def student_t(coverage: float, degrees: float) -> float:
    """Compute two-sided Student's t: atan(t/√degrees) has a density proportional to cos^(degrees -
    1), integrated here."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees - 1)
    # The trapezoidal rule.
    within = np.cumsum(density) - (density + density[0]) / 2
    return math.sqrt(degrees) * math.tan(np.interp(coverage * within[-1], within, angles))
