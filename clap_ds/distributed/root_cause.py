"""Find the root cause of a run's end from the files of its ranks.

Ranks write error files (`clap_ds.distributed.error_file`) and a stack file each (`clap_ds.distributed.watchdog`): a
header line, then stacks if the rank hung or got a fatal signal. The file of a killed rank has only the header. Standard
library only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from clap_ds.config.files import parse_json, read_bytes
from clap_ds.distributed.error_file import (
    ERROR,
    LOST_PEER,
    SHOWN,
    STALL,
    STOPPED,
    UNREACHABLE,
    RankError,
    read_errors,
    some,
)

SIGNAL, KILLED = "signal", "killed"
"""Kinds of verdict in addition to those of error files."""
STACKS = "stacks"  # folder of stack files in the run directory
STEPPING, HUNG = "stepping", "blocked"
"""What a rank does, in its file's header; other values are tasks that may take long."""
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error|uncorrectable|\bECC\b|\bXid\b|Input/output error|Bus error|Stale file handle"
    r"|was ended by SIG(KILL|BUS|SEGV)"
)
"""Errors that may be a host's fault."""
_OF_THE_PROGRAM = re.compile(
    "illegal memory access|misaligned address|device-side assert|invalid configuration|out of memory"
)
"""Variants of these errors caused by a kernel, which would fail on any host."""
_OF_THE_LINK = re.compile("NCCL|gloo", re.IGNORECASE)
# faulthandler's format.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) .*$", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.*?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):(\d+)", re.MULTILINE)
_WAITING = re.compile(
    r"/torch/(distributed|autograd|_inductor|cuda)/|/triton/|inductor[^/]*/"
    r"|(^|/)(clap_ds|deepspeed)/.* (wait|synchronize|barrier)$"
)
"""File and function of a rank that waits for others. NCCL queues collectives: if one hangs, the host continues until the queue
is full, then blocks in its next launch."""

# From causes to consequences; the earliest of equals counts. Libraries abort a rank that lost a peer as well as a broken one.
_JUDGED, _CAUSE, _KILLED, _ABORTED, _LOST_PEER, _STOPPED = range(6)


@dataclass(frozen=True)
class RootCause:
    """Why a run ended, in one line; the ranks concerned and the hosts at fault."""

    message: str
    kind: str
    ranks: list[int]
    hosts: list[str]


_Cause = tuple[int, float, RootCause]  # rank in the order above, time, verdict


@dataclass(frozen=True)
class Stacks:
    """Content of one rank's stack file, and its modification time."""

    rank: int
    host: str
    pid: int
    activity: str
    step: int
    text: str
    at: float

    @property
    def still_s(self) -> float | None:
        """Seconds it had hung when it wrote its stacks, if it did."""
        found = _TIMEOUT.search(self.text)
        return 3600.0 * int(found[1]) + 60 * int(found[2]) + int(found[3]) if found else None

    @property
    def fatal(self) -> str | None:
        """Fatal signal, such as Segmentation fault."""
        found = _FATAL.search(self.text)
        return found[1] if found else None

    @cached_property
    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function, innermost first, of the thread with a fatal signal or else the main one (last)."""
        _, *parts = _THREAD.split(self.text)
        threads = dict(zip(parts[::2], parts[1::2], strict=True))
        return _FRAME.findall(threads.get("Current thread") or threads.get("Thread", ""))

    @property
    def where(self) -> str:
        for file, line, function in self.frames[:1]:
            return f"in {function} ({file.rpartition('/')[2]}:{line})"
        return "doesn't respond: stopped or gone"

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_WAITING.search(f"{file} {function}") for file, _, function in self.frames[:4])


def read_stacks(run_directory: Path) -> list[Stacks]:
    """Read all stack files, sorted by rank."""
    found = []
    for path in (run_directory / STACKS).glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError):
            first, _, text = read_bytes(path).decode(errors="replace").partition("\n")
            found.append(Stacks(**parse_json(first), text=text, at=path.stat().st_mtime))
    return sorted(found, key=lambda each: each.rank)


def find_root_cause(run_directory: Path | None, job_folder: Path | None, hosts: Sequence[str]) -> RootCause | None:
    """Return the root cause, or None without any files; before a run directory exists they are in the job's folder.
    `hosts` are of every rank, if known."""
    words = [word for folder in (job_folder, run_directory) if folder for word in read_errors(folder)]
    files = read_stacks(run_directory) if run_directory else []
    causes = [_of_word(word, hosts) for word in sorted(words, key=lambda word: word.rank)]
    causes += [_of_signal(file) for file in files if file.fatal]
    if still := [file for file in files if file.still_s is not None]:
        causes.append((_CAUSE, min(file.at for file in still), _of_stall(still, files)))
    # Ranks that end in order remove their file; before files exist, every rank without an error file counts as silent.
    watched = run_directory is not None and (run_directory / STACKS).is_dir()
    silent = {file.rank: file.host for file in files if not file.text.strip()} if watched else dict(enumerate(hosts))
    killed = sorted(silent.keys() - {word.rank for word in words})
    if causes and killed:
        # A link's error points to its other end.
        causes = [cause for cause in causes if cause[2].kind != ERROR or not _OF_THE_LINK.search(cause[2].message)]
        theirs = list(dict.fromkeys(silent[rank] for rank in killed))
        who = f"rank{'s' if len(killed) > 1 else ''} {some(killed)} on {some(theirs)}"
        message = f"{who} exited without reporting an error: killed (out of memory?) or node lost"
        causes.append((_KILLED, 0.0, RootCause(message, KILLED, killed, theirs)))
    return min(causes, key=lambda cause: cause[:2])[2] if causes else None


def _of_word(word: RankError, hosts: Sequence[str]) -> _Cause:
    told = RootCause(f"rank {word.rank} on {word.host}: {word.message}", word.kind, [word.rank], [])
    if word.kind == STALL:
        return _JUDGED, word.at, RootCause(word.message, STALL, word.ranks, word.hosts)
    if word.kind == UNREACHABLE:
        blamed = word.hosts or [*hosts[:1]] * (word.rank != 0)
        return (_CAUSE if word.hosts else _LOST_PEER), word.at, replace(told, message=word.message, hosts=blamed)
    if word.kind == ERROR and _OF_THE_HOST.search(word.message) and not _OF_THE_PROGRAM.search(word.message):
        told = replace(told, hosts=[word.host])
    return {LOST_PEER: _LOST_PEER, STOPPED: _STOPPED}.get(word.kind, _CAUSE), word.at, told


def _of_signal(file: Stacks) -> _Cause:
    message = f"rank {file.rank} on {file.host}: {file.fatal}" + f" {file.where}" * bool(file.frames)
    aborted = file.fatal == "Aborted"
    told = RootCause(message, SIGNAL, [file.rank], [] if aborted else [file.host])
    return (_ABORTED if aborted else _CAUSE), file.at, told


def _of_stall(still: list[Stacks], files: list[Stacks]) -> RootCause:
    """Name the ranks that block the others, and where the others wait."""
    found = files if len(files) == 1 else _elsewhere(files)
    others = [file for file in files if file not in found]
    shown = [f"rank {file.rank} on {file.host} {file.where}" for file in found[:SHOWN]]
    for where, number in Counter(file.where for file in others).most_common(1):
        shown.append(f"{number} of {'the other' if found else 'all'} {len(others)} {where}")
    message = f"no step for {min(file.still_s or 0.0 for file in still):.0f} s: {'; '.join(shown)}"
    return RootCause(message, STALL, [file.rank for file in found], list(dict.fromkeys(file.host for file in found)))


def _elsewhere(files: Sequence[Stacks]) -> list[Stacks]:
    """Return the ranks that block the others: those without stacks, else a step behind (preferably not waiting), else not
    waiting. Empty if all are alike."""
    latest = max(file.step for file in files)
    behind = [file for file in files if file.step < latest]
    choices = (
        [file for file in files if not file.frames],
        [file for file in behind if not file.waits],
        behind,
        [file for file in files if not file.waits],
    )
    return next((found for found in choices if 0 < len(found) < len(files)), [])
