"""Timers."""

from collections.abc import Callable

import pytest
import torch

from clap_ds.metrics import timers
from clap_ds.metrics.timers import StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances a fake clock, so that a busy machine has no effect."""
    now = [100.0]
    monkeypatch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: sum(now))
    return now.append


def test_steps_cover_the_window_and_waits_are_not_their_own(
    passes: Callable[[float], None],
) -> None:
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
    [
        (True, {"data_wait": 1.0, "communication": 5.0, "backward": 3.0}),
        (False, {"data_wait": 1.0}),
    ],
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
    """Use a fake stream that reaches an event when earlier work is done, without blocking the
    host."""
    reached = 0.0
    synchronised = []

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


class FakeDevice:
    """A GPU and its host with a clock: queued work delays only a host that synchronizes."""

    def __init__(self) -> None:
        self.host_s = 100.0
        self.done_s = 100.0

    def queue(self, seconds: float) -> None:
        self.done_s = max(self.host_s, self.done_s) + seconds

    def synchronize(self, _: torch.device) -> None:
        self.host_s = max(self.host_s, self.done_s)

    def record_event(self, **_: bool) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    """An event that the device reaches after the work queued before `record`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.reached_s = max(self.device.host_s, self.device.done_s)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1000 * (later.reached_s - self.reached_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: fake.host_s)
    monkeypatch.setattr("torch.cuda.synchronize", fake.synchronize)
    monkeypatch.setattr("torch.cuda.Event", fake.record_event)
    return fake


def test_a_window_is_as_long_as_the_work_queued_in_it(device: FakeDevice) -> None:
    timer = StepTimer(torch.device("cuda"))
    device.queue(5.0)  # before the window
    timer.start()
    for _ in range(2):
        device.host_s += 0.25  # Python's time to queue a step, while the device works
        device.queue(3.0)
        timer.mark()
    times = timer.stop()
    assert times.window_s == 6.25  # the device waits for the first step to be queued
    assert times.step_s == [3.25, 3.0]


def test_an_action_takes_as_long_as_the_work_that_it_queues(device: FakeDevice) -> None:
    device.queue(5.0)
    assert timers.seconds(lambda: device.queue(2.0), torch.device("cuda")) == 2.0
