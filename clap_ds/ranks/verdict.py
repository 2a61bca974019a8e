"""Why a run ended: the first cause, by what its ranks left behind.

    python -m clap_ds.ranks.verdict RUN_DIRECTORY

Ranks leave words of what failed (`clap_ds.ranks.failure`) and stacks where they stood still or got a fatal signal
(`clap_ds.ranks.stacks`). Who is killed leaves nothing but the first line of its stacks. What to do about a host
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
from clap_ds.ranks import stacks
from clap_ds.ranks.failure import CONSEQUENCES, ERROR, FOLDER, LOST_PEER, SHOWN, STALL, UNREACHABLE, some
from clap_ds.ranks.stacks import Stacks, elsewhere

SIGNAL, KILLED = "signal", "killed"
"""Kinds of a verdict beside those of words."""
ABORTED = "Aborted"  # how libraries end a rank that has lost another, as well as one that is broken
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error(?!: (invalid configuration|out of memory))|uncorrectable|\bECC\b|\bXid\b"
    r"|Input/output error|Bus error|Stale file handle|was ended by SIG(KILL|BUS|SEGV)"
)
"""What an error says that may well be a host's fault, not the program's."""
_OF_THE_LINK = re.compile("NCCL|gloo", re.IGNORECASE)
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")


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


def judge(run_directory: Path | None, job_folder: Path | None, hosts: Sequence[str]) -> Verdict | None:
    """The first cause, None where nobody left anything.

    Args:
        run_directory: where ranks that have one leave their words and stacks.
        job_folder: where they leave their words before.
        hosts: of every rank, where that is known.
    """
    words = _words([folder for folder in (job_folder, run_directory) if folder is not None])
    files = stacks.read_all(run_directory) if run_directory is not None else []
    if hosts:  # by the names that whoever asks has for them
        words = [replace(word, host=hosts[word.rank]) for word in words]
        files = [replace(file, host=hosts[file.rank]) for file in files]
    for word in words:
        if word.kind == STALL:  # judged by the ranks
            by_name = list(dict.fromkeys(hosts[rank] for rank in word.ranks)) if hosts else word.missing
            return Verdict(word.message, STALL, word.ranks, by_name)
    causes = [(word.at, _of_word(word, words, hosts)) for word in words if word.kind not in CONSEQUENCES]
    causes += [(file.at, _of_signal(file)) for file in files if file.fatal not in (None, ABORTED)]
    first_at, first = min(causes, key=lambda cause: cause[0], default=(float("inf"), None))
    still = [file for file in files if file.still_s is not None]
    if still and first_at > min(file.at for file in still):
        return _of_stall(still, files)
    watched = run_directory is not None and (run_directory / stacks.FOLDER).is_dir()
    killed = _silent(words, files, () if watched else hosts)
    if first is not None and not (killed and _OF_THE_LINK.search(first.message)):
        return first
    aborted = sorted((file for file in files if file.fatal), key=lambda file: file.at)
    if killed and (words or aborted):
        return _of_killed(killed)
    if aborted:  # where several did, they have lost something in common
        return replace(_of_signal(aborted[0]), hosts=[aborted[0].host] if len(aborted) == 1 else [])
    lost = [word for word in words if word.kind == LOST_PEER] or words
    return Verdict(str(lost[0]), lost[0].kind, [lost[0].rank], []) if lost else None


def _words(folders: Iterable[Path]) -> list[_Word]:
    """The ranks' words, the earliest first."""
    words = []
    for path in (path for folder in folders for path in (folder / FOLDER).glob("rank*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text())["message"]
            extra = said["extraInfo"]
            place = float(extra["timestamp"]), int(extra["rank"]), str(extra["host"])
            blamed = list(extra.get("ranks", [])), list(extra.get("missing", []))
            words.append(_Word(*place, str(extra["kind"]), str(said["message"]), *blamed))
    return sorted(words, key=lambda word: (word.at, word.rank))


def _of_word(word: _Word, words: list[_Word], hosts: Sequence[str]) -> Verdict:
    if word.kind == UNREACHABLE:
        alike = [each for each in words if each.kind == UNREACHABLE]
        word = next((each for each in alike if each.rank == 0), word)  # it knows who came
        nobody_there = [*hosts[:1]] if word.rank != 0 else []
        return Verdict(word.message, word.kind, [word.rank], word.missing or nobody_there)
    if word.kind == ERROR and (found := _MISSING_MODULE.search(word.message)):
        where = list(dict.fromkeys(each.host for each in words if found[0] in each.message))
        ranks = sorted(each.rank for each in words if found[0] in each.message)
        everywhere = set(hosts) <= set(where)
        return Verdict(f"{found[1]} is missing on {some(where)}", word.kind, ranks, [] if everywhere else where)
    at_fault = word.kind == ERROR and _OF_THE_HOST.search(word.message)
    return Verdict(str(word), word.kind, [word.rank], [word.host] if at_fault else [])


def _of_signal(file: Stacks) -> Verdict:
    where = f" {file.where()}" if file.frames() else ""
    return Verdict(f"rank {file.rank} on {file.host}: {file.fatal}{where}", SIGNAL, [file.rank], [file.host])


def _of_stall(still: list[Stacks], files: list[Stacks]) -> Verdict:
    """Who holds the others up, and where those wait."""
    seconds = min(file.still_s or 0.0 for file in still)
    found = elsewhere(files) or (files if len(files) == 1 else [])
    others = [file for file in files if file not in found]
    shown = [f"rank {file.rank} on {file.host} {file.where()}" for file in found[:SHOWN]]
    for where, number in Counter(file.where() for file in others).most_common(1):
        part = "" if number == len(others) else f"{number} of "
        shown.append(f"{part}{'the other' if found else 'all'} {len(others)} {where}")
    message = f"no step for {seconds:.0f} s: {'; '.join(shown)}"
    return Verdict(message, STALL, [file.rank for file in found], list(dict.fromkeys(file.host for file in found)))


def _silent(words: list[_Word], files: list[Stacks], hosts: Sequence[str]) -> dict[int, str]:
    """Hosts of the ranks that are gone without a word, of those that have `files` of stacks (who ends in an orderly way takes
    its own away) or, before there are any, of all."""
    everyone = dict(enumerate(hosts)) | {file.rank: file.host for file in files if not file.text.strip()}
    return {rank: host for rank, host in everyone.items() if rank not in {word.rank for word in words}}


def _of_killed(killed: dict[int, str]) -> Verdict:
    ranks, hosts = sorted(killed), list(dict.fromkeys(killed[rank] for rank in sorted(killed)))
    who = f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)} on {some(hosts)}"
    return Verdict(f"{who} ended without a word: killed, perhaps for memory, or lost", KILLED, ranks, hosts)


def main() -> None:
    if len(sys.argv) != 2 or not (run := Path(sys.argv[1])).is_dir():
        raise UserError(f"expected a run directory, found {' '.join(sys.argv[1:]) or 'nothing'}")
    verdict = judge(run, None, ())
    print(verdict.message if verdict else "no rank has left anything: the run ended in order, or is under way")


if __name__ == "__main__":
    run_alone(main)
