"""What a rank does that stands still: the lowest one whose threads run judges, records and says why; then all leave.

When that is the case is `clap_ds.ranks.watch`'s. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from clap_ds.ranks import stacks
from clap_ds.ranks.failure import STALL, leave_word
from clap_ds.ranks.limits import within
from clap_ds.ranks.verdict import judge
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import

GRACE_S = 8.0  # for the other ranks to write theirs
SPEAK_S = 20.0  # for the record and the terminal


@dataclass(frozen=True)
class Place:
    """Of a rank: its run's directory, its number, its host's name, and the ranks of that host."""

    run_directory: Path
    rank: int
    host: str
    neighbours: range

    @property
    def path(self) -> Path:
        return stacks.path_of(self.run_directory, self.rank)


def leave_together(place: Place, still_s: float) -> None:
    """Called again and again by a rank that has stood still for so many seconds: ends it when the run's end is recorded, or
    can be by this rank, and returns otherwise."""
    if _is_lowest(place) and still_s > _longest_wait_s(place):
        with suppress(Exception):
            within(SPEAK_S, lambda: _speak(place))
        _leave(place)
    with suppress(OSError, ValueError):
        if RunDirectory(place.run_directory).summary().get("state") != "running":
            _leave(place)


def _is_lowest(place: Place) -> bool:
    lower = (stacks.read(stacks.path_of(place.run_directory, rank)) for rank in range(place.rank))
    return not any(each and each.doing == stacks.STILL for each in lower)


def _longest_wait_s(place: Place) -> float:
    """How long ranks that don't stand still, as far as they could say, may take; one of them may compile."""
    waiting = (each.limit_s for each in stacks.read_all(place.run_directory) if each.still_s is None)
    return stacks.SLACK * max(waiting, default=0.0) + GRACE_S


def _speak(place: Place) -> None:
    verdict = judge(place.run_directory, None, ())
    message = verdict.message if verdict else "no step, and no stacks"
    if verdict and verdict.kind == STALL:
        # What is judged now stays: a rank that was stopped may write its stacks when the others have left.
        leave_word(STALL, message, 1, ranks=verdict.ranks, missing=verdict.hosts)
    RunDirectory(place.run_directory).finish("failed", message)
    print(f"error: {message}; stacks: {place.run_directory / stacks.FOLDER}", file=sys.stderr, flush=True)


def _leave(place: Place) -> NoReturn:
    """End this rank, and with it ranks of this host that are stopped, for which a launcher would wait."""
    for rank in place.neighbours:
        neighbour = stacks.read(stacks.path_of(place.run_directory, rank))
        if neighbour and neighbour.host == place.host and _is_stopped_sibling(neighbour.pid):
            os.kill(neighbour.pid, signal.SIGKILL)
    os._exit(1)


def _is_stopped_sibling(pid: int) -> bool:
    with suppress(OSError, IndexError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return state == "T" and int(parent) == os.getppid()
    return False
