"""Timers."""

from collections.abc import Callable

import pytest
import torch

from clap_ds.run_records.timers import StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances a fake clock, so that a busy machine has no effect."""
    now = [100.0]
    monkeypatch.setattr("clap_ds.run_records.timers.time.perf_counter", lambda: sum(now))
    return now.append


def test_steps_cover_the_window_and_waits_are_not_their_own(passes: Callable[[float], None]) -> None:
    timer = StepTimer(CPU)
    for _ in range(2):
        with timer.peer_wait(), timer("data_wait"):
            passes(32.0)  # outside all windows
        timer.start()
        for seconds in (1.0, 2.0, 4.0):
            passes(seconds)
            for part in (0.125, seconds / 4):
                with timer.peer_wait():
                    passes(part)
            timer.mark()
            timer.start()  # does nothing, as a window is running
        with timer.peer_wait():
            passes(0.5)
        assert timer.stop()[:3] == (9.625, [1.375, 2.625, 5.125], [1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("instrumented", "seconds"),
    [(True, {"data_wait": 1.0, "communication": 5.0, "backward": 3.0}), (False, {"data_wait": 1.0})],
)
def test_phases_inside_others_are_taken_out_and_only_the_wait_for_data_is_always_timed(
    passes: Callable[[float], None], instrumented: bool, seconds: dict[str, float]
) -> None:
    timer = StepTimer(CPU)
    timer.start(instrumented=instrumented)
    with timer("data_wait"):
        passes(1.0)
    with timer("backward"):
        passes(2.0)
        with timer("communication"):
            passes(5.0)
        passes(1.0)
    timer.mark()
    (found,) = timer.stop().phases_s
    assert found == seconds
    assert found["loss"] == 0


def test_a_late_copy_is_waited_for_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fake stream that reaches an event when earlier work is done, without blocking the host."""
    reached, synchronised = 0.0, []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = reached

        def elapsed_time(self, later: "Event") -> float:
            assert synchronised, "the device hasn't reached the event"
            return 1000 * (later.at - self.at)

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", synchronised.append)
    timer = StepTimer(torch.device("cuda"))
    timer.start()
    synchronised.clear()
    for busy_until, copied_at in ((10.0, 13.0), (20.0, 15.0)):  # the second copy arrives in time
        reached = busy_until
        with timer("data_wait"):
            reached = max(reached, copied_at)
    assert not synchronised
    timer.mark()
    assert timer.stop().phases_s[0]["data_wait"] == 3.0
