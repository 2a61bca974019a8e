"""Measure a run's throughput: the loop of `clap-ds bench`.

Warm-up steps come first, then timed windows of steps. The device is synchronized only at the
windows' edges. Instrumented steps then give the phases of a step, and FLOPs are counted. Steps to
profile come last: a profiler may slow down all steps after it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH, MICRO_BATCH
from clap_ds.config.schema import ProfileSettings
from clap_ds.config.settings import RunSettings
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import ending
from clap_ds.engine.engine import ClapEngine
from clap_ds.metrics.profiler import StepProfiler
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.metrics.timers import StepTimer, StepTimes
from clap_ds.run import join_ranks, open_run_dir, setup_dataloader, setup_engine, setup_model
from clap_ds.throughput_bench.breakdown import measure_breakdown
from clap_ds.throughput_bench.find_micro_batch import find_micro_batch
from clap_ds.throughput_bench.flops_profile import measure_flops
from clap_ds.throughput_bench.report import BenchReport


def measure_run(run: RunSettings, ranks: Ranks) -> None:
    """Measure a run: warm-up, timed windows, instrumented steps, and their FLOPs."""
    clap = run.clap
    protocol = clap.bench
    timed_steps = protocol.windows * protocol.steps_per_window
    num_steps = protocol.warmup_steps + timed_steps + protocol.breakdown_steps
    profiler = run.deepspeed.get("flops_profiler", {})
    # DeepSpeed's profiler would synchronize in every step: `measure_flops` profiles a forward pass
    # after the timed ones.
    sections = {name: value for name, value in run.deepspeed.items() if name != "flops_profiler"}

    with join_ranks(run, ranks) as device, open_run_dir(run, ranks, device) as record:
        model = setup_model(run, ranks, device)
        engine = setup_engine(replace(run, deepspeed=sections), ranks, model, StepTimer(device))
        if protocol.find_micro_batch:
            micro_batch = find_micro_batch(engine, run.micro_batch, clap.context_length)
            run = with_micro_batch(run, micro_batch)
            if ranks.is_main_process:
                record.update_summary(micro_batch_per_gpu=micro_batch)
        with (
            setup_dataloader(run, ranks, engine) as loader,
            Scalars(engine, record.path) as scalars,
        ):
            # Compiling needs a batch as the loader makes them.
            choices = engine.optimize_towers(loader, clap.model, clap.compile, ranks.local_rank)
            if ranks.is_main_process:
                record.update_summary(choices)
            report = BenchReport(record, engine, loader, scalars, ranks, num_steps)
            with garbage_collection_off():
                # Each is a window of its own, to show how long the first ones take.
                for _ in range(protocol.warmup_steps):
                    report.add(None, *measure_window(engine, loader, num_steps=1))
                for number in range(1, protocol.windows + 1):
                    window = measure_window(engine, loader, protocol.steps_per_window)
                    report.add(number, *window)
                phases_s = measure_breakdown(engine, loader, protocol.breakdown_steps)
            # After timing, as it changes the model's kernels for a while.
            flops = measure_flops(engine, loader, clap.model, profiler, record.path)
            report.finish(phases_s, flops, clap.hardware.peak_tflops)
            if clap.profile is not None:
                profile_steps(engine, loader, clap.profile, record.path, ranks.rank)
            # The watchdog expects no more steps.
            ending()


def measure_window(
    engine: ClapEngine, loader: BatchSource, num_steps: int
) -> tuple[StepTimes, list[Tensor]]:
    """Time steps. Returns this rank's times and losses; it hasn't read the latter. A collective."""
    losses = []
    gc.collect()
    # All ranks start together.
    dist.barrier()
    engine.timer.start()
    for number in range(1, num_steps + 1):
        losses.append(engine.step(loader, waits=number == num_steps))
        engine.timer.mark()
    return engine.stop_timers(), losses


def profile_steps(
    engine: ClapEngine, loader: BatchSource, settings: ProfileSettings, folder: Path, rank: int
) -> None:
    """Profile steps after the run's last one, and write the results to `folder`. All ranks take the
    same steps."""
    engine.deepspeed.tput_timer.is_off = True
    # The profiler warms up in the next step.
    steps = settings.steps_from(engine.steps + 2)
    with StepProfiler(settings, engine.timer, folder, rank, steps) as profiler:
        for step in steps:
            profiler.begin_step(step)
            engine.step(loader)
            profiler.end_step(step)


def with_micro_batch(run: RunSettings, micro_batch: int) -> RunSettings:
    """Return a run with another micro-batch. It keeps its gradient accumulation: the global batch
    follows."""
    sizes = {MICRO_BATCH: micro_batch, ACCUMULATION: run.gradient_accumulation_steps}
    sections = {name: value for name, value in run.deepspeed.items() if name != GLOBAL_BATCH}
    return replace(run, deepspeed={**sections, **sizes})


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Don't collect garbage in the body unless it calls `gc.collect`, which then scans only new
    objects."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
