"""Throughput, medians and their intervals, against simulations and hand calculations."""

import pytest

from clap_ds.metrics.intervals import median_interval, rates, student_t


def test_median_interval_is_a_pair_of_order_statistics() -> None:
    """The number of 20 values below the median is 5 or less in 2.07% of samples."""
    interval = median_interval([float(value) for value in range(20, 0, -1)])
    assert (interval["low"], interval["median"], interval["high"]) == (6, 10.5, 15)
    assert interval["coverage"] == pytest.approx(1 - 2 * 0.020695, abs=1e-5)


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
