"""Convert SLURM node lists and environments to DeepSpeed hostfiles.

DeepSpeed would misread `node[1-2] slots=4` as one host's name. Hosts come in the order of `scontrol show hostnames`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from collections.abc import Mapping

from clap_ds.config.files import read_bytes

PORTS = range(16000, 32000)
"""Rendezvous ports that a firewall between hosts must allow; the kernel's own start at 32768 by default."""
_RANGE = r"\d+(?:-\d+)?"
_NODES = re.compile(rf"(\w[\w.-]*)(?:\[({_RANGE}(?:,{_RANGE})*)\])?([\w.-]*)", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodelist: str) -> list[str]:
    """Expand a SLURM node list such as `a[01-03,7],b-ib0`. Raises ValueError if it is malformed.
    A range's lower end sets the zero padding."""
    hosts: list[str] = []
    for term in re.split(r",(?![^\[]*\])", nodelist.strip()):  # at commas outside brackets
        if not (match := _NODES.fullmatch(term)):
            raise ValueError(f"expected a node list such as a[01-03,7],b, found {nodelist!r}")
        before, ranges, after = match.groups()
        for part in ranges.split(",") if ranges else [""]:
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high or low) + 1) if part else [""]
            hosts += [f"{before}{str(number).zfill(len(low))}{after}" for number in numbers]
    return hosts


def this_host() -> str:
    """Return this host's name as in SLURM's node lists."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(environment: Mapping[str, str], wanted: int | None = None) -> dict[str, int]:
    """Return ranks per host of the allocation: `wanted`, or its tasks or, with one task per host, its GPUs.

    Only requested tasks count: SLURM invents a number for whole nodes (`--exclusive`). Raises ValueError outside an
    allocation, or if the number is unknown.
    """
    if not (nodelist := environment.get("SLURM_JOB_NODELIST")):
        raise ValueError("SLURM_JOB_NODELIST is not set: run this inside an allocation, such as `salloc --nodes 2`")
    hosts = expand(nodelist)
    gpus = environment.get("SLURM_GPUS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE")  # `4`, `h100:4`
    asked = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    tasks = parse_tasks(environment["SLURM_TASKS_PER_NODE"]) if asked else []
    if wanted is None and {*tasks} <= {1} and gpus:
        wanted = int(gpus.rpartition(":")[2])
    if wanted is not None:
        return dict.fromkeys(hosts, wanted)
    if not tasks:
        raise ValueError("the allocation's ranks per host are unknown: pass --slots N, or allocate --gpus-per-node=N")
    return dict(zip(hosts, tasks, strict=True))


def parse_tasks(counts: str) -> list[int]:
    """Parse SLURM's tasks per node: `4(x2),2` is [4, 4, 2]."""
    return [int(count) for count, times in _TASKS.findall(counts) for _ in range(int(times or 1))]


def format_hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read slots per host from a DeepSpeed hostfile. Raises ValueError if it is malformed."""
    slots: dict[str, int] = {}
    for line in read_bytes(path).decode().splitlines():
        text = line.partition("#")[0].strip()
        if match := re.fullmatch(r"(\S+)\s+slots=([0-9]+)", text):
            slots[match[1]] = int(match[2])
        elif text:
            raise ValueError(f"{path}: expected 'HOST slots=N', found {line!r}")
    return slots


def port_of(name: str) -> int:
    """Derive rank 0's port from a name that all ranks share."""
    return random.Random(name).choice(PORTS)


def free_port() -> int:
    """Find a free port of this host for rank 0, outside the kernel's range, from which others could take it meanwhile."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among 100 tried from {PORTS[0]} to {PORTS[-1]}")
