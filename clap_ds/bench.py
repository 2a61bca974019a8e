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

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.settings import load_run
from clap_ds.distributed.init import (
    Ranks,
    announce_accelerator,
    make_run_parser,
    prepare_debugging,
    run_command,
)


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    """Read the options and settings, and measure."""
    arguments = make_run_parser(__doc__).parse_args(argv)
    run = load_run(arguments.config, ranks.world_size, arguments.set)
    prepare_debugging(run.clap.debug)
    announce_accelerator(ranks)
    # Importing torch and DeepSpeed takes seconds: the settings are validated before.
    from clap_ds.throughput_bench.loop import measure_run

    measure_run(run, ranks)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
