"""Break a step's time down into phases."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from clap_ds.data.dataloader import BatchSource
from clap_ds.engine.engine import ClapEngine
from clap_ds.run_records.schema import STEP_PHASES


def measure_breakdown(
    engine: ClapEngine, loader: BatchSource, num_steps: int
) -> list[dict[str, float]]:
    """Return each instrumented step's phases in seconds, mean over ranks. A collective.

    The device is synchronized between phases, so they may not add up to an uninstrumented step.
    Exposed communication, which includes waits for slower ranks, is the extra time of backward
    passes over the same ones without all-reduce.
    """
    if num_steps == 0:
        return []
    # These steps are slower than usual.
    engine.deepspeed.tput_timer.is_off = True
    dist.barrier()
    # The first step is atypical.
    _measure_step(engine, loader)
    rows = [_measure_step(engine, loader) for _ in range(num_steps)]
    engine.check_loss()
    # (steps, phases)
    seconds = torch.tensor(rows, dtype=torch.float64, device=engine.device)
    dist.all_reduce(seconds)
    seconds /= dist.get_world_size()
    return [dict(zip(STEP_PHASES, row, strict=True)) for row in seconds.tolist()]


def _measure_step(engine: ClapEngine, loader: BatchSource) -> list[float]:
    """Return the seconds of each of `STEP_PHASES` on this rank."""
    timer = engine.timer
    with engine.sync.off():
        timer.start(instrumented=True)
        engine.accumulate(loader)
        timer.mark()
    (local_s,) = timer.stop().phases_s
    engine.deepspeed.zero_grad()

    timer.start(instrumented=True)
    engine.step(loader)
    timer.mark()
    (phases_s,) = timer.stop().phases_s
    if dist.get_world_size() > 1:
        phases_s["exposed_communication"] = phases_s["backward"] - local_s["backward"]
    # Phases that didn't occur, such as communication on one rank, took 0 s.
    return [phases_s[phase] for phase in STEP_PHASES]


def median_step(steps: list[dict[str, float]]) -> dict[str, float] | None:
    """Return the median of each phase, with exposed communication subtracted from the backward
    pass."""
    if not steps:
        return None
    seconds = {phase: statistics.median(step[phase] for step in steps) for phase in STEP_PHASES}
    seconds["exposed_communication"] = max(0.0, seconds["exposed_communication"])
    seconds["backward"] -= seconds["exposed_communication"]
    return seconds
