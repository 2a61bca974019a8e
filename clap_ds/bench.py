"""Measure CLAP training throughput for a run configuration.

    deepspeed [--hostfile H] clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json

Runs warm-up steps, timed windows, then an instrumented pass that breaks down a step's time. torchrun also works, as
does plain python with one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import (
    Ranks,
    check_hostfile,
    choose_accelerator,
    prepare_debugging,
    run_arguments,
    run_command,
)


def main(ranks: Ranks) -> None:
    arguments = run_arguments("clap_ds/bench.py", (__doc__ or "").splitlines()[0]).parse_args()
    run = load_run(arguments.deepspeed_config, ranks.world_size)
    if arguments.hostfile:
        ranks = check_hostfile(arguments.hostfile, ranks)
    prepare_debugging(run.clap.debug)
    choose_accelerator()
    measure_run(run, ranks)


def measure_run(run: RunSettings, ranks: Ranks, protocol: Callable[[Any], object] | None = None) -> None:
    """Run a validated configuration; `protocol` replaces `measure`."""
    # Importing torch and DeepSpeed takes seconds: validate first.
    import torch

    from clap_ds.benchmark.throughput import measure
    from clap_ds.distributed.collectives import raise_on_all_ranks
    from clap_ds.engine.factory import build_model, fetch_from_hub
    from clap_ds.engine.session import build_engine, init_process_group, open_run_dir, train_session

    device = init_process_group(run, ranks)
    with open_run_dir(run, ranks, device) as record:
        with raise_on_all_ranks():
            fetch_from_hub(run, ranks)
        with raise_on_all_ranks():
            torch.manual_seed(run.clap.seed)
            model = build_model(run, device)
        # The profiler would synchronize in every step: `measure` profiles one extra step after the timed ones.
        engine = build_engine(run.without("flops_profiler"), model, ranks, device, record)
        with train_session(run, ranks, record, engine) as session:
            (protocol or measure)(session)


def command() -> None:
    """Run the console command `clap-bench`."""
    run_command(main)


if __name__ == "__main__":
    command()
