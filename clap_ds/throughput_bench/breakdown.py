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
    timer = engine.timer
    rows = []
    engine.deepspeed.tput_timer.config.enabled = False
    dist.barrier()
    for _ in range(num_steps + 1):
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
        exposed_s = phases_s["backward"] - local_s["backward"] if dist.get_world_size() > 1 else 0.0
        rows.append(
            [
                exposed_s if phase == "exposed_communication" else phases_s[phase]
                for phase in STEP_PHASES
            ]
        )
    engine.check_loss()
    of_ranks = torch.tensor(
        rows[1:], dtype=torch.float64, device=engine.device
    )  # the first step is atypical
    dist.all_reduce(of_ranks)
    return [
        dict(zip(STEP_PHASES, row, strict=True))
        for row in (of_ranks / dist.get_world_size()).tolist()
    ]


def median_step(steps: list[dict[str, float]]) -> dict[str, float] | None:
    """Return the median of each phase, with exposed communication subtracted from the backward
    pass."""
    if not steps:
        return None
    seconds = {phase: statistics.median(step[phase] for step in steps) for phase in STEP_PHASES}
    exposed_s = max(0.0, seconds["exposed_communication"])
    return {
        **seconds,
        "backward": seconds["backward"] - exposed_s,
        "exposed_communication": exposed_s,
    }
