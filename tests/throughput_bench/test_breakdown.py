"""The breakdown of a step: with a fake clock, and over a very slow link."""

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
from tests.rank_pool import RankPool

SECONDS = {"data_wait": 1.0, "forward": 2.0, "loss": 4.0, "backward": 32.0, "optimizer": 16.0}
LOCAL_BACKWARD_S = 8.0


class _Engine:
    """Passes take `SECONDS`, three times that on rank 1, and on both 100, 1, 8 and 2 times in
    turn."""

    def __init__(self) -> None:
        self.deepspeed = SimpleNamespace(
            tput_timer=SimpleNamespace(config=SimpleNamespace(enabled=True))
        )
        self.deepspeed.zero_grad = lambda: None
        self.sync = self
        self.is_off = False
        self.passes = 0
        self.now_s = 100.0
        self.device = torch.device("cpu")
        self.timer = StepTimer(self.device)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        self.is_off = True
        yield
        self.is_off = False

    def accumulate(self, loader: Any) -> None:
        assert not self.deepspeed.tput_timer.config.enabled
        factor = (100, 1, 8, 2)[self.passes // 2]
        for phase, seconds in (
            SECONDS.items() if not self.is_off else [("backward", LOCAL_BACKWARD_S)]
        ):
            with self.timer(phase):
                self.now_s += seconds * factor * (3 if dist.get_rank() else 1)
        self.passes += 1

    step = accumulate

    def check_loss(self) -> None:
        pass


def _breakdown(num_steps: int) -> dict[str, float] | None:
    engine: Any = _Engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clap_ds.metrics.timers.time.perf_counter", lambda: engine.now_s)
        steps = measure_breakdown(engine, iter(()), num_steps)  # type: ignore[arg-type]
    return median_step(steps)


def test_what_a_local_backward_takes_less_is_exposed(
    one_rank: RankPool, two_ranks: RankPool
) -> None:
    typical = 2 * 2  # median of three steps, after the first, times the mean over ranks
    expected = {phase: typical * seconds for phase, seconds in SECONDS.items()}
    expected |= {
        "backward": typical * LOCAL_BACKWARD_S,
        "exposed_communication": typical * (32 - LOCAL_BACKWARD_S),
    }
    assert two_ranks.run(_breakdown, 3) == [pytest.approx(expected)] * 2
    (alone,) = one_rank.run(_breakdown, 3)
    assert alone == pytest.approx(
        {phase: 2 * s for phase, s in SECONDS.items()} | {"exposed_communication": 0.0}
    )
    assert two_ranks.run(_breakdown, 0) == [None] * 2


def test_a_faster_pass_with_communication_exposes_none() -> None:
    step = dict.fromkeys(STEP_PHASES, 1.0)
    median = median_step([{**step, "exposed_communication": -0.25, "backward": 3.0}] * 3)
    assert median == {**step, "exposed_communication": 0.0, "backward": 3.0}
