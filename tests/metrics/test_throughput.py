"""Throughput over windows of steps, on several ranks."""

import numpy as np
import pytest

from clap_ds.metrics.throughput import Throughput, Window


def window(window_s: list[float], data_wait_s: list[float]) -> Window:
    """Return a window of one step on as many ranks as there are durations."""
    step_s = np.array([window_s])
    return Window(
        np.array(window_s),
        step_s,
        step_s,
        np.array([data_wait_s]),
        np.zeros((1, len(window_s), 0)),
        {},
    )


def test_windows_count_by_their_length_on_the_slowest_rank() -> None:
    """Two windows of 4 and 1 s have 60 and 40 samples on two ranks; waits for data take 2 and 0.1
    s."""
    throughput = Throughput(world_size=2)
    throughput.add(window([4.0, 3.0], [1.0, 2.0]), samples=60)
    throughput.add(window([0.5, 1.0], [0.1, 0.0]), samples=40)
    summary = throughput.summary()
    assert summary["samples_per_s"] == pytest.approx(100 / 5)
    rates = summary["samples_per_s_per_gpu"]
    assert (rates["mean"], rates["min"], rates["max"]) == pytest.approx((10, 7.5, 20))
    assert summary["data_wait_percent"] == pytest.approx(100 * 2.1 / 5)


@pytest.mark.parametrize(("num_windows", "num_kept"), [(256, 256), (257, 129), (600, 200)])
def test_many_windows_are_merged_with_their_neighbors(num_windows: int, num_kept: int) -> None:
    throughput = Throughput(world_size=1)
    for _ in range(num_windows):
        throughput.add(window([2.0], [0.5]), samples=30)
    summary = throughput.summary()
    assert len(summary["samples_per_s_per_gpu"]["windows"]) == num_kept
    assert summary["samples_per_s"] == pytest.approx(15)
    assert summary["data_wait_percent"] == pytest.approx(25)
