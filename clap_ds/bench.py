"""Command: throughput of CLAP training on a given configuration.

    deepspeed [--hostfile H] clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json

Warm-up steps, then windows of timed steps, then an instrumented pass that says where the time goes. Also runs under
torchrun and, as a single rank, under plain python.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    # A launcher starts this file by its path, which puts the package's folder, not its parent, on the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.distributed import Ranks, UserError, check_hostfile, run_command
from clap_ds.settings import SettingsError, load_run


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="clap_ds/bench.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, required=True, metavar="FILE", help="JSON that describes the run"
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="refuse to run on fewer or more ranks")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args(argv)


def main(ranks: Ranks) -> None:
    arguments = parse_arguments()
    try:
        run = load_run(arguments.deepspeed_config)
    except SettingsError as error:
        raise UserError(str(error)) from None
    if arguments.hostfile:
        check_hostfile(arguments.hostfile, ranks)

    # Loading torch and DeepSpeed takes seconds: only for a run that can start.
    from clap_ds.measure.throughput import measure
    from clap_ds.session import open_session

    with open_session(run, ranks) as session:
        measure(session)


def command() -> None:
    """Console command `clap-bench`."""
    run_command(main)


if __name__ == "__main__":
    command()
