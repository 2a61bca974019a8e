"""Throughput, medians and their intervals, against simulations and hand calculations."""

import random

import pytest

from clap_ds.metrics.intervals import median_interval, rates, student_t


@pytest.mark.parametrize("count", [6, 20])
def test_median_interval_covers_the_median_as_often_as_stated(count: int) -> None:
    rng = random.Random(count)
    covered = 0
    trials = 4000
    for _ in range(trials):
        # Skewed, as step times are: log-normal with median 1.
        interval = median_interval([rng.lognormvariate(0, 0.5) for _ in range(count)])
        covered += interval["low"] <= 1.0 <= interval["high"]
    assert interval["coverage"] >= 0.95
    # Four standard errors of a proportion near 0.97 over 4000 trials are 0.011.
    assert covered / trials == pytest.approx(interval["coverage"], abs=0.011)


def test_rates_have_the_windows_range() -> None:
    assert rates([20.0, 24.0, 20.0], [2.0, 2.0, 4.0]) == {
        "mean": 64 / 8,
        "min": 5,
        "max": 12,
        "windows": [10, 12, 5],
        "window_s": [2, 2, 4],
    }


@pytest.mark.parametrize(
    ("coverage", "degrees", "quantile"),
    [(0.95, 1, 12.706), (0.95, 7, 2.365), (0.99, 3, 5.841), (0.99, 1000, 2.581)],
)
def test_student_t_agrees_with_tables(coverage: float, degrees: int, quantile: float) -> None:
    assert student_t(coverage, degrees) == pytest.approx(quantile, abs=6e-4)
