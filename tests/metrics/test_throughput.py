"""Throughput over windows of steps, on several ranks, and intervals against hand calculations."""

import numpy as np
import pytest

from clap_ds.metrics.intervals import median_interval, rates, student_t
from clap_ds.metrics.throughput import MOST_WINDOWS, Throughput, Window


def make_window(window_s: list[float], data_wait_s: list[float], num_steps: int = 1) -> Window:
    """Return a window of equal steps on as many ranks as there are durations."""
    step_s = np.tile(window_s, (num_steps, 1)) / num_steps
    wait_s = np.tile(data_wait_s, (num_steps, 1)) / num_steps
    figures = np.zeros((num_steps, len(window_s), 0))
    return Window(np.array(window_s), step_s, step_s, wait_s, figures, {})


def test_throughput_counts_windows_by_their_length_on_the_slowest_rank():
    """Two windows of 4 and 1 s have 60 and 40 samples on two ranks; waits for data take 2 and 0.1
    s."""
    throughput = Throughput(world_size=2)
    throughput.add(make_window([4.0, 3.0], [1.0, 2.0], num_steps=3), batch_size=20)
    throughput.add(make_window([0.5, 1.0], [0.1, 0.0]), batch_size=40)
    summary = throughput.summary()
    assert summary["samples_per_s"] == pytest.approx(100 / 5)
    per_gpu = summary["samples_per_s_per_gpu"]
    assert (per_gpu["mean"], per_gpu["min"], per_gpu["max"]) == pytest.approx((10, 7.5, 20))
    assert summary["data_wait_percent"] == pytest.approx(100 * 2.1 / 5)


@pytest.mark.parametrize(
    ("num_windows", "num_merged"),
    [(MOST_WINDOWS, 256), (MOST_WINDOWS + 1, 129)],
)
def test_throughput_of_many_windows_is_merged_with_neighbors(num_windows, num_merged):
    throughput = Throughput(world_size=1)
    for _ in range(num_windows):
        throughput.add(make_window([2.0], [0.5]), batch_size=30)
    summary = throughput.summary()
    assert len(summary["samples_per_s_per_gpu"]["windows"]) == num_merged
    assert summary["samples_per_s"] == pytest.approx(15)
    assert summary["data_wait_percent"] == pytest.approx(25)


def test_median_interval_is_a_pair_of_order_statistics():
    """The number of 20 values below the median is 5 or less in 2.07% of samples."""
    interval = median_interval([float(value) for value in range(20, 0, -1)])
    assert (interval["low"], interval["median"], interval["high"]) == (6, 10.5, 15)
    assert interval["coverage"] == pytest.approx(1 - 2 * 0.020695, abs=1e-5)


def test_rates_have_the_windows_range():
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
def test_student_t_agrees_with_tables(coverage, degrees, quantile):
    assert student_t(coverage, degrees) == pytest.approx(quantile, abs=6e-4)
