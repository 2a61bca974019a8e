"""Node lists and hostfiles as text: SLURM's environment, or a node list, to the hosts of a job and their ranks.

DeepSpeed takes `node[1-2] slots=4` for the name of one host, so node lists are expanded here, in the order of `scontrol
show hostnames` and without needing it. Uses the standard library only, and what it accepts is safe in a shell: host
names reach ssh. Leaves options and printing to
`launch/hostfile.py`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping

MAX_HOSTS = 100_000
"""More than any cluster has; keeps a slip such as `n[1-999999999]` from filling the memory."""

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_GPU_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:){0,2}([0-9]+)(?:\([^)]*\))?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(nodelist: str) -> list[str]:
    """Hosts of a SLURM node list such as `a[01-03,7],b-ib0,c[1-2][08-11]`.

    The lower end of a range gives the zero padding. With several brackets the last varies fastest, then the first,
    the second and so on, as in SLURM.

    Raises:
        ValueError: malformed list, a name that isn't a host name, a host named twice, or more than `MAX_HOSTS` hosts.
    """
    hosts: list[str] = []
    for term in _split_terms(nodelist):
        hosts += _expand_term(term, MAX_HOSTS - len(hosts))
    if not hosts:
        raise ValueError("the node list is empty")
    for host in hosts:
        check_host(host)
    if len(set(hosts)) < len(hosts):
        seen: set[str] = set()
        twice = next(host for host in hosts if host in seen or seen.add(host))  # type: ignore[func-returns-value]
        raise ValueError(f"node list {_shown(nodelist)} names {twice} twice")
    return hosts


def check_host(host: str) -> str:
    """The host name itself, when it is one.

    Raises:
        ValueError: it has other characters than letters, digits, `-`, `_` and dots between labels, or is too long.
    """
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(f"{_shown(host)} isn't a host name: expected letters, digits, '-', '_' and single dots")
    return host


def _split_terms(nodelist: str) -> Iterator[str]:
    """Terms between the commas outside brackets."""
    depth, start = 0, 0
    for match in re.finditer(r"[\[\],]", nodelist):
        mark = match.group()
        depth += {"[": 1, "]": -1, ",": 0}[mark]
        if depth not in (0, 1):
            raise ValueError(f"node list {_shown(nodelist)}: brackets don't match at character {match.start() + 1}")
        if mark == "," and depth == 0:
            yield nodelist[start : match.start()].strip()
            start = match.end()
    if depth:
        raise ValueError(f"node list {_shown(nodelist)}: a bracket isn't closed")
    last = nodelist[start:].strip()
    if last or start:
        yield last


def _expand_term(term: str, limit: int) -> list[str]:
    if not term:
        raise ValueError("the node list has an empty name between its commas")
    texts = re.split(r"\[([^\]]*)\]", term)
    literals, ranges = texts[::2], [_expand_ranges(text, term, limit) for text in texts[1::2]]
    total = 1
    for numbers in ranges:
        total *= len(numbers)
    if total > limit:
        raise ValueError(f"node list term {_shown(term)}: more than {MAX_HOSTS} hosts")
    if not ranges:
        return [term]
    if len(ranges) == 1:
        return [literals[0] + number + literals[1] for number in ranges[0]]
    hosts = []
    for choice in itertools.product(*reversed(ranges[:-1]), ranges[-1]):
        numbers = [*reversed(choice[:-1]), choice[-1]]
        hosts.append("".join(itertools.chain(*zip(literals, numbers, strict=False))) + literals[-1])
    return hosts


def _expand_ranges(text: str, term: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"node list term {_shown(term)}: expected N or N-M in brackets, found {_shown(part)}")
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(low) > int(high):
            raise ValueError(f"node list term {_shown(term)}: the range {part} runs backwards")
        if int(high) - int(low) >= limit:
            raise ValueError(f"node list term {_shown(term)}: more than {MAX_HOSTS} hosts")
        width = len(low)
        numbers += [str(number).zfill(width) for number in range(int(low), int(high) + 1)]
    return numbers


def hosts_from_slurm(environment: Mapping[str, str]) -> list[str]:
    """Hosts of the allocation.

    Raises:
        ValueError: not inside an allocation, or its variables contradict each other.
    """
    if environment.get("SLURM_HET_SIZE"):
        raise ValueError(
            "heterogeneous jobs (SLURM_HET_SIZE) aren't supported: name the hosts by --nodelist and --slots"
        )
    nodelist = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodelist:
        raise ValueError(
            "no SLURM_JOB_NODELIST in the environment: run inside an allocation, or give --nodelist and --slots"
        )
    hosts = expand(nodelist)
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        value = environment.get(name)
        if name == "SLURM_NNODES" and environment.get("SLURM_STEP_NODELIST"):
            continue  # inside a step it may count the step's nodes
        if value and value != str(len(hosts)):
            raise ValueError(f"{name}={value}, but the node list {_shown(nodelist)} has {len(hosts)} hosts")
    return hosts


def slots_from_slurm(environment: Mapping[str, str], num_hosts: int, wanted: int | None = None) -> list[int]:
    """Ranks for each host: its GPUs or, where SLURM manages none, its tasks.

    One task on every host says nothing about ranks (a launcher started once per host is the usual way to allocate); any
    other number of tasks does, and must not contradict the GPUs.

    Args:
        environment: of the batch step.
        num_hosts: hosts in the allocation.
        wanted: ranks per host the user asked for; may be fewer than there are GPUs.

    Raises:
        ValueError: variables that can't be read or contradict each other, more slots wanted than GPUs, or nothing to go by.
    """
    gpus = _gpus_per_host(environment)
    tasks = _tasks_per_host(environment, num_hosts)
    if wanted is not None:
        if gpus is not None and wanted > gpus:
            raise ValueError(f"--slots {wanted}: the allocation has {gpus} GPUs on each host")
        return [wanted] * num_hosts
    if gpus is None:
        if tasks is None:
            raise ValueError("SLURM's environment has neither GPUs nor tasks per node: give --slots")
        return tasks
    if tasks is None or set(tasks) == {1}:
        return [gpus] * num_hosts
    if max(tasks) != gpus:
        raise ValueError(
            f"SLURM_TASKS_PER_NODE={environment['SLURM_TASKS_PER_NODE']} doesn't fit {gpus} GPUs on a host: give --slots,"
            " or allocate one task per GPU or one per host"
        )
    return tasks


def _gpus_per_host(environment: Mapping[str, str]) -> int | None:
    """GPUs on one host by each of SLURM's variables, which must agree; None where SLURM has no GPUs."""
    counts = {}
    if value := environment.get("SLURM_GPUS_PER_NODE"):
        kinds = [_GPU_COUNT.fullmatch(kind.strip()) for kind in value.split(",")]
        if not all(kinds):
            raise ValueError(f"SLURM_GPUS_PER_NODE={value}: expected a number such as 4 or h100:4")
        counts["SLURM_GPUS_PER_NODE"] = sum(int(kind.group(1)) for kind in kinds if kind)
    if value := environment.get("SLURM_GPUS_ON_NODE"):
        if not re.fullmatch(r"[0-9]+", value):
            raise ValueError(f"SLURM_GPUS_ON_NODE={value}: expected a number")
        counts["SLURM_GPUS_ON_NODE"] = int(value)
    if value := environment.get("SLURM_JOB_GPUS"):
        try:
            counts["SLURM_JOB_GPUS"] = len(_expand_ranges(value, value, MAX_HOSTS))
        except ValueError:
            raise ValueError(f"SLURM_JOB_GPUS={value}: expected indices such as 0,1,2,3 or 0-3") from None
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name}={environment[name]}" for name in counts)
        raise ValueError(
            f"SLURM's variables disagree on the GPUs of a host: {told}; give --slots outside this environment"
        )
    return next(iter(counts.values())) or None if counts else None


def _tasks_per_host(environment: Mapping[str, str], num_hosts: int) -> list[int] | None:
    """`4(x2),2` as [4, 4, 2]."""
    value = environment.get("SLURM_TASKS_PER_NODE")
    if not value:
        return None
    tasks: list[int] = []
    for part in value.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match or int(match.group(2) or 1) > MAX_HOSTS:
            raise ValueError(f"SLURM_TASKS_PER_NODE={value}: expected counts such as 4(x2),2")
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    if len(tasks) != num_hosts:
        raise ValueError(f"SLURM_TASKS_PER_NODE={value} is for {len(tasks)} hosts, the allocation has {num_hosts}")
    if min(tasks) < 1:
        raise ValueError(f"SLURM_TASKS_PER_NODE={value}: a host without tasks")
    return tasks


def format_hostfile(hosts: Iterable[str], slots: Iterable[int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in zip(hosts, slots, strict=True))


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots by host of a file this module wrote."""
    with open(path) as file:
        lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
    return {check_host(host): int(count.removeprefix("slots=")) for host, count in lines}


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
