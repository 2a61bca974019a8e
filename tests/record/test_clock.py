"""Statistics against simulation, and the timers' bookkeeping."""

import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch

from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.statistics import median_interval, percentile

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


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass, on a clock that stands still otherwise: a busy machine adds nothing to it."""
    now = [100.0]
    monkeypatch.setattr("clap_ds.record.clock.time.perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_step_clock_counts_steps_and_covers_them(passes: Callable[[float], None]) -> None:
    clock = StepClock(CPU)
    clock.start()
    for seconds in (1.0, 2.0, 4.0):
        passes(seconds)
        clock.mark()
    passes(0.5)
    assert clock.stop() == (7.5, [1.0, 2.0, 4.0])


def test_phases_inside_others_are_taken_out_of_them(passes: Callable[[float], None]) -> None:
    timer = PhaseTimer(CPU, instrumented=True)
    with timer("backward"):
        passes(2.0)
        with timer("communication"):
            passes(5.0)
        passes(1.0)
    assert timer.seconds == {"communication": 5.0, "backward": 3.0}


def test_only_host_phases_are_timed_while_throughput_is_measured(passes: Callable[[float], None]) -> None:
    timer = PhaseTimer(CPU, instrumented=False)
    with timer("data_wait"):
        passes(1.0)
    with timer("forward"):
        passes(2.0)
    assert timer.seconds == {"data_wait": 1.0}
    timer.reset()
    assert not timer.seconds
