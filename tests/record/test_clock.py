"""Statistics against simulation, and the timers' bookkeeping."""

import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch

from clap_ds.record.clock import PhaseTimer, StepClock
from clap_ds.record.statistics import (
    median_interval,
    percentile,
    rates,
    serial_correlation,
    student_t,
    window_interval,
)

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


@pytest.mark.parametrize(("count", "percent"), list(enumerate(["0", "50", "75", "87.5", "93.8", "96.9"], start=1)))
def test_too_few_values_for_95_percent_give_their_range_and_say_so(count: int, percent: str) -> None:
    interval = median_interval([float(value) for value in range(count)])
    assert (interval.low, interval.high) == (0.0, count - 1.0)
    assert interval.coverage == 1 - 2 / 2**count
    assert interval.label() == f"{percent} % interval of {count} window{'s' * (count > 1)}"


def autoregressive(rng: random.Random, count: int, correlation: float) -> list[float]:
    """Normal values of mean 0 and deviation 1, each with this correlation to the one before."""
    values = [rng.gauss(0, 1)]
    while len(values) < count:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * rng.gauss(0, 1))
    return values


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [6, 10, 20, 30])
def test_windows_that_follow_each_other_state_the_coverage_they_have(count: int, correlation: float) -> None:
    """By what order statistics of independent values promise (0.96 to 0.98) it would be up to 0.27 less than stated."""
    rng, covered, stated, trials = random.Random(100 * count + round(10 * correlation)), 0, 0.0, 1500
    for _ in range(trials):
        interval = window_interval(autoregressive(rng, count, correlation))
        covered += interval.low <= 0 <= interval.high
        stated += interval.coverage
    # From six windows a correlation of 0.7 can't be seen as it is. Three standard errors at 1500 trials are 0.03 at most.
    short = 0.11 if (count, correlation) == (6, 0.7) else 0.045
    assert covered / trials > stated / trials - short - 0.02


def test_correlation_of_windows_is_estimated_and_taken_into_the_record() -> None:
    rng = random.Random(1)
    for correlation in (0.0, 0.5):
        found = [serial_correlation(autoregressive(rng, 30, correlation)) for _ in range(500)]
        assert statistics.mean(found) == pytest.approx(correlation, abs=0.08)
    assert [serial_correlation(values) for values in ([1.0], [1.0, 2.0, 3.0], [1.0] * 9)] == [0.0] * 3
    rising = rates([1.0, 1.1, 1.3, 1.6, 1.7, 1.9, 2.0])
    assert rising["coverage"] < 0.8 < median_interval(rising["windows"]).coverage


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 5.841), (4, 4.604), (10, 3.169), (1000, 2.581)])
def test_students_t_at_99_percent(degrees: int, quantile: float) -> None:
    assert quantile - 1e-3 <= student_t(0.99, degrees) < 1.04 * quantile


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


def test_only_the_wait_for_data_is_timed_while_throughput_is_measured(passes: Callable[[float], None]) -> None:
    timer = PhaseTimer(CPU, instrumented=False)
    with timer("data_wait"):
        passes(1.0)
    with timer("forward"):
        passes(2.0)
    assert timer.seconds == {"data_wait": 1.0}
    assert timer.seconds["loss"] == 0


def test_a_late_copy_is_waited_for_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream that gets to an event when the work before it is done; the host waits for nothing."""
    reached, synchronised = 0.0, []

    class Event:
        at: float

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = reached

        def elapsed_time(self, later: "Event") -> float:
            assert synchronised, "an event that the device hasn't come to has no time"
            return 1000 * (later.at - self.at)

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", synchronised.append)
    timer = PhaseTimer(torch.device("cuda"), instrumented=False)
    for busy_until, copied_at in ((10.0, 13.0), (20.0, 15.0)):  # the second copy is there in time
        reached = busy_until
        with timer("data_wait"):
            reached = max(reached, copied_at)
        with timer("forward"):
            reached += 1
    assert not synchronised
    assert timer.seconds == {"data_wait": 3.0}
