"""Convert SLURM node lists and environments to DeepSpeed hostfiles.

DeepSpeed would misread `node[1-2] slots=4` as one host's name. Hosts come in the order of `scontrol
show hostnames`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping

from clap_ds.utils.files import read_bytes

PORTS = range(16000, 32000)
"""Rendezvous ports that a firewall between hosts must allow; the kernel's own start at 32768 by
default."""
MOST_HOSTS = 65536
"""SLURM's own limit for a range of nodes."""
LONGEST_ARGUMENT = 100_000
"""Characters of a list that a command is given; Linux limits an argument to 131,071 bytes."""
STEP_GPUS = ("SLURM_GPUS_ON_NODE",)
"""GPUs of a host with one task. A step inherits its job's request, too, but may have fewer."""
JOB_GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", *STEP_GPUS)
_RANGE = r"\d{1,18}(?:-\d{1,18})?"
_TERM = re.compile(rf"(?=[\w[])[\w.-]*(?:\[{_RANGE}(?:,{_RANGE})*\][\w.-]*)*", re.ASCII)
_HOSTS = re.compile(r"(?:\w[\w.-]*\n)+", re.ASCII)
_TASKS = re.compile(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,4})\))?", re.ASCII)
_GPUS = re.compile(r"(?:[\w.-]+:){0,2}(\d{1,9})", re.ASCII)
_EXPECTED = "expected a node list such as a[01-03,7],b, found"


def expand_by_slurm(nodelist: str) -> list[str]:
    """Expand a node list by `scontrol show hostnames` if it answers, else by `expand`. Raises
    ValueError if malformed."""
    # scontrol misreads malformed lists (`n[1, 2]` as n1, n02), exits with 0, and doesn't limit its
    # output. `!` is no host.
    terms = ",".join(_split(nodelist))
    if len(terms) > LONGEST_ARGUMENT:
        return expand(nodelist)
    command = f'{{ timeout 10 scontrol show hostnames "$1" || echo !; }} | head -n {MOST_HOSTS + 1}'
    output = subprocess.run(
        ["sh", "-c", command, "sh", terms], capture_output=True, text=True
    ).stdout
    hosts = output.splitlines()
    is_valid = _HOSTS.fullmatch(output) and len({*hosts}) == len(hosts) <= MOST_HOSTS
    return hosts if is_valid else expand(nodelist)


def expand(nodelist: str) -> list[str]:
    """Expand a SLURM node list such as `a[01-03,7],r[1-2]n[1-4]` without SLURM. Raises ValueError
    if it is malformed."""
    hosts = [*itertools.islice(_expand_terms(nodelist), MOST_HOSTS + 1)]
    if len({*hosts}) < len(hosts) or len(hosts) > MOST_HOSTS:
        raise ValueError(f"{_EXPECTED} a host twice, or more than {MOST_HOSTS:,}, in {nodelist!r}")
    return hosts


def _split(nodelist: str) -> list[str]:
    """Split a node list at commas or spaces outside brackets."""
    terms = [""]
    for position, part in enumerate(
        re.split(r"(\[[^\[\]]*\])", nodelist.strip())
    ):  # alternately text and brackets
        first, *others = re.split(r"\s*,\s*|\s+", part) if position % 2 == 0 else [part]
        terms[-1] += first
        terms += others
    for term in terms:
        if not _TERM.fullmatch(term):
            raise ValueError(f"{_EXPECTED} {term!r} in {nodelist!r}")
    return terms


def _expand_terms(nodelist: str) -> Iterator[str]:
    for term in _split(nodelist):
        if term.count("[") > 2:  # SLURM orders these hosts in a way of its own
            raise ValueError(
                f"{_EXPECTED} {term!r}: run this where scontrol expands more than two brackets"
            )
        parts = re.split(r"[\[\]]", term)  # alternately text and ranges
        choices = [
            _expand_ranges(part) if position % 2 else [part] for position, part in enumerate(parts)
        ]
        yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> list[str]:
    """Expand a bracket's content. A range's lower end sets the zero padding."""
    expanded: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        if not 0 < len(numbers) <= MOST_HOSTS:
            raise ValueError(f"{_EXPECTED} {part!r}, not a rising range of at most {MOST_HOSTS:,}")
        expanded += [str(number).zfill(len(low)) for number in numbers]
    return expanded


def this_host() -> str:
    """Return this host's name as in SLURM's node lists."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(
    environment: Mapping[str, str], wanted: int | None = None, remedy: str = "pass --slots N"
) -> dict[str, int]:
    """Return ranks per host of the allocation or srun step: `wanted`, or its tasks or, with one
    task per host, its GPUs.

    Only requested tasks count: SLURM invents a number for whole nodes (`--exclusive`). Raises
    ValueError outside an allocation, or if the number is unknown, and says how to set it
    (`remedy`).
    """
    if component := environment.get("SLURM_JOB_NODELIST_HET_GROUP_0"):
        raise ValueError(
            f"SLURM_JOB_NODELIST_HET_GROUP_0={component}: heterogeneous jobs are not supported"
            " (clap-ds hostfile --nodelist LIST --slots N describes a component)"
        )
    # srun sets both to the step's tasks, except in an interactive step (salloc's shell), which
    # stands for the job.
    tasks_per_node = environment.get("SLURM_TASKS_PER_NODE")
    in_step = environment.get("SLURM_STEP_TASKS_PER_NODE", "") == tasks_per_node
    variable = "SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST"
    if not (nodelist := environment.get(variable)):
        raise ValueError(f"{variable} is not set: run inside an allocation, such as salloc's shell")
    hosts = expand_by_slurm(nodelist)
    if wanted is not None:
        return dict.fromkeys(hosts, wanted)

    is_requested = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    tasks = parse_tasks(tasks_per_node) if is_requested and tasks_per_node else []
    if tasks and len(tasks) != len(hosts):
        raise ValueError(
            f"SLURM_TASKS_PER_NODE={tasks_per_node} counts {len(tasks)} hosts, but {variable}={nodelist} names"
            f" {len(hosts)}: {remedy}"
        )
    if max(tasks, default=1) == 1:
        gpus = _count_gpus(environment, *(STEP_GPUS if in_step else JOB_GPUS))
        total = _count_gpus(environment, "SLURM_GPUS")
        if total and not in_step and total != gpus * len(hosts):
            raise ValueError(
                f"SLURM_GPUS={total} in all, but {gpus or 'an unknown number'} on each of {len(hosts)} hosts: {remedy}"
            )
        if gpus:
            return dict.fromkeys(hosts, gpus)
    if not tasks:
        raise ValueError(
            f"the allocation's ranks per host are unknown: {remedy}, or allocate --gpus-per-node=N"
        )
    return dict(zip(hosts, tasks, strict=True))


def _count_gpus(environment: Mapping[str, str], *variables: str) -> int:
    """Return the sum of the first variable that is set, such as `4` or `a100:2,h100:4`; 0 if none
    is."""
    for variable in variables:
        if counts := environment.get(variable):
            parts = [_GPUS.fullmatch(part) for part in counts.split(",")]
            if None in parts:
                raise ValueError(
                    f"{variable}: expected a number such as 4 or a100:2,h100:4, found {counts!r}"
                )
            return sum(int(part[1]) for part in parts if part)
    return 0


def parse_tasks(counts: str) -> list[int]:
    """Parse SLURM's tasks per node: `4(x2),2` is [4, 4, 2]. Raises ValueError if they are
    malformed."""
    tasks: list[int] = []
    for part in counts.split(","):
        if not (match := _TASKS.fullmatch(part)):
            raise ValueError(
                f"SLURM_TASKS_PER_NODE: expected a list such as 4(x2),2, found {counts!r}"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def format_hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read slots per host from a DeepSpeed hostfile. Raises ValueError if it is malformed."""
    slots: dict[str, int] = {}
    for line in read_bytes(path).decode().splitlines():
        text = line.partition("#")[0].strip()
        match = re.fullmatch(
            r"([^\s\[]+)\s+slots=([1-9][0-9]*)", text
        )  # DeepSpeed takes a[1-2] for one host
        if match and match[1] not in slots:
            slots[match[1]] = int(match[2])
        elif text:
            raise ValueError(
                f"{path}: expected 'HOST slots=N', found {line!r} (each host once, no node lists)"
            )
    return slots


def read_nodefile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Count slots per host in a list with a line per slot, as PBS and LSF write it. Raises
    ValueError if it is malformed."""
    slots: dict[str, int] = {}
    for line in read_bytes(path).decode().splitlines():
        host = line.strip()
        if host and not _HOSTS.fullmatch(f"{host}\n"):
            raise ValueError(
                f"{path}: expected a line with a host's name for each slot, found {line!r}"
            )
        if host:
            slots[host] = slots.get(host, 0) + 1
    if not slots:
        raise ValueError(f"{path}: expected a line with a host's name for each slot, found no host")
    return slots


def port_of(name: str) -> int:
    """Derive rank 0's port from a name that all ranks share."""
    return random.Random(name).choice(PORTS)


def free_port() -> int:
    """Find a free port of this host for rank 0, outside the kernel's range, from which others could
    take it meanwhile."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among 100 tried from {PORTS[0]} to {PORTS[-1]}")
