"""Throughput over windows of steps, on several ranks."""

import numpy as np
import pytest

from clap_ds.metrics.throughput import MOST_WINDOWS, Throughput, Window


def make_window(window_s: list[float], data_wait_s: list[float], num_steps: int = 1) -> Window:
    """Return a window of equal steps on as many ranks as there are durations."""
    step_s = np.tile(window_s, (num_steps, 1)) / num_steps
    wait_s = np.tile(data_wait_s, (num_steps, 1)) / num_steps
    figures = np.zeros((num_steps, len(window_s), 0))
    return Window(np.array(window_s), step_s, step_s, wait_s, figures, {})


def test_throughput_counts_windows_by_their_length_on_the_slowest_rank() -> None:
    """Two windows of 4 and 1 s have 60 and 40 samples on two ranks; waits for data take 2 and 0.1
    s."""
    throughput = Throughput(world_size=2)
    throughput.add(make_window([4.0, 3.0], [1.0, 2.0], num_steps=3), batch_size=20)
    throughput.add(make_window([0.5, 1.0], [0.1, 0.0]), batch_size=40)
    summary = throughput.summary()
    assert summary["samples_per_s"] == pytest.approx(100 / 5)
    rates = summary["samples_per_s_per_gpu"]
    assert (rates["mean"], rates["min"], rates["max"]) == pytest.approx((10, 7.5, 20))
    assert summary["data_wait_percent"] == pytest.approx(100 * 2.1 / 5)


@pytest.mark.parametrize(
    ("num_windows", "num_merged"),
    [(MOST_WINDOWS, 256), (MOST_WINDOWS + 1, 129)],
)
def test_throughput_of_many_windows_is_merged_with_neighbors(
    num_windows: int, num_merged: int
) -> None:
    throughput = Throughput(world_size=1)
    for _ in range(num_windows):
        throughput.add(make_window([2.0], [0.5]), batch_size=30)
    summary = throughput.summary()
    assert len(summary["samples_per_s_per_gpu"]["windows"]) == num_merged
    assert summary["samples_per_s"] == pytest.approx(15)
    assert summary["data_wait_percent"] == pytest.approx(25)
