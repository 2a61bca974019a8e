"""Why a run ended: the first cause, by what its ranks left behind.

Ranks leave words of what failed (`clap_ds.distributed.error_file`) and a file each (`clap_ds.distributed.watchdog`): a line on
who writes it, then stacks where it stood still or got a fatal signal. A rank that is killed leaves that line alone. Standard
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
from clap_ds.distributed.error_file import ERROR, LOST_PEER, SHOWN, STALL, STOPPED, UNREACHABLE, Word, read_words, some

SIGNAL, KILLED = "signal", "killed"
"""Kinds of a verdict beside those of words."""
STACKS = "stacks"  # folder of the ranks' files in the run directory
STEPPING, STILL = "stepping", "standing still"
"""What a rank does by its file's first line, or else something that may take long."""
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error|uncorrectable|\bECC\b|\bXid\b|Input/output error|Bus error|Stale file handle"
    r"|was ended by SIG(KILL|BUS|SEGV)"
)
"""What an error says that may well be a host's fault."""
_OF_THE_PROGRAM = re.compile(
    "illegal memory access|misaligned address|device-side assert|invalid configuration|out of memory"
)
"""What the same error says where a kernel is to blame, which fails on any host."""
_OF_THE_LINK = re.compile("NCCL|gloo", re.IGNORECASE)
# What faulthandler writes.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) .*$", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.*?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):(\d+)", re.MULTILINE)
_WAITING = re.compile(
    r"/torch/(distributed|autograd|_inductor|cuda)/|/triton/|inductor[^/]*/"
    r"|(^|/)(clap_ds|deepspeed)/.* (wait|synchronize|barrier)$"
)
"""File and function of a rank that waits for others. NCCL's collectives are queued: behind one that doesn't end, the host goes
on until the queue is full, and then stands in whatever it launches next."""

# From what explains the rest to what only follows from it; of two alike the earlier counts. Libraries abort a rank that has
# lost another as well as one that is broken.
_JUDGED, _CAUSE, _KILLED, _ABORTED, _LOST_PEER, _STOPPED = range(6)


@dataclass(frozen=True)
class Verdict:
    """Why a run ended, in one line; the ranks it speaks of, and the hosts to blame."""

    message: str
    kind: str
    ranks: list[int]
    hosts: list[str]


_Cause = tuple[int, float, Verdict]  # with its place in that order, and its time


@dataclass(frozen=True)
class Stacks:
    """What one rank's file says, and when it was last written."""

    rank: int
    host: str
    pid: int
    doing: str
    step: int
    text: str
    at: float

    @property
    def still_s(self) -> float | None:
        """For how long it had stood still when it wrote, if it did."""
        found = _TIMEOUT.search(self.text)
        return 3600.0 * int(found[1]) + 60 * int(found[2]) + int(found[3]) if found else None

    @property
    def fatal(self) -> str | None:
        """The signal that ended it, such as Segmentation fault."""
        found = _FATAL.search(self.text)
        return found[1] if found else None

    @cached_property
    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function, innermost first: of the thread with a fatal signal, else of the main one, written last."""
        _, *parts = _THREAD.split(self.text)
        threads = dict(zip(parts[::2], parts[1::2], strict=True))
        return _FRAME.findall(threads.get("Current thread") or threads.get("Thread", ""))

    @property
    def where(self) -> str:
        for file, line, function in self.frames[:1]:
            return f"in {function} ({file.rpartition('/')[2]}:{line})"
        return "gives no answer: it is stopped or gone"

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_WAITING.search(f"{file} {function}") for file, _, function in self.frames[:4])


def read_stacks(run_directory: Path) -> list[Stacks]:
    """Of all ranks that have a file, by rank."""
    found = []
    for path in (run_directory / STACKS).glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError):
            first, _, text = read_bytes(path).decode(errors="replace").partition("\n")
            found.append(Stacks(**parse_json(first), text=text, at=path.stat().st_mtime))
    return sorted(found, key=lambda each: each.rank)


def judge(run_directory: Path | None, job_folder: Path | None, hosts: Sequence[str]) -> Verdict | None:
    """The first cause, None where nobody left anything: in a job's folder before ranks have a run directory. `hosts` are of
    every rank, where that is known."""
    words = [word for folder in (job_folder, run_directory) if folder for word in read_words(folder)]
    files = read_stacks(run_directory) if run_directory else []
    causes = [_of_word(word, hosts) for word in sorted(words, key=lambda word: word.rank)]
    causes += [_of_signal(file) for file in files if file.fatal]
    if still := [file for file in files if file.still_s is not None]:
        causes.append((_CAUSE, min(file.at for file in still), _of_stall(still, files)))
    # Who ends in order takes its own file away; before there are any, all that say nothing are missed.
    watched = run_directory is not None and (run_directory / STACKS).is_dir()
    silent = {file.rank: file.host for file in files if not file.text.strip()} if watched else dict(enumerate(hosts))
    killed = sorted(silent.keys() - {word.rank for word in words})
    if causes and killed:
        # What tells of a link tells of its other end.
        causes = [cause for cause in causes if cause[2].kind != ERROR or not _OF_THE_LINK.search(cause[2].message)]
        theirs = list(dict.fromkeys(silent[rank] for rank in killed))
        who = f"rank{'s' if len(killed) > 1 else ''} {some(killed)} on {some(theirs)}"
        message = f"{who} ended without a word: killed, perhaps for memory, or lost"
        causes.append((_KILLED, 0.0, Verdict(message, KILLED, killed, theirs)))
    return min(causes, key=lambda cause: cause[:2])[2] if causes else None


def _of_word(word: Word, hosts: Sequence[str]) -> _Cause:
    told = Verdict(f"rank {word.rank} on {word.host}: {word.message}", word.kind, [word.rank], [])
    if word.kind == STALL:
        return _JUDGED, word.at, Verdict(word.message, STALL, word.ranks, word.hosts)
    if word.kind == UNREACHABLE:
        blamed = word.hosts or [*hosts[:1]] * (word.rank != 0)
        return (_CAUSE if word.hosts else _LOST_PEER), word.at, replace(told, message=word.message, hosts=blamed)
    if word.kind == ERROR and _OF_THE_HOST.search(word.message) and not _OF_THE_PROGRAM.search(word.message):
        told = replace(told, hosts=[word.host])
    return {LOST_PEER: _LOST_PEER, STOPPED: _STOPPED}.get(word.kind, _CAUSE), word.at, told


def _of_signal(file: Stacks) -> _Cause:
    message = f"rank {file.rank} on {file.host}: {file.fatal}" + f" {file.where}" * bool(file.frames)
    aborted = file.fatal == "Aborted"
    told = Verdict(message, SIGNAL, [file.rank], [] if aborted else [file.host])
    return (_ABORTED if aborted else _CAUSE), file.at, told


def _of_stall(still: list[Stacks], files: list[Stacks]) -> Verdict:
    """Who holds the others up, and where those wait."""
    found = files if len(files) == 1 else _elsewhere(files)
    others = [file for file in files if file not in found]
    shown = [f"rank {file.rank} on {file.host} {file.where}" for file in found[:SHOWN]]
    for where, number in Counter(file.where for file in others).most_common(1):
        shown.append(f"{number} of {'the other' if found else 'all'} {len(others)} {where}")
    message = f"no step for {min(file.still_s or 0.0 for file in still):.0f} s: {'; '.join(shown)}"
    return Verdict(message, STALL, [file.rank for file in found], list(dict.fromkeys(file.host for file in found)))


def _elsewhere(files: Sequence[Stacks]) -> list[Stacks]:
    """The ranks that hold the others up: those that don't answer, else those that are a step behind (of these those that don't
    wait), or that don't wait. Empty where all are alike."""
    latest = max(file.step for file in files)
    behind = [file for file in files if file.step < latest]
    choices = (
        [file for file in files if not file.frames],
        [file for file in behind if not file.waits],
        behind,
        [file for file in files if not file.waits],
    )
    return next((found for found in choices if 0 < len(found) < len(files)), [])
