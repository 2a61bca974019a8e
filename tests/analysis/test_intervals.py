"""Statistics against exact enumeration, simulation and hand computation."""

import math
import random
from itertools import product
from statistics import median

import pytest

from clap_ds.analysis.intervals import bootstrap_ratio, median_interval, outliers, ratio_uncertainty, two_sigma


@pytest.mark.parametrize("n", range(1, 13))
def test_median_intervals_coverage_by_enumerating_every_pattern(n: int) -> None:
    # Each value lies below the true median with probability 1/2: count the patterns in which the interval holds it.
    low, high, coverage = median_interval(list(range(n)))
    covered = sum(low < sum(below) <= high for below in product((0, 1), repeat=n))
    assert coverage == pytest.approx(covered / 2**n)
    assert coverage >= 0.95 or (low, high) == (0, n - 1)


def test_median_interval_is_the_narrowest_that_suffices() -> None:
    # Tabulated ranks of the 95 % interval (n = 10: 2nd and 9th; n = 20: 6th and 15th; n = 50: 18th and 33rd).
    for n, low, high in ((10, 2, 9), (20, 6, 15), (50, 18, 33)):
        assert median_interval(list(range(1, n + 1)))[:2] == (low, high)


def test_median_interval_ignores_order() -> None:
    assert median_interval([3.0, 1.0, 2.0])[:2] == (1.0, 3.0)


def test_two_sigma() -> None:
    assert two_sigma([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(2 * math.sqrt(32 / 7))
    assert two_sigma([5.0]) is None


def test_ratio_uncertainty_against_simulation() -> None:
    generator = random.Random(1)
    ratios = [generator.gauss(90, 1.0) / generator.gauss(100, 2.0) for _ in range(40_000)]
    mean = sum(ratios) / len(ratios)
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
    assert ratio_uncertainty(90, 1.0, 100, 2.0) == pytest.approx(spread, rel=0.02)


def test_outliers() -> None:
    assert outliers([100.0, 101.0, 99.0, 100.5, 80.0]) == [4]
    assert outliers([100.0, 101.0, 99.0, 100.5, 98.5]) == []
    assert outliers([100.0, 100.0, 100.0, 90.0]) == [3]
    assert outliers([1.0, 50.0, 99.0]) == []


def test_bootstrap_interval_holds_the_true_ratio_about_95_percent_of_the_time() -> None:
    generator = random.Random(2)
    held = 0
    for trial in range(150):
        top = [generator.gauss(1.1, 0.02) for _ in range(20)]
        bottom = [generator.gauss(1.0, 0.02) for _ in range(20)]
        low, high = bootstrap_ratio(top, bottom, resamples=300, seed=trial)
        assert low <= median(top) / median(bottom) <= high
        held += low <= 1.1 <= high
    assert 0.88 <= held / 150 <= 1.0
    assert held < 150


def test_bootstrap_is_the_same_every_time() -> None:
    assert bootstrap_ratio([1.0, 2.0, 3.0], [1.0, 2.0], 100) == bootstrap_ratio([1.0, 2.0, 3.0], [1.0, 2.0], 100)
