"""Command: SLURM's environment, or a node list, to a DeepSpeed hostfile, and how `deepspeed` is to be called with it.

    clap-hostfile --output H                                        inside an allocation
    python launch/hostfile.py --nodelist 'n[01-04]' --slots 4       anywhere, from a checkout without installation, too

Python 3.11 or newer, the standard library alone.
"""

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # run as a file, by any Python
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"error: launch/hostfile.py needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import write_atomically
from clap_ds.ranks.hostfile import expand, format_hostfile, hosts_from_slurm, is_this_host, slots_from_slurm


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
    parser = argparse.ArgumentParser(prog="clap-hostfile", description=(__doc__ or "").splitlines()[0])
    add_hosts(parser)
    parser.add_argument("--output", metavar="FILE", help="write there, in one go, and not to standard output")
    arguments = parser.parse_args(argv)

    def write() -> None:
        slots = chosen_hosts(arguments)
        text = format_hostfile(slots)
        if not arguments.output:
            sys.stdout.write(text)
            return
        write_atomically(arguments.output, text)
        first = next(iter(slots))
        if len(slots) == 1 and not is_this_host(first):
            # DeepSpeed starts the ranks of a single host where it runs itself.
            here = os.uname().nodename
            print(f"note: {first} isn't this host ({here}): give deepspeed --force_multi", file=sys.stderr)

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main())
