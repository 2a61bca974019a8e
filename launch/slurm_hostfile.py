"""Write a DeepSpeed hostfile from SLURM's environment, a node list, or a node file of PBS or LSF.

Examples:
    clap-ds hostfile --output H                              inside an allocation
    clap-ds hostfile --nodefile "$PBS_NODEFILE" --output H   in a job of PBS; LSF: "$LSB_DJOB_HOSTFILE"
    python launch/slurm_hostfile.py --nodelist 'n[01-04]' --slots 4    even without an installation
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.distributed.hostfile import (
    expand_by_slurm,
    format_hostfile,
    read_nodefile,
    slots_from_slurm,
)
from clap_ds.utils.errors import exit_code_of
from clap_ds.utils.files import write_atomically


def write(
    nodelist: str | None, nodefile: str | None, slots: int | None, output: str | None
) -> None:
    """Write the hostfile to `output`, or print it."""
    if nodefile is not None:
        counts = read_nodefile(nodefile)
        hosts = counts if slots is None else dict.fromkeys(counts, slots)
    elif nodelist is None and not os.environ.get("SLURM_JOB_NODELIST"):
        raise ValueError(
            "SLURM_JOB_NODELIST is not set: run inside an allocation,"
            " or pass --nodelist and --slots, or --nodefile"
        )
    elif nodelist is None:
        hosts = slots_from_slurm(os.environ, slots)
    elif slots is None:
        raise ValueError(
            "--nodelist needs --slots: SLURM's environment does not describe these hosts"
        )
    else:
        hosts = dict.fromkeys(expand_by_slurm(nodelist), slots)
    if output:
        write_atomically(output, format_hostfile(hosts))
    else:
        sys.stdout.write(format_hostfile(hosts))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--nodelist",
        metavar="LIST",
        help="write these hosts, in SLURM's notation (default: the allocation's)",
    )
    source.add_argument(
        "--nodefile", metavar="FILE", help="write these hosts: a line per rank, as in $PBS_NODEFILE"
    )
    parser.add_argument(
        "--slots",
        type=whole_number(),
        metavar="N",
        help="set ranks per host (default: those of SLURM or FILE)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write this file, atomically (default: standard output)"
    )
    return exit_code_of(lambda: write(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
