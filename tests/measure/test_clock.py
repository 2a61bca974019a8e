"""Statistics against simulation, and the timers' bookkeeping."""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
import pytest
import torch

from clap_ds.measure.clock import PhaseTimer, StepClock, median_interval, percentile

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [6, 9, 10, 20])
def test_interval_covers_the_true_median_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    true_median, covered, trials = 1.0, 0, 4000
    for _ in range(trials):
        # Skewed, as step times are: log-normal with median 1.
        interval = median_interval([rng.lognormvariate(0, 0.5) for _ in range(count)])
        covered += interval.low <= true_median <= interval.high
    assert interval.coverage >= 0.95
    # Four standard errors of a proportion near 0.97 over 4000 trials are 0.011.
    assert covered / trials == pytest.approx(interval.coverage, abs=0.011)


def test_too_few_values_for_95_percent_give_their_range_and_say_so() -> None:
    interval = median_interval([3.0, 1.0, 2.0])
    assert (interval.median, interval.low, interval.high) == (2.0, 1.0, 3.0)
    assert interval.coverage == 0.75  # 1 - 2 · (1/2)³


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


@pytest.mark.parametrize("percent", [0, 50, 95, 100])
def test_percentile_is_numpys(percent: float) -> None:
    values = [random.Random(4).random() for _ in range(37)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_step_clock_counts_steps_and_covers_them() -> None:
    clock = StepClock(CPU)
    clock.start()
    for _ in range(3):
        time.sleep(0.01)
        clock.mark()
    window_s, step_s = clock.stop()
    assert len(step_s) == 3
    assert all(step >= 0.01 for step in step_s)
    assert sum(step_s) == pytest.approx(window_s, abs=5e-3)


def test_phases_inside_others_are_taken_out_of_them() -> None:
    timer = PhaseTimer(CPU, instrumented=True)
    with timer("backward"):
        time.sleep(0.02)
        with timer("communication"):
            time.sleep(0.05)
    assert timer.seconds["communication"] >= 0.05
    assert 0.02 <= timer.seconds["backward"] < timer.seconds["communication"]


def test_only_host_phases_are_timed_while_throughput_is_measured() -> None:
    timer = PhaseTimer(CPU, instrumented=False)
    with timer("data_wait"):
        time.sleep(0.01)
    with timer("forward"):
        time.sleep(0.01)
    assert set(timer.seconds) == {"data_wait"}
    timer.reset()
    assert not timer.seconds
