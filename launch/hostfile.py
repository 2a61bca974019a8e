"""Write a DeepSpeed hostfile from SLURM's environment or a node list. Needs only the standard library.

Examples:
    clap-ds hostfile --output H                                      inside an allocation
    python launch/hostfile.py --nodelist 'n[01-04]' --slots 4        anywhere, even if clap-ds is not installed
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import write_atomically
from clap_ds.distributed.hostfile import expand_by_slurm, format_hostfile, slots_from_slurm


def write(nodelist: str | None, slots: int | None, output: str | None) -> None:
    """Write the hostfile to `output`, or print it."""
    if nodelist is None and not os.environ.get("SLURM_JOB_NODELIST"):
        raise ValueError("SLURM_JOB_NODELIST is not set: run inside an allocation, or pass --nodelist and --slots")
    if nodelist is None:
        hosts = slots_from_slurm(os.environ, slots)
    elif slots is None:
        raise ValueError("--nodelist needs --slots: SLURM's environment does not describe these hosts")
    else:
        hosts = dict.fromkeys(expand_by_slurm(nodelist), slots)
    if output:
        write_atomically(output, format_hostfile(hosts))
    else:
        sys.stdout.write(format_hostfile(hosts))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--nodelist", metavar="LIST", help="write these hosts, in SLURM's notation (default: the allocation's)"
    )
    parser.add_argument("--slots", type=whole_number(), metavar="N", help="set ranks per host (default: SLURM's)")
    parser.add_argument("--output", metavar="FILE", help="write this file, atomically (default: standard output)")
    return exit_code_of(lambda: write(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
