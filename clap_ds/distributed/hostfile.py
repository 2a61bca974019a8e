"""Convert SLURM node lists and environments to DeepSpeed hostfiles.

DeepSpeed would misread `node[1-2] slots=4` as one host's name. Hosts come in the order of `scontrol
show hostnames`.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from clap_ds.utils.files import read_bytes

# Rendezvous ports that a firewall between hosts must allow. The kernel's own start at 32768 by
# default.
PORTS = range(16000, 32000)
PORT_TRIES = 100
KEY_FILE = "rendezvous_key"  # in the folder of a job's attempt
MAX_HOSTS = 65536  # SLURM's own limit for a range of nodes
MAX_ARGUMENT_LENGTH = 100_000  # characters; Linux limits an argument to 131,071 bytes
# GPUs of a host with one task. A step inherits its job's request, too, but may have fewer.
STEP_GPUS = ("SLURM_GPUS_ON_NODE",)
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
    # scontrol reads some malformed lists without an error (`n[1, 2]` as n1, n02).
    terms = ",".join(_split(nodelist))
    if len(terms) > MAX_ARGUMENT_LENGTH:
        return expand(nodelist)
    # It doesn't limit its output, either. `!` marks a failure, as it is no host's name.
    command = f'{{ timeout 10 scontrol show hostnames "$1" || echo !; }} | head -n {MAX_HOSTS + 1}'
    done = subprocess.run(["sh", "-c", command, "sh", terms], capture_output=True, text=True)
    hosts = done.stdout.splitlines()
    is_valid = _HOSTS.fullmatch(done.stdout) and len({*hosts}) == len(hosts) <= MAX_HOSTS
    return hosts if is_valid else expand(nodelist)


def expand(nodelist: str) -> list[str]:
    """Expand a SLURM node list such as `a[01-03,7],r[1-2]n[1-4]` without SLURM. Raises ValueError
    if it is malformed."""
    hosts = [*itertools.islice(_expand_terms(nodelist), MAX_HOSTS + 1)]
    if len({*hosts}) < len(hosts) or len(hosts) > MAX_HOSTS:
        raise ValueError(f"{_EXPECTED} a host twice, or more than {MAX_HOSTS:,}, in {nodelist!r}")
    return hosts


def _split(nodelist: str) -> list[str]:
    """Split a node list at commas or spaces outside brackets."""
    terms = [""]
    # Parts are alternately text and brackets.
    for index, part in enumerate(re.split(r"(\[[^\[\]]*\])", nodelist.strip())):
        if index % 2:
            terms[-1] += part
        else:
            head, *tail = re.split(r"\s*,\s*|\s+", part)
            terms[-1] += head
            terms += tail
    for term in terms:
        if not _TERM.fullmatch(term):
            raise ValueError(f"{_EXPECTED} {term!r} in {nodelist!r}")
    return terms


def _expand_terms(nodelist: str) -> Iterator[str]:
    for term in _split(nodelist):
        # SLURM orders the hosts of more brackets in a way of its own.
        if term.count("[") > 2:
            remedy = "run this where scontrol expands more than two brackets"
            raise ValueError(f"{_EXPECTED} {term!r}: {remedy}")
        # Parts are alternately text and ranges.
        choices = []
        for index, part in enumerate(re.split(r"[\[\]]", term)):
            choices.append(_expand_ranges(part) if index % 2 else [part])
        yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> list[str]:
    """Expand a bracket's content. A range's lower end sets the zero padding."""
    numerals: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        if not 0 < len(numbers) <= MAX_HOSTS:
            raise ValueError(f"{_EXPECTED} {part!r}, not a rising range of at most {MAX_HOSTS:,}")
        numerals += [str(number).zfill(len(low)) for number in numbers]
    return numerals


def this_host() -> str:
    """Return this host's name as in SLURM's node lists."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(
    environment: Mapping[str, str], slots: int | None = None, remedy: str = "pass --slots N"
) -> dict[str, int]:
    """Return ranks per host of the allocation or srun step: `slots`, or its tasks or, with one
    task per host, its GPUs.

    Only requested tasks count: SLURM invents a number for whole nodes (`--exclusive`). Raises
    ValueError outside an allocation, or if the number is unknown, and says how to set it
    (`remedy`).
    """
    component = environment.get("SLURM_JOB_NODELIST_HET_GROUP_0")
    if component:
        raise ValueError(
            f"SLURM_JOB_NODELIST_HET_GROUP_0={component}: heterogeneous jobs are not supported"
            " (clap-ds hostfile --nodelist LIST --slots N describes a component)"
        )
    # srun sets both to the step's tasks, except in an interactive step (salloc's shell), which
    # stands for the job.
    task_counts = environment.get("SLURM_TASKS_PER_NODE")
    in_step = environment.get("SLURM_STEP_TASKS_PER_NODE", "") == task_counts
    variable = "SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST"
    nodelist = environment.get(variable)
    if not nodelist:
        raise ValueError(f"{variable} is not set: run inside an allocation, such as salloc's shell")
    hosts = expand_by_slurm(nodelist)
    if slots is not None:
        return dict.fromkeys(hosts, slots)

    tasks: list[int] = []
    is_requested = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    if is_requested and task_counts:
        tasks = parse_tasks(task_counts)
        if len(tasks) != len(hosts):
            raise ValueError(
                f"SLURM_TASKS_PER_NODE={task_counts} counts {len(tasks)} hosts, but"
                f" {variable}={nodelist} names {len(hosts)}: {remedy}"
            )
    if max(tasks, default=1) == 1:
        gpus = _count_gpus(environment, *(STEP_GPUS if in_step else JOB_GPUS))
        total = 0 if in_step else _count_gpus(environment, "SLURM_GPUS")
        if total and total != gpus * len(hosts):
            raise ValueError(
                f"SLURM_GPUS={total} in all, but {gpus or 'an unknown number'} on each of"
                f" {len(hosts)} hosts: {remedy}"
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
        counts = environment.get(variable)
        if not counts:
            continue
        total = 0
        for part in counts.split(","):
            match = _GPUS.fullmatch(part)
            if not match:
                expected = "expected a number such as 4 or a100:2,h100:4"
                raise ValueError(f"{variable}: {expected}, found {counts!r}")
            total += int(match[1])
        return total
    return 0


def parse_tasks(counts: str) -> list[int]:
    """Parse SLURM's tasks per node: `4(x2),2` is [4, 4, 2]. Raises ValueError if they are
    malformed."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            expected = "expected a list such as 4(x2),2"
            raise ValueError(f"SLURM_TASKS_PER_NODE: {expected}, found {counts!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def list_rank_hosts(slots: Mapping[str, int]) -> list[str]:
    """Return the host of each rank."""
    hosts = []
    for host, count in slots.items():
        hosts += [host] * count
    return hosts


def format_hostfile(slots: Mapping[str, int]) -> str:
    """Return the text of a DeepSpeed hostfile."""
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read slots per host from a DeepSpeed hostfile. Raises ValueError if it is malformed."""
    slots: dict[str, int] = {}
    for line in read_bytes(path).decode().splitlines():
        text = line.partition("#")[0].strip()
        # DeepSpeed would take a[1-2] for one host.
        match = re.fullmatch(r"([^\s\[]+)\s+slots=([1-9][0-9]*)", text)
        if match and match[1] not in slots:
            slots[match[1]] = int(match[2])
        elif text:
            rule = "(each host once, no node lists)"
            raise ValueError(f"{path}: expected 'HOST slots=N', found {line!r} {rule}")
    return slots


def read_nodefile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Count slots per host in a list with a line per slot, as PBS and LSF write it. Raises
    ValueError if it is malformed."""
    expected = f"{path}: expected a line with a host's name for each slot, found"
    hosts = read_bytes(path).decode().split("\n")
    slots = Counter(host.strip() for host in hosts if host.strip())
    for host in slots:
        if not _HOSTS.fullmatch(f"{host}\n"):
            raise ValueError(f"{expected} {host!r}")
    if not slots:
        raise ValueError(f"{expected} no host")
    return slots


def derive_port(name: str) -> int:
    """Derive rank 0's port from a name that all ranks share."""
    return random.Random(name).choice(PORTS)


def free_port() -> int:
    """Find a free port of this host for rank 0, outside the kernel's range, from which others could
    take it meanwhile."""
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among {PORT_TRIES} tried from {PORTS[0]} to {PORTS[-1]}")


def create_key(folder: Path) -> None:
    """Create the key of a job's attempt in its folder. Only this user can read it."""
    with open(folder / KEY_FILE, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(os.urandom(32))
