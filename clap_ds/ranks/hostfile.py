"""Node lists and hostfiles as text: SLURM's environment, or a node list, to the hosts of a job and their ranks.

DeepSpeed takes `node[1-2] slots=4` for the name of one host, so node lists are expanded here, in the order of `scontrol
show hostnames`. Standard library only, and what is accepted is safe in a shell: host names reach ssh.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_HOSTS = 100_000  # of one range: a slip such as `n[1-999999999]` would fill the memory
PORTS = range(16000, 32000)
"""Where ranks meet, and what a firewall between hosts has to let through; by default the kernel's own begin at 32768."""
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_GPUS = r"(?:[A-Za-z][\w.-]*:){0,2}([0-9]+)(?:\([^)]*\))?"
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]{1,5})\))?")


def expand(nodelist: str) -> list[str]:
    """Hosts of a SLURM node list such as `a[01-03,7],b-ib0,c[1-2][08-11]`.

    The lower end of a range gives the zero padding; of several brackets the last varies fastest. A ValueError for a malformed
    list, and for a host that is there twice.
    """
    terms = re.findall(r"((?:[^,\[]|\[[^\]]*\]?)*),", nodelist + ",")  # ends at the commas outside brackets
    hosts = [host for term in terms for host in _expand_term(term)]
    if len({*hosts}) < len(hosts):
        raise ValueError(f"node list {nodelist[:80]!r} names a host twice")
    return hosts


def _check_host(host: str) -> str:
    """The host name itself; a ValueError when it isn't one."""
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(f"{host[:80]!r} isn't a host name: expected letters, digits, '-', '_' and single dots")
    return host


def _expand_term(term: str) -> Iterator[str]:
    first, *parts = re.split(r"\[([^\[\]]*)\]", term.strip())
    for numbers in itertools.product(*map(_expand_ranges, parts[::2])):
        yield _check_host(first + "".join(number + text for number, text in zip(numbers, parts[1::2], strict=True)))


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_HOSTS:
            what = f"N or N-M, with N ≤ M and at most {MAX_HOSTS} hosts"
            raise ValueError(f"in a node list's brackets: expected {what}, found {part[:80]!r}")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def hosts_from_slurm(environment: Mapping[str, str]) -> list[str]:
    """Hosts of the allocation; a ValueError outside of one."""
    nodelist = environment.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise ValueError(
            "no SLURM_JOB_NODELIST here: run inside an allocation, or give clap-hostfile --nodelist and --slots"
        )
    return expand(nodelist)


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(environment: Mapping[str, str], num_hosts: int, wanted: int | None = None) -> list[int]:
    """Ranks for each host: as many as `wanted`, or else its GPUs or, where SLURM manages none, its tasks.

    Tasks count only where somebody asked for them: SLURM makes a number up for whole nodes (`--exclusive`). One task on every
    host is the usual way to allocate for a launcher. GPUs that were asked for count before those that are there. A ValueError
    where tasks don't fit the GPUs, or there is nothing to go by.
    """
    if wanted is not None:
        return [wanted] * num_hosts
    asked = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    counts = environment.get("SLURM_TASKS_PER_NODE") if asked else None
    gpus, tasks = 0, parse_tasks(counts) if counts else [1] * num_hosts
    if value := environment.get("SLURM_GPUS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE"):
        if not re.fullmatch(f"{_GPUS}(, *{_GPUS})*", value):
            raise ValueError(f"SLURM's GPUs of a node are {value!r}: expected a number such as 4 or h100:4")
        gpus = sum(map(int, re.findall(_GPUS, value)))
    if gpus and set(tasks) == {1}:
        return [gpus] * num_hosts
    if not counts:
        how = "give --slots N, or allocate with --gpus-per-node=N"
        raise ValueError(f"how many ranks SLURM doesn't tell its shell of --gres, --gpus and --exclusive: {how}")
    if len(tasks) != num_hosts or (gpus and max(tasks) != gpus):
        found = f"SLURM_TASKS_PER_NODE={counts}, {num_hosts} hosts and {gpus} GPUs on each"
        raise ValueError(f"{found} don't fit: give --slots N, or allocate one task per GPU or one per host")
    return tasks


def parse_tasks(counts: str) -> list[int]:
    """SLURM's tasks per node, `4(x2),2`, as [4, 4, 2]; a ValueError where they are malformed."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match or int(match[1]) < 1:
            raise ValueError(f"tasks per node {counts}: expected counts of at least 1 such as 4(x2),2")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def format_hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots by host of a DeepSpeed hostfile; a ValueError where it can't be read."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", text)
        if match and match[1] not in slots:
            slots[_check_host(match[1])] = int(match[2])
        elif text:
            problem = "the host is there twice" if match else f"expected 'HOST slots=N', found {line!r}"
            raise ValueError(f"{path}:{number}: {problem}")
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
