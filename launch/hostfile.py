"""Command: SLURM's environment, or a node list, to a DeepSpeed hostfile.

python launch/hostfile.py --output "$job/hostfile"            inside an allocation
python launch/hostfile.py --nodelist 'n[01-04]' --slots 4     anywhere
"""

from __future__ import annotations

import argparse
import os
import sys

from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import write_atomically
from clap_ds.dist.hostfile import expand, format_hostfile, hosts_from_slurm, slots_from_slurm


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Options that say which hosts, and how many ranks on each."""
    parser.add_argument("--nodelist", metavar="LIST", help="hosts in SLURM's notation, in place of the allocation's")
    parser.add_argument("--slots", type=int, metavar="N", help="ranks on each host")


def chosen_hosts(arguments: argparse.Namespace) -> dict[str, int]:
    """Ranks by host, of `add_hosts`'s options or the allocation; a ValueError where they say too little or contradict it."""
    if arguments.slots is not None and arguments.slots < 1:
        raise ValueError(f"--slots {arguments.slots}: expected at least 1")
    if arguments.nodelist is None:
        hosts = hosts_from_slurm(os.environ)
        return dict(zip(hosts, slots_from_slurm(os.environ, len(hosts), arguments.slots), strict=True))
    if arguments.slots is None:
        raise ValueError("--nodelist needs --slots: SLURM's environment isn't about these hosts")
    return dict.fromkeys(expand(arguments.nodelist), arguments.slots)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/hostfile.py", description=(__doc__ or "").splitlines()[0])
    add_hosts(parser)
    parser.add_argument("--output", metavar="FILE", help="write there, in one go, and not to standard output")
    arguments = parser.parse_args(argv)

    def write() -> None:
        text = format_hostfile(chosen_hosts(arguments))
        if arguments.output:
            write_atomically(arguments.output, text)
        else:
            sys.stdout.write(text)

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main())
