"""Why a run ended: the first cause, by what its ranks left behind.

    python -m clap_ds.ranks.verdict RUN_DIRECTORY

Ranks leave words of what failed (`clap_ds.ranks.failure`) and a file each (`clap_ds.ranks.watch`): a line on who writes it,
then stacks where it stood still or got a fatal signal. Who is killed leaves nothing but that line. What to do about a host
to blame is left to the job. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clap_ds.config.errors import UserError, run_alone
from clap_ds.ranks.failure import CONSEQUENCES, ERROR, LOST_PEER, SHOWN, STALL, UNREACHABLE, WORDS, some

SIGNAL, KILLED = "signal", "killed"
"""Kinds of a verdict beside those of words."""
STACKS = "stacks"
"""Folder of the ranks' files in the run directory."""
STEPPING, STILL = "stepping", "standing still"
"""What a rank does by its file's first line, or else something that may take long."""
ABORTED = "Aborted"  # how libraries end a rank that has lost another, as well as one that is broken
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error(?!: (invalid configuration|out of memory))|uncorrectable|\bECC\b|\bXid\b"
    r"|Input/output error|Bus error|Stale file handle|was ended by SIG(KILL|BUS|SEGV)"
)
"""What an error says that may well be a host's fault, not the program's."""
_OF_THE_LINK = re.compile("NCCL|gloo", re.IGNORECASE)
# What faulthandler writes.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.*?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):(\d+)", re.MULTILINE)
_WAITING = re.compile(r"/torch/distributed/|(^|\W)(wait|synchronize|barrier)$")


@dataclass(frozen=True)
class Verdict:
    """Why a run ended, in one line; the ranks it speaks of, and the hosts to blame, empty where nobody is."""

    message: str
    kind: str
    ranks: list[int]
    hosts: list[str]


@dataclass(frozen=True)
class _Word:
    """What one rank said before it left."""

    at: float
    rank: int
    host: str
    kind: str
    message: str
    ranks: list[int]
    missing: list[str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


@dataclass(frozen=True)
class Stacks:
    """What one rank's file says; `at`, in seconds since the epoch, is when it was last written."""

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
        return float(3600 * int(found[1]) + 60 * int(found[2]) + int(found[3])) if found else None

    @property
    def fatal(self) -> str | None:
        """The signal that ended it, such as Segmentation fault."""
        found = _FATAL.search(self.text)
        return found[1] if found else None

    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function, innermost first: of the thread that got a fatal signal, else of the main thread, which
        faulthandler writes last."""
        if self.fatal and "\nCurrent thread " in self.text:
            return _FRAME.findall(_THREAD.split(self.text.rpartition("\nCurrent thread ")[2])[0])
        return _FRAME.findall(_THREAD.split(self.text)[-1])

    def where(self) -> str:
        for file, line, function in self.frames():
            return f"in {function} ({file.rpartition('/')[2]}:{line})"
        return "gives no answer: it is stopped or gone"

    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_WAITING.search(file) or _WAITING.search(function) for file, _, function in self.frames()[:4])


def read_stacks(run_directory: Path) -> list[Stacks]:
    """Of all ranks that have a file, by rank."""
    found = []
    for path in (run_directory / STACKS).glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError):
            first, _, text = path.read_text(errors="replace").partition("\n")
            found.append(Stacks(**json.loads(first), text=text, at=path.stat().st_mtime))
    return sorted(found, key=lambda each: each.rank)


def _read_words(folders: Iterable[Path | None]) -> list[_Word]:
    """The ranks' words, the earliest first."""
    words = []
    for path in (path for folder in folders if folder for path in (folder / WORDS).glob("rank*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text())["message"]
            extra = said["extraInfo"]
            place = float(extra["timestamp"]), int(extra["rank"]), str(extra["host"]), str(extra["kind"])
            words.append(_Word(*place, str(said["message"]), extra.get("ranks", []), extra.get("missing", [])))
    return sorted(words, key=lambda word: (word.at, word.rank))


def judge(run_directory: Path | None, job_folder: Path | None, hosts: Sequence[str]) -> Verdict | None:
    """The first cause, None where nobody left anything.

    Args:
        run_directory: where ranks that have one leave their words and stacks.
        job_folder: where they leave their words before.
        hosts: of every rank, where that is known.
    """
    words = _read_words([job_folder, run_directory])
    files = read_stacks(run_directory) if run_directory else []
    if hosts:  # by the names that whoever asks has for them
        words = [replace(word, host=hosts[word.rank]) for word in words]
        files = [replace(file, host=hosts[file.rank]) for file in files]
    for word in words:
        if word.kind == STALL:  # judged by the ranks
            return Verdict(word.message, STALL, word.ranks, _unique(hosts, word.ranks) if hosts else word.missing)
    causes = [(word.at, _of_word(word, words, hosts)) for word in words if word.kind not in CONSEQUENCES]
    causes += [(file.at, _of_signal(file)) for file in files if file.fatal not in (None, ABORTED)]
    first_at, first = min(causes, key=lambda cause: cause[0], default=(float("inf"), None))
    still = [file for file in files if file.still_s is not None]
    if still and first_at > min(file.at for file in still):
        return _of_stall(still, files)
    # Who ends in an orderly way takes its own file away; before there are any, all are missed.
    watched = run_directory is not None and (run_directory / STACKS).is_dir()
    everyone = {file.rank: file.host for file in files if not file.text.strip()} or dict(
        enumerate(() if watched else hosts)
    )
    killed = {rank: host for rank, host in everyone.items() if rank not in {word.rank for word in words}}
    if first is not None and not (killed and _OF_THE_LINK.search(first.message)):
        return first
    aborted = sorted((file for file in files if file.fatal), key=lambda file: file.at)
    if killed and (words or aborted):
        return _of_killed(killed)
    if aborted:  # where several did, they have lost something in common
        return replace(_of_signal(aborted[0]), hosts=[aborted[0].host] if len(aborted) == 1 else [])
    lost = [word for word in words if word.kind == LOST_PEER] or words
    return Verdict(str(lost[0]), lost[0].kind, [lost[0].rank], []) if lost else None


def _unique(hosts: Sequence[str], ranks: Iterable[int]) -> list[str]:
    return list(dict.fromkeys(hosts[rank] for rank in ranks))


def _of_word(word: _Word, words: list[_Word], hosts: Sequence[str]) -> Verdict:
    if word.kind == UNREACHABLE:
        alike = [each for each in words if each.kind == UNREACHABLE]
        word = next((each for each in alike if each.rank == 0), word)  # it knows who came
        nobody_there = [*hosts[:1]] if word.rank != 0 else []
        return Verdict(word.message, word.kind, [word.rank], word.missing or nobody_there)
    at_fault = word.kind == ERROR and _OF_THE_HOST.search(word.message)
    return Verdict(str(word), word.kind, [word.rank], [word.host] if at_fault else [])


def _of_signal(file: Stacks) -> Verdict:
    where = f" {file.where()}" if file.frames() else ""
    return Verdict(f"rank {file.rank} on {file.host}: {file.fatal}{where}", SIGNAL, [file.rank], [file.host])


def _of_stall(still: list[Stacks], files: list[Stacks]) -> Verdict:
    """Who holds the others up, and where those wait."""
    seconds = min(file.still_s or 0.0 for file in still)
    found = files if len(files) == 1 else _elsewhere(files)
    others = [file for file in files if file not in found]
    shown = [f"rank {file.rank} on {file.host} {file.where()}" for file in found[:SHOWN]]
    for where, number in Counter(file.where() for file in others).most_common(1):
        part = "" if number == len(others) else f"{number} of "
        shown.append(f"{part}{'the other' if found else 'all'} {len(others)} {where}")
    message = f"no step for {seconds:.0f} s: {'; '.join(shown)}"
    return Verdict(message, STALL, [file.rank for file in found], list(dict.fromkeys(file.host for file in found)))


def _elsewhere(files: Sequence[Stacks]) -> list[Stacks]:
    """The ranks that hold the others up: those that don't answer, else those that don't wait, are a step behind, or are not
    where most are. Empty where all are alike."""
    latest = max(file.step for file in files)
    ((most, number),) = Counter(file.where() for file in files).most_common(1)
    choices = (
        [file for file in files if not file.frames()],
        [file for file in files if not file.waits()],
        [file for file in files if file.step < latest],
        [file for file in files if number * 2 > len(files) and file.where() != most],
    )
    return next((found for found in choices if 0 < len(found) < len(files)), [])


def _of_killed(killed: dict[int, str]) -> Verdict:
    ranks = sorted(killed)
    hosts = list(dict.fromkeys(killed[rank] for rank in ranks))
    who = f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)} on {some(hosts)}"
    return Verdict(f"{who} ended without a word: killed, perhaps for memory, or lost", KILLED, ranks, hosts)


def main() -> None:
    if len(sys.argv) != 2 or not (run := Path(sys.argv[1])).is_dir():
        raise UserError(f"expected a run directory, found {' '.join(sys.argv[1:]) or 'nothing'}")
    verdict = judge(run, None, ())
    print(verdict.message if verdict else "no rank has left anything: the run ended in order, or is under way")


if __name__ == "__main__":
    run_alone(main)
