"""A rank's file of stacks: a first line on who writes it and how long it may stand still, below it what faulthandler writes.

Both sides of the format, and where a rank is by it. When stacks are written is `clap_ds.ranks.watch`'s. Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "stacks"
FIRST_LINE_BYTES = 200
STILL = "standing still"
SLACK = 1.1
"""How much a rank's limit may differ from what its first line says."""
_FIRST_LINE = re.compile(r"# rank (\d+) on (\S+), pid (\d+), (.*?)(?: after step (\d+))?, limit (\d+) s\s*\n")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):(\d+)", re.MULTILINE)
_WAITING = re.compile(r"/torch/distributed/|(^|\W)(wait|synchronize|barrier)$")


def path_of(run_directory: Path, rank: int) -> Path:
    return run_directory / FOLDER / f"rank{rank}.txt"


def first_line(rank: int, host: str, pid: int, doing: str, step: int, limit_s: float) -> bytes:
    """Always of the same length, so that it can be replaced in place."""
    place = f"# rank {rank} on {host}, pid {pid}, "
    text = f"{doing[:40]} after step {step}, limit {limit_s:.0f} s"
    return f"{place}{text:<{FIRST_LINE_BYTES - 1 - len(place)}}\n".encode()


@dataclass(frozen=True)
class Stacks:
    """What one rank's file says."""

    rank: int
    host: str
    pid: int
    doing: str
    step: int
    limit_s: float
    text: str
    at: float
    """When it was last written, in seconds since the epoch."""

    @property
    def still_s(self) -> float | None:
        """For how long it had stood still when it wrote, if it did."""
        if found := _TIMEOUT.search(self.text):
            hours, minutes, seconds = map(int, found.groups())
            return float(3600 * hours + 60 * minutes + seconds)
        return None

    @property
    def fatal(self) -> str | None:
        """The signal that ended it, such as Segmentation fault."""
        found = _FATAL.search(self.text)
        return found[1].strip() if found else None

    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function, innermost first: of the thread that got a fatal signal, else of the main thread, which
        faulthandler writes last."""
        parts = _THREAD.split(self.text)
        if self.fatal and "\nCurrent thread " in self.text:
            parts = _THREAD.split("Thread \n" + self.text.rpartition("\nCurrent thread ")[2].partition("\n")[2])[:2]
        return _FRAME.findall(parts[-1])

    def where(self) -> str:
        if not self.frames():
            return "gives no answer: it is stopped or gone"
        file, line, function = self.frames()[0]
        return f"in {function} ({file.rpartition('/')[2]}:{line})"

    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_WAITING.search(file) or _WAITING.search(function) for file, _, function in self.frames()[:4])


def read(path: Path) -> Stacks | None:
    """None for a file that isn't there or isn't one of these."""
    with suppress(OSError):
        text = path.read_text(errors="replace")
        if found := _FIRST_LINE.match(text):
            rank, host, pid, doing, step, limit_s = found.groups()
            at = path.stat().st_mtime
            return Stacks(int(rank), host, int(pid), doing, int(step or 0), float(limit_s), text[found.end() :], at)
    return None


def read_all(run_directory: Path) -> list[Stacks]:
    """Of all ranks that have a file, by rank."""
    found = map(read, (run_directory / FOLDER).glob("rank*.txt"))
    return sorted((each for each in found if each), key=lambda each: each.rank)


def elsewhere(stacks: Sequence[Stacks]) -> list[Stacks]:
    """The ranks that hold the others up: those that don't answer, else those that don't wait, are a step behind, or are not
    where most are. Empty where all are alike."""
    latest = max((each.step for each in stacks), default=0)
    most = Counter(each.where() for each in stacks).most_common(1)
    choices = (
        [each for each in stacks if not each.frames()],
        [each for each in stacks if not each.waits()],
        [each for each in stacks if each.step < latest],
        [each for each in stacks if most and most[0][1] * 2 > len(stacks) and each.where() != most[0][0]],
    )
    return next((found for found in choices if 0 < len(found) < len(stacks)), [])
