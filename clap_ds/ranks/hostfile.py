"""Node lists and hostfiles as text: SLURM's environment, or a node list, to the hosts of a job and their ranks.

DeepSpeed takes `node[1-2] slots=4` for the name of one host, so node lists are expanded here, in the order of `scontrol
show hostnames` and without needing it. Standard library only, and what is accepted is safe in a shell: host names reach
ssh. Leaves options and printing to `launch/hostfile.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

MAX_HOSTS = 100_000  # more than any cluster has; keeps a slip such as `n[1-999999999]` from filling the memory
PORTS = range(16000, 32000)
"""Where ranks meet, and what a firewall between hosts has to let through; by default the kernel's own begin at 32768."""
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_GPUS = r"(?:[A-Za-z][\w.-]*:){0,2}([0-9]+)(?:\([^)]*\))?"
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(nodelist: str) -> list[str]:
    """Hosts of a SLURM node list such as `a[01-03,7],b-ib0,c[1-2][08-11]`.

    The lower end of a range gives the zero padding. With several brackets the last varies fastest, then the first,
    the second and so on, as in SLURM.

    Raises:
        ValueError: malformed list, a name that isn't a host name, a host named twice, or more than `MAX_HOSTS` hosts.
    """
    if not nodelist.strip():
        raise ValueError("the node list is empty")
    hosts: list[str] = []
    for term in re.findall(r"((?:[^,\[]|\[[^\]]*\]?)*),", nodelist + ","):  # ends at the commas outside brackets
        hosts += map(check_host, _expand_term(term.strip(), MAX_HOSTS - len(hosts)))
    ((host, times),) = Counter(hosts).most_common(1)
    if times > 1:
        raise ValueError(f"node list {_shown(nodelist)} names {host} twice")
    return hosts


def check_host(host: str) -> str:
    """The host name itself; a ValueError when it isn't one."""
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(f"{_shown(host)} isn't a host name: expected letters, digits, '-', '_' and single dots")
    return host


def _expand_term(term: str, limit: int) -> list[str]:
    where = f"node list term {_shown(term)}"
    if not term:
        raise ValueError("the node list has an empty name between its commas")
    if not re.fullmatch(r"([^\[\]]|\[[^\[\]]*\])*", term):
        raise ValueError(f"{where}: brackets don't match")
    first, *parts = re.split(r"\[([^\]]*)\]", term)
    literals, brackets = parts[1::2], [_expand_ranges(text, where, limit) for text in parts[::2]]
    if math.prod(map(len, brackets)) > limit:
        raise ValueError(f"{where}: more than {MAX_HOSTS} hosts")
    hosts = []
    for choice in itertools.product(*reversed(brackets[:-1]), *brackets[-1:]):
        numbers = [*reversed(choice[:-1]), *choice[-1:]]
        hosts.append(first + "".join(number + text for number, text in zip(numbers, literals, strict=True)))
    return hosts


def _expand_ranges(text: str, where: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(low) > int(high):
            raise ValueError(f"{where}: expected N or N-M, with N ≤ M, in brackets, found {_shown(part)}")
        if int(high) - int(low) >= limit:
            raise ValueError(f"{where}: more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def hosts_from_slurm(environment: Mapping[str, str]) -> list[str]:
    """Hosts of the allocation; a ValueError outside of one, or where its variables contradict each other."""
    if environment.get("SLURM_HET_SIZE"):
        raise ValueError("heterogeneous jobs (SLURM_HET_SIZE) aren't supported: give --nodelist and --slots")
    nodelist = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodelist:
        raise ValueError("no SLURM_JOB_NODELIST here: run inside an allocation, or give --nodelist and --slots")
    hosts = expand(nodelist)
    # Inside a step SLURM_NNODES may count the step's nodes.
    for name in ["SLURM_JOB_NUM_NODES"] + ["SLURM_NNODES"] * (not environment.get("SLURM_STEP_NODELIST")):
        if environment.get(name) not in (None, "", str(len(hosts))):
            raise ValueError(f"{name}={environment[name]}, but {_shown(nodelist)} has {len(hosts)} hosts")
    return hosts


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def slots_from_slurm(environment: Mapping[str, str], num_hosts: int, wanted: int | None = None) -> list[int]:
    """Ranks for each host: as many as `wanted`, or else its GPUs or, where SLURM manages none, its tasks.

    Tasks say something about ranks only where somebody asked for them: SLURM makes a number up for whole nodes
    (`--exclusive`), and one task on every host is the usual way to allocate for a launcher. Such tasks must not
    contradict the GPUs. `wanted` ranks per host may be fewer than there are GPUs.

    Raises:
        ValueError: variables that can't be read or contradict each other, more ranks wanted than GPUs, or nothing to go by.
    """
    asked, there = _gpus_per_host(environment)
    value = environment.get("SLURM_TASKS_PER_NODE")
    tasks = parse_tasks(value) if value else None
    if tasks and len(tasks) != num_hosts:
        raise ValueError(f"SLURM_TASKS_PER_NODE={value} is for {len(tasks)} hosts, the allocation has {num_hosts}")
    if wanted is not None:
        if there is not None and wanted > there:
            raise ValueError(f"{wanted} ranks wanted on each host (--slots): the allocation has {there} GPUs there")
        return [wanted] * num_hosts
    if not (environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")):
        tasks = None
    tasks_are_ranks = tasks is not None and set(tasks) != {1}
    if tasks and asked and tasks_are_ranks and max(tasks) != asked:
        problem = f"SLURM_TASKS_PER_NODE={value} doesn't fit {asked} GPUs on a host"
        raise ValueError(f"{problem}: give --slots N, or allocate one task per GPU or one per host")
    if asked and not tasks_are_ranks:
        return [asked] * num_hosts
    if not tasks:
        how = "give --slots N, or allocate with --gpus-per-node=N"
        raise ValueError(f"how many ranks SLURM doesn't tell its shell of --gres, --gpus and --exclusive: {how}")
    return tasks


def _gpus_per_host(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """GPUs on one host: asked for (`--gpus-per-node`), and there, which with `--exclusive` may be more; None for no GPUs."""
    counts = {}
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if value := environment.get(name):
            if not re.fullmatch(f"{_GPUS}(, *{_GPUS})*", value):
                raise ValueError(f"{name}={value}: expected a number such as 4 or h100:4")
            counts[name] = sum(map(int, re.findall(_GPUS, value)))
    if value := environment.get("SLURM_JOB_GPUS"):
        counts["SLURM_JOB_GPUS"] = len(_expand_ranges(value, f"SLURM_JOB_GPUS={value}", MAX_HOSTS))
    there = {number for name, number in counts.items() if name != "SLURM_GPUS_PER_NODE"}
    asked = counts.get("SLURM_GPUS_PER_NODE")
    if len(there) > 1 or (asked and there and asked > max(there)):
        found = ", ".join(f"{name}={environment[name]}" for name in counts)
        raise ValueError(f"SLURM's variables disagree on the GPUs of a host: {found}; give --nodelist and --slots")
    most = max(there, default=asked)
    return asked or most or None, most or None


def parse_tasks(counts: str) -> list[int]:
    """SLURM's tasks per node, `4(x2),2`, as [4, 4, 2]; a ValueError where they are malformed, or a host has none."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match or int(match.group(1)) < 1 or int(match.group(2) or 1) > MAX_HOSTS:
            raise ValueError(f"tasks per node {counts}: expected counts of at least 1 such as 4(x2),2")
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks


def format_hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots by host of a DeepSpeed hostfile; a ValueError for a file that can't be read, and for a line that is wrong."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", text)
        if match and match.group(1) not in slots:
            slots[check_host(match.group(1))] = int(match.group(2))
        elif text:
            problem = "the host is there twice" if match else f"expected 'HOST slots=N', found {line!r}"
            raise ValueError(f"{path}:{number}: {problem}")
    return slots


def port_of(name: str) -> int:
    """A port for rank 0 that every rank works out for itself, from the name of the step that they are."""
    return random.Random(name).choice(PORTS)


def free_port() -> int:
    """A port of this host for rank 0, later. Not one of the kernel's choosing, which it could give to others until then."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among a hundred from {PORTS[0]} to {PORTS[-1]}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
