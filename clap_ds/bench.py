"""Command: throughput of CLAP training on a given configuration.

    deepspeed [--hostfile H] clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json

Warm-up steps, then windows of timed steps, then an instrumented pass that says where the time goes. Also runs under
torchrun and, as a single rank, under plain python.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    # A launcher starts this file by its path, which puts the package's folder, not its parent, on the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.ranks.distributed import Ranks, check_hostfile, choose_accelerator, run_arguments, run_command


def main(ranks: Ranks) -> None:
    arguments = run_arguments("clap_ds/bench.py", (__doc__ or "").splitlines()[0]).parse_args()
    from clap_ds.config.settings import load_run

    run = load_run(arguments.deepspeed_config, ranks.world_size)
    if arguments.hostfile:
        ranks = check_hostfile(arguments.hostfile, ranks)

    # Loading torch and DeepSpeed takes seconds: only for a run that can start.
    choose_accelerator()
    from clap_ds.engine.session import open_session
    from clap_ds.measuring.throughput import measure

    with open_session(run, ranks) as session:
        measure(session)


def command() -> None:
    """Console command `clap-bench`."""
    run_command(main)


if __name__ == "__main__":
    command()
