"""A job's processes on this host: found, signalled, ended. Standard library only.

A process is a run's by `CLAP_JOB` in its environment, wherever it stands in the tree: ranks under a launcher, their data
workers, and what outlived its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

LAST_WORDS_S = 5.0  # from SIGTERM to SIGKILL, for a rank to record its end


def parent_and_state(pid: int) -> tuple[int, str] | None:
    """A process's parent and the kernel's letter for its state (`T`: stopped); None when it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return None
    return None if state == b"Z" else (int(parent), state.decode())


def is_running(pid: int) -> bool:
    return parent_and_state(pid) is not None


def processes_of(job: str) -> dict[int, tuple[int, int | None]]:
    """Parent and, of ranks, the rank, of this job's processes here, by process id. `JOB.` stands for all attempts of a run."""
    found: dict[int, tuple[int, int | None]] = {}
    if not job:
        return found  # between attempts; processes without `CLAP_JOB` are nobody's
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/environ", "rb", 0) as file:
                text = file.read()
        except OSError:
            continue  # gone meanwhile, or somebody else's
        if b"CLAP_JOB=" not in text:
            continue
        variables = dict(line.partition(b"=")[::2] for line in text.split(b"\0"))
        value = variables.get(b"CLAP_JOB", b"").decode(errors="replace")
        is_of_job = value == job or (job.endswith(".") and value.startswith(job))
        if is_of_job and pid != os.getpid() and (known := parent_and_state(pid)) is not None:
            rank = variables.get(b"RANK", b"").decode()
            found[pid] = (known[0], int(rank) if rank.isdecimal() else None)
    return found


def ranks_of(job: str) -> dict[int, int]:
    """Ranks by the process ids of the ranks themselves, without their data workers."""
    found = processes_of(job)
    of_parent = {pid: rank for pid, (_, rank) in found.items()}
    return {pid: rank for pid, (parent, rank) in found.items() if rank is not None and of_parent.get(parent) is None}


@contextlib.contextmanager
def ends_of(pids: list[int]) -> Iterator[list[int]]:
    """Files that become readable the moment a process ends, where the kernel has them (Linux 5.3)."""
    with contextlib.ExitStack() as stack:
        files = []
        for pid in pids:
            with contextlib.suppress(OSError, AttributeError):
                files.append(os.pidfd_open(pid))
                stack.callback(os.close, files[-1])
        yield files


def send(pids: Iterator[int] | list[int] | dict[int, int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end_all(job: str, last_words_s: float = LAST_WORDS_S) -> int:
    """End every process of the job on this host: SIGTERM, a moment to record it, SIGKILL. Returns how many there were."""
    found = processes_of(job)
    if not found:
        return 0
    send(ranks_of(job), signal.SIGTERM)
    deadline = time.monotonic() + last_words_s
    while any(_may_speak(pid) for pid in ranks_of(job)) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline += 2.0
    while (left := processes_of(job)) and time.monotonic() < deadline:
        send(list(left), signal.SIGKILL)
        time.sleep(0.1)
    return len(found)


def _may_speak(pid: int) -> bool:
    """A stopped process hears no SIGTERM."""
    known = parent_and_state(pid)
    return known is not None and known[1] not in "Tt"


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, in this process's own control group or on the host."""
    with contextlib.suppress(OSError):
        group = next(
            line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"
        )
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    return 0
