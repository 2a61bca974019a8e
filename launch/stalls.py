"""When a run has stopped stepping, and which of its ranks stand elsewhere than the rest. Standard library only.

Judges by what ranks note of their progress (`clap_ds/dist/progress.py`) and by the stacks that faulthandler writes of them.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from clap_ds.launch.connection import Message

LEAST_S, MEDIANS, GAPS = 60.0, 20.0, 3.0
"""A run stands still when nobody has stepped for so many seconds, median steps and longest pauses so far."""
UNKNOWN_S = 600.0  # where no step has been timed yet
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WAITING = re.compile(r"/torch/distributed/|(^|\W)(wait|synchronize|barrier)$")


class StepWatch:
    """Follows the ranks' notes, at every look of the job."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=200)  # seconds of a step
        self._last: tuple[int, float] | None = None
        self._youngest = self._longest_pause = 0.0

    def usual_step_s(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def stalled(self, notes: Iterable[Message], now: float) -> float | None:
        """Seconds for which nobody has stepped, if that is too long; `now` by any clock in seconds."""
        everyone = list(notes)
        stepping = [note for note in everyone if note.get("doing") == "step" and note["made"] >= 2]
        if not everyone or len(stepping) < len(everyone):
            self._last = None  # they start, save, evaluate or end
            return None
        made, youngest = max(note["made"] for note in stepping), min(note["age"] for note in stepping)
        if self._last is None or made > self._last[0]:
            if self._last is not None:
                self._steps.append((now - self._last[1]) / (made - self._last[0]))
                self._longest_pause = max(self._longest_pause, self._youngest)
            self._last, self._youngest = (made, now), 0.0
        self._youngest = max(self._youngest, youngest)
        usual_s = self.usual_step_s()
        limit_s = UNKNOWN_S if usual_s is None else max(LEAST_S, MEDIANS * usual_s, GAPS * self._longest_pause)
        return youngest if youngest > limit_s else None


@dataclass
class Stack:
    """Where a rank is: what it wrote of its threads when asked, empty where it didn't answer."""

    rank: int
    host: str
    state: str  # the kernel's letter
    step: int
    text: str

    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function of the main thread, innermost first; faulthandler writes the oldest thread last."""
        return _FRAME.findall(re.split(r"^(?:Current thread|Thread) .*$", self.text, flags=re.MULTILINE)[-1])

    def where(self) -> str:
        if not self.frames():
            return "stopped by a signal" if self.state in "Tt" else f"gives no answer (state {self.state})"
        file, line, function = self.frames()[0]
        return f"in {function} ({file.rpartition('/')[2]}:{line})"

    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_WAITING.search(file) or _WAITING.search(function) for file, _, function in self.frames()[:4])


def elsewhere(stacks: list[Stack]) -> list[Stack]:
    """The ranks that hold the others up: those that don't answer, else those that don't wait, are a step behind, or are not
    where most are. Empty where all are alike."""
    latest = max((stack.step for stack in stacks), default=0)
    most = Counter(stack.where() for stack in stacks).most_common(1)
    choices = (
        [stack for stack in stacks if not stack.frames()],
        [stack for stack in stacks if not stack.waits()],
        [stack for stack in stacks if stack.step < latest],
        [stack for stack in stacks if most and most[0][1] * 2 > len(stacks) and stack.where() != most[0][0]],
    )
    return next((found for found in choices if 0 < len(found) < len(stacks)), [])


def describe(seconds: float, usual_s: float | None, stacks: list[Stack]) -> str:
    """One sentence: for how long nobody has stepped, who holds the others up, and where those wait."""
    found = elsewhere(stacks)
    usual = f" (a step takes {usual_s:.1f} s)" if usual_s is not None else ""
    if not found:
        return f"no step for {seconds:.0f} s{usual}; all {len(stacks)} ranks are alike"
    shown = "; ".join(f"rank {each.rank} on {each.host} {each.where()}" for each in found[:8])
    others = Counter(each.where() for each in stacks if each not in found).most_common(1)
    return f"no step for {seconds:.0f} s{usual}: {shown}; the other {len(stacks) - len(found)} {others[0][0]}"
