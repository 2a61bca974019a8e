"""Measure CLAP training throughput for a run configuration.

Examples:
    clap-ds bench --config htsat_tiny   one rank
    deepspeed clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json   all GPUs of this host
    deepspeed --hostfile H clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json   several hosts
    deepspeed clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json --set clap.bench.windows=3

Runs warm-up steps, timed windows, then an instrumented pass that breaks down a step's time. The
results are in a new folder of clap.output.dir (default: runs). Several ranks need `deepspeed` or
torchrun.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import (
    Ranks,
    announce_accelerator,
    prepare_debugging,
    run_arguments,
    run_command,
)

if TYPE_CHECKING:
    import torch


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    arguments = run_arguments(__doc__).parse_args(argv)
    run = load_run(arguments.config, ranks.world_size, arguments.set)
    prepare_debugging(run.clap.debug)
    announce_accelerator(ranks)
    from clap_ds.run import join_ranks

    with join_ranks(run, ranks) as device:
        measure_run(run, ranks, device)


def measure_run(run: RunSettings, ranks: Ranks, device: torch.device) -> None:
    """Measure a run: warm-up, timed windows, instrumented steps, and their FLOPs."""
    # Importing torch and DeepSpeed takes seconds: the settings are validated before.
    import torch.distributed as dist

    from clap_ds.distributed.watchdog import ending
    from clap_ds.metrics.tensorboard import Scalars
    from clap_ds.metrics.timers import StepTimer
    from clap_ds.run import open_run_dir, setup_dataloader, setup_engine, setup_model
    from clap_ds.throughput_bench.breakdown import measure_breakdown
    from clap_ds.throughput_bench.find_micro_batch import find_micro_batch
    from clap_ds.throughput_bench.flops_profile import measure_flops
    from clap_ds.throughput_bench.report import BenchReport

    clap = run.clap
    protocol = run.clap.bench
    profiler = run.deepspeed.get("flops_profiler", {})
    windows: list[tuple[int | None, int]] = [(None, 1)] * protocol.warmup_steps
    windows += [(number, protocol.steps_per_window) for number in range(1, protocol.windows + 1)]
    with open_run_dir(run, ranks, device) as record:
        # The profiler would synchronize in every step: `measure_flops` profiles a forward pass
        # after the timed ones.
        unprofiled = {
            name: section for name, section in run.deepspeed.items() if name != "flops_profiler"
        }
        model = setup_model(run, ranks, device)
        engine = setup_engine(replace(run, deepspeed=unprofiled), ranks, model, StepTimer(device))
        if protocol.find_micro_batch:
            find_micro_batch(engine, run)
        loader = setup_dataloader(run, ranks, engine)
        with loader, Scalars(engine, record.path) as scalars:
            chosen = engine.optimize_towers(loader, clap.model, clap.compile)
            if ranks.is_main_process:
                record.update_summary(chosen)
            total = sum(num_steps for _, num_steps in windows) + protocol.breakdown_steps
            report = BenchReport(record, engine, loader, scalars, ranks, total)
            gc.collect()
            gc.freeze()  # later collections, between windows, only scan new objects
            gc.disable()
            for number, num_steps in windows:
                losses = []
                gc.collect()
                dist.barrier()
                engine.timer.start()
                for left in reversed(range(num_steps)):
                    losses.append(engine.step(loader, waits=left == 0))
                    engine.timer.mark()
                report.add(number, engine.stop_timers(), losses)
            phases_s = measure_breakdown(engine, loader, protocol.breakdown_steps)
            gc.enable()
            gc.unfreeze()
            flops = measure_flops(engine, loader, clap.model, profiler, record.path)
            ending()
            report.finish(phases_s, flops, clap.hardware.peak_tflops)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
