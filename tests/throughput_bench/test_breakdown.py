"""The breakdown of a step with a fake clock."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.metrics.timers import StepTimer
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.throughput_bench.breakdown import measure_breakdown, median_step

SECONDS = {
    "data_wait": 1.0,
    "forward": 2.0,
    "feature_wait": 64.0,
    "loss": 4.0,
    "backward": 32.0,
    "optimizer": 16.0,
}
LOCAL_BACKWARD_S = 8.0


class Engine:
    """An engine whose steps take `SECONDS`, three times that on rank 1, and on both 100, 1, 8 and 2
    times in turn."""

    def __init__(self) -> None:
        timer = SimpleNamespace(config=SimpleNamespace(enabled=True))
        self.deepspeed = SimpleNamespace(tput_timer=timer, zero_grad=lambda: None)
        self.sync = SimpleNamespace(off=self._without_all_reduce)
        self.is_off = False
        self.factors = iter((100, 1, 8, 2))
        self.now_s = 100.0
        self.device = torch.device("cpu")
        self.timer = StepTimer(self.device)
        self.check_loss = lambda: None

    @contextlib.contextmanager
    def _without_all_reduce(self) -> Iterator[None]:
        self.is_off = True
        yield
        self.is_off = False

    def accumulate(self, loader: Any) -> None:
        assert self.is_off
        self.factor = next(self.factors) * (1 + 2 * dist.get_rank())
        self._spend({"backward": LOCAL_BACKWARD_S})

    def step(self, loader: Any) -> None:
        assert not self.is_off
        self._spend(SECONDS)

    def _spend(self, seconds_by_phase: dict[str, float]) -> None:
        for phase, seconds in seconds_by_phase.items():
            with self.timer(phase):
                self.now_s += seconds * self.factor


def _break_down(num_steps: int) -> dict[str, float] | None:
    engine: Any = Engine()
    loader: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: engine.now_s)
        return median_step(measure_breakdown(engine, loader, num_steps))


def test_breakdown_of_two_ranks_exposes_what_a_local_backward_takes_less(two_ranks):
    # The median of the factors after the first, times the mean over ranks.
    factor = 2 * 2
    expected = {phase: factor * seconds for phase, seconds in SECONDS.items()}
    expected["backward"] = factor * LOCAL_BACKWARD_S
    expected["exposed_communication"] = factor * (32 - LOCAL_BACKWARD_S)
    assert two_ranks.run(_break_down, 3) == [pytest.approx(expected)] * 2


def test_median_step_with_a_faster_communicating_pass_exposes_none():
    step = dict.fromkeys(STEP_PHASES, 1.0)
    median = median_step([{**step, "exposed_communication": -0.25, "backward": 3.0}] * 3)
    assert median == {**step, "exposed_communication": 0.0, "backward": 3.0}
