"""Step times, phases and waits with fake clocks, so that a busy machine has no effect."""

from collections.abc import Callable

import pytest
import torch

from clap_ds.metrics.timers import StepTimer

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the host's clock."""
    now_s = [100.0]
    monkeypatch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: sum(now_s))
    return now_s.append


def test_step_times_cover_the_window_and_own_times_exclude_peer_waits(advance):
    timer = StepTimer(CPU)
    # The second window has nothing of the first one.
    for _ in range(2):
        with timer.peer_wait(), timer("data_wait"):
            advance(32.0)
        timer.start()
        for seconds in (1.0, 2.0, 4.0):
            advance(seconds)
            for wait_s in (0.125, seconds / 4):
                with timer.peer_wait():
                    advance(wait_s)
            timer.mark()
            # A window is running.
            timer.start()
        with timer.peer_wait():
            advance(0.5)
        times = timer.stop()
        assert times.window_s == 9.625
        assert times.step_s == [1.375, 2.625, 5.125]
        assert times.own_s == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("instrumented", "seconds"),
    [
        (True, {"data_wait": 1.0, "communication": 5.0, "backward": 3.0}),
        (False, {"data_wait": 1.0}),
    ],
)
def test_phases_exclude_nested_ones_and_need_instrumentation(advance, instrumented, seconds):
    timer = StepTimer(CPU)
    timer.start(instrumented=instrumented)
    with timer("data_wait"):
        advance(1.0)
    with timer("backward"):
        advance(2.0)
        with timer("communication"):
            advance(5.0)
        advance(1.0)
    timer.mark()
    (phases_s,) = timer.stop().phases_s
    assert phases_s == seconds
    # Other phases took no time.
    assert phases_s["loss"] == 0


def test_feature_wait_is_a_phase_within_the_loss_and_not_own_time(advance):
    timer = StepTimer(CPU)
    timer.start(instrumented=True)
    with timer("loss"):
        advance(2.0)
        with timer.feature_wait():
            advance(5.0)
        advance(1.0)
    timer.mark()
    times = timer.stop()
    assert times.phases_s == [{"loss": 3.0, "feature_wait": 5.0}]
    assert times.own_s == [3.0]


class FakeDevice:
    """A GPU and its host with a clock: queued work delays only a host that synchronizes."""

    def __init__(self) -> None:
        self.host_s = 100.0
        self.done_s = 100.0
        self.num_synchronized = 0

    def queue(self, seconds: float) -> None:
        self.done_s = max(self.host_s, self.done_s) + seconds

    def synchronize(self, _: torch.device) -> None:
        self.host_s = max(self.host_s, self.done_s)
        self.num_synchronized += 1

    def make_event(self, **_: bool) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    """An event that the device reaches after the work queued before `record`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.reached_s = max(self.device.host_s, self.device.done_s)

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.reached_s <= self.device.host_s, "the device hasn't reached the event"
        return 1000 * (later.reached_s - self.reached_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: fake.host_s)
    monkeypatch.setattr("torch.cuda.synchronize", fake.synchronize)
    monkeypatch.setattr("torch.cuda.Event", fake.make_event)
    return fake


def test_window_on_gpu_is_as_long_as_the_work_queued_in_it(device):
    timer = StepTimer(GPU)
    # Before the window.
    device.queue(5.0)
    timer.start()
    for _ in range(2):
        # Python's time to queue a step, while the device works.
        device.host_s += 0.25
        device.queue(3.0)
        timer.mark()
    times = timer.stop()
    # The device waits for the first step to be queued.
    assert times.window_s == 6.25
    assert times.step_s == [3.25, 3.0]


def test_data_wait_on_gpu_is_the_devices_and_does_not_block_the_host(device):
    timer = StepTimer(GPU)
    timer.start()
    num_synchronized = device.num_synchronized
    device.queue(10.0)
    with timer("data_wait"):
        # A copy that completes 3 s after earlier work.
        device.queue(3.0)
    device.queue(7.0)
    with timer("data_wait"):
        # The second copy arrives in time.
        device.queue(0.0)
    assert device.num_synchronized == num_synchronized
    timer.mark()
    assert timer.stop().phases_s[0]["data_wait"] == 3.0
