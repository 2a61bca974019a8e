"""Node lists and hostfiles as text: SLURM's environment, or a node list, to the hosts of a job and their ranks.

DeepSpeed takes `node[1-2] slots=4` for the name of one host, so node lists are expanded here, in the order of `scontrol
show hostnames`. Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
from collections.abc import Mapping

from clap_ds.config.files import read_bytes

PORTS = range(16000, 32000)
"""Where ranks meet, and what a firewall between hosts has to let through; by default the kernel's own begin at 32768."""
_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_NODES = re.compile(rf"\w(?:[\w.-]|{_RANGES})*", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodelist: str) -> list[str]:
    """Hosts of a SLURM node list such as `a[01-03,7],b-ib0,c[1-2][08-11]`; a ValueError for what is none.

    The lower end of a range gives the zero padding; of several brackets the last varies fastest.
    """
    hosts: list[str] = []
    for term in re.split(r",(?![^\[]*\])", nodelist.strip()):  # at the commas outside brackets
        if not _NODES.fullmatch(term):
            raise ValueError(f"expected a node list such as a[01-03,7],b, found {nodelist!r}")
        parts = re.split(f"({_RANGES})", term)
        hosts += map("".join, itertools.product(*(_numbers(part) if part[:1] == "[" else [part] for part in parts)))
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Of `[01-03,7]`."""
    ends = [(low, high or low) for low, high in re.findall(r"(\d+)(?:-(\d+))?", ranges)]
    return [str(number).zfill(len(low)) for low, high in ends for number in range(int(low), int(high) + 1)]


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(environment: Mapping[str, str], wanted: int | None = None) -> dict[str, int]:
    """Ranks by host of the allocation: as many as `wanted`, or else its tasks or, with one task on each host, its GPUs. A
    ValueError outside of an allocation, or where there is nothing to go by.

    Tasks count only where somebody asked for them: SLURM makes a number up for whole nodes (`--exclusive`).
    """
    if not (nodelist := environment.get("SLURM_JOB_NODELIST")):
        raise ValueError(
            "no SLURM_JOB_NODELIST: run inside an allocation, or give clap-hostfile --nodelist and --slots"
        )
    hosts = expand(nodelist)
    if wanted is not None:
        return dict.fromkeys(hosts, wanted)
    asked = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    tasks = parse_tasks(environment["SLURM_TASKS_PER_NODE"]) if asked else [1] * len(hosts)
    gpus = environment.get("SLURM_GPUS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE")  # `4`, `h100:4`
    if gpus and {*tasks} == {1}:
        return dict.fromkeys(hosts, int(gpus.rpartition(":")[2]))
    if not asked:
        how = "give --slots N, or allocate with --gpus-per-node=N"
        raise ValueError(f"how many ranks SLURM doesn't tell its shell of --gres, --gpus and --exclusive: {how}")
    return dict(zip(hosts, tasks, strict=True))


def parse_tasks(counts: str) -> list[int]:
    """SLURM's tasks per node, `4(x2),2`, as [4, 4, 2]."""
    return [int(count) for count, times in _TASKS.findall(counts) for _ in range(int(times or 1))]


def format_hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots by host of a DeepSpeed hostfile; a ValueError where it is none."""
    slots: dict[str, int] = {}
    for line in read_bytes(path).decode().splitlines():
        text = line.partition("#")[0].strip()
        if match := re.fullmatch(r"(\S+)\s+slots=([0-9]+)", text):
            slots[match[1]] = int(match[2])
        elif text:
            raise ValueError(f"{path}: expected 'HOST slots=N', found {line!r}")
    return slots


def port_of(name: str) -> int:
    """A port for rank 0 that every rank works out for itself."""
    return random.Random(name).choice(PORTS)


def free_port() -> int:
    """A port of this host for rank 0, later: none of the kernel's choosing, which it could give to others until then."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among a hundred from {PORTS[0]} to {PORTS[-1]}")
