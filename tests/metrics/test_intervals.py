"""Throughput, medians and their intervals, against simulations and hand calculations."""

import random

import pytest

from clap_ds.metrics.intervals import median_interval, rates, student_t


@pytest.mark.parametrize("count", [6, 20])
def test_interval_covers_the_true_median_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    covered = 0
    trials = 4000
    for _ in range(trials):  # skewed, as step times are: log-normal with median 1
        interval = median_interval([rng.lognormvariate(0, 0.5) for _ in range(count)])
        covered += interval["low"] <= 1.0 <= interval["high"]
    assert interval["coverage"] >= 0.95
    # Four standard errors of a proportion near 0.97 over 4000 trials are 0.011.
    assert covered / trials == pytest.approx(interval["coverage"], abs=0.011)


def test_rate_is_all_samples_over_all_seconds_whatever_the_windows() -> None:
    """Every tenth step takes 4× as long: 10 samples per step in 0.13 s on average."""
    steps_s = [0.4 if step % 10 == 9 else 0.1 for step in range(600)]
    for size in (1, 7, 10, 250, 600):
        windows = [sum(steps_s[start : start + size]) for start in range(0, 600, size)]
        samples = [10 * min(size, 600 - start) for start in range(0, 600, size)]
        found = rates([a / b for a, b in zip(samples, windows, strict=True)], windows)
        assert found["mean"] == pytest.approx(10 / 0.13)


def test_windows_have_a_range_without_a_percentage() -> None:
    windows = [10.0, 12.0, 11.0, 9.0, 5.0, 10.0]
    window_s = [2.0] * 4 + [4.0, 2.0]
    assert rates(windows, window_s) == {
        "mean": pytest.approx(124 / 14), "min": 5, "max": 12, "windows": windows, "window_s": window_s,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("coverage", "degrees", "quantile"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 7, 2.365),
        (0.99, 3, 5.841),
        (0.99, 10, 3.169),
        (0.99, 1000, 2.581),
    ],
)
def test_students_t_is_the_tables(coverage: float, degrees: int, quantile: float) -> None:
    assert student_t(coverage, degrees) == pytest.approx(quantile, abs=6e-4)
