"""Time steps and their phases.

Marks are CUDA events or times of the host's clock. The device is synchronized only when marks are
read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

ALWAYS_TIMED = "data_wait"
"""The phase that is timed even while throughput is measured."""
PEER_WAIT = "peer_wait"

_Mark = Any
"""A CUDA event, or seconds of the host's clock."""


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Time an action in seconds, with the device synchronized before and after."""
    synchronize(device)
    started_s = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started_s


def _mark(device: torch.device) -> _Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(before: _Mark, after: _Mark) -> float:
    """Return the seconds between two marks that the device has reached."""
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000


class StepTimes(NamedTuple):
    """Seconds of a window and of each of its steps: the whole step, without waits for other ranks,
    and by phase."""

    window_s: float
    step_s: list[float]
    own_s: list[float]
    phases_s: list[dict[str, float]]


class StepTimer:
    """Times the steps of a window, their phases and their waits for other ranks: `start()`,
    `mark()` after each step, `stop()`.

    GPU phases are times on the device: `data_wait` is how long it waited for data or their copy.
    Other phases are timed only in `instrumented` windows, with the device synchronized before and
    after, which slows the step. Nothing is recorded between windows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[_Mark] = []  # empty between windows
        self._spans: list[
            list[tuple[str, int, _Mark, _Mark]]
        ] = []  # per step; the sign -1 subtracts a nested phase
        self._open: list[str] = []
        self._instrumented = False
        self._started_s = 0.0

    def start(self, *, instrumented: bool = False) -> None:
        """Start a window unless one is running."""
        if not self._marks:
            synchronize(self.device)
            self._instrumented = instrumented
            self._spans = [[]]
            self._marks = [_mark(self.device)]
            self._started_s = time.perf_counter()

    def mark(self) -> None:
        """Record that a step is complete."""
        self._marks.append(_mark(self.device))
        self._spans.append([])

    def stop(self) -> StepTimes:
        """End the window and return its times."""
        synchronize(self.device)
        window_s = time.perf_counter() - self._started_s
        step_s = [_seconds_between(before, after) for before, after in pairwise(self._marks)]
        phases_s: list[dict[str, float]] = [defaultdict(float) for _ in step_s]
        for total, spans in zip(phases_s, self._spans, strict=False):
            for phase, sign, begin, end in spans:
                total[phase] += sign * _seconds_between(begin, end)
        self._marks = []
        own_s = [
            whole_s - phase_s.pop(PEER_WAIT, 0.0)
            for whole_s, phase_s in zip(step_s, phases_s, strict=True)
        ]
        return StepTimes(window_s, step_s, own_s, phases_s)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Record the body as a phase of the step; time of phases in its body is subtracted."""
        if not self._marks or not (self._instrumented or phase == ALWAYS_TIMED):
            yield
            return
        begin = self._edge()
        self._open.append(phase)
        try:
            yield
        finally:
            end = self._edge()
            self._open.pop()
            self._spans[-1].append((phase, 1, begin, end))
            if self._open:
                self._spans[-1].append((self._open[-1], -1, begin, end))

    @contextmanager
    def peer_wait(self) -> Iterator[None]:
        """Record the body as a wait for other ranks."""
        begin = _mark(self.device) if self._marks else None
        yield
        if begin is not None and self._marks:
            self._spans[-1].append((PEER_WAIT, 1, begin, _mark(self.device)))

    def _edge(self) -> _Mark:
        if self._instrumented:
            synchronize(self.device)
        return _mark(self.device)
