"""Time steps and their phases.

Marks are CUDA events or times of the host's clock. The device is synchronized only when marks are read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch

ALWAYS_TIMED = "data_wait"
"""The phase that is timed even while throughput is measured."""

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


class StepClock:
    """Times the steps of one window: `start()`, `mark()` after each step, `stop()`."""

    running: ClassVar[StepClock | None] = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[_Mark] = []
        self.waits: list[list[tuple[_Mark, _Mark]]] = []  # per step: start and end of each `peer_wait`
        self._started_s = 0.0

    def start(self) -> None:
        synchronize(self.device)
        self._marks, self.waits = [_mark(self.device)], [[]]
        self._started_s = time.perf_counter()
        StepClock.running = self

    def mark(self) -> None:
        self._marks.append(_mark(self.device))
        self.waits.append([])

    def stop(self) -> tuple[float, list[float], list[float]]:
        """End the window. Returns its seconds, each step's, and each step's without waits for other ranks."""
        synchronize(self.device)
        window_s, StepClock.running = time.perf_counter() - self._started_s, None
        step_s = [_seconds_between(before, after) for before, after in pairwise(self._marks)]
        steps = zip(step_s, self.waits, strict=False)
        return window_s, step_s, [whole - sum(_seconds_between(*wait) for wait in waits) for whole, waits in steps]


@contextmanager
def peer_wait() -> Iterator[None]:
    """Record the body as a wait for other ranks in the running clock."""
    clock = StepClock.running
    begin = _mark(clock.device) if clock else 0.0
    yield
    if clock:
        clock.waits[-1].append((begin, _mark(clock.device)))


class PhaseTimer:
    """Times the phases of a step.

    GPU phases are times on the device: `data_wait` is how long it waited for data or their copy. Other phases are timed
    only when `instrumented`, with the device synchronized before and after, which slows the step.
    """

    def __init__(self, device: torch.device, *, instrumented: bool) -> None:
        self._device, self._instrumented = device, instrumented
        self._open: list[str] = []
        self._spans: list[tuple[str, int, _Mark, _Mark]] = []  # with a sign: -1 subtracts a nested phase

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase, without nested phases. Synchronizes the device."""
        synchronize(self._device)
        total: dict[str, float] = defaultdict(float)
        for phase, sign, begin, end in self._spans:
            total[phase] += sign * _seconds_between(begin, end)
        return total

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._instrumented and phase != ALWAYS_TIMED:
            yield
            return
        begin = self._edge()
        self._open.append(phase)
        try:
            yield
        finally:
            end = self._edge()
            self._open.pop()
            self._spans.append((phase, 1, begin, end))
            if self._open:
                self._spans.append((self._open[-1], -1, begin, end))

    def _edge(self) -> _Mark:
        if self._instrumented:
            synchronize(self._device)
        return _mark(self._device)
