"""Time steps and their phases.

Marks are CUDA events or times of the host's clock. The device is synchronized only when marks are
read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch

# The phase that is timed even while throughput is measured.
ALWAYS_TIMED = "data_wait"
PEER_WAIT = "peer_wait"
FEATURE_WAIT = "feature_wait"

# A CUDA event, or seconds of the host's clock.
_Mark = Any


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


def _seconds_between(begin: _Mark, end: _Mark) -> float:
    """Return the seconds between two marks that the device has reached."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000


class _Span(NamedTuple):
    """Part of a step that is added to a phase or, if it is nested in that phase, subtracted."""

    phase: str
    sign: int
    begin: _Mark
    end: _Mark


class StepTimes(NamedTuple):
    """Seconds of a window and of each of its steps: the whole step, without waits for other ranks,
    and by phase."""

    window_s: float
    step_s: list[float]
    own_s: list[float]
    phases_s: list[dict[str, float]]


class StepTimer:
    """Timer of a window's steps, their phases and their waits for other ranks: `start()`, `mark()`
    after each step, `stop()`.

    GPU phases are times on the device: `data_wait` is how long it waited for data or their copy.
    Other phases are timed only in `instrumented` windows, which wait for the device's work before
    and after each, so that the step is slower. Nothing is recorded between windows.

    Attributes:
        label: makes a context that names a phase to a profiler, also between windows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.label: Callable[[str], AbstractContextManager[Any]] = nullcontext
        # The window's begin and each step's end; empty between windows.
        self._marks: list[_Mark] = []
        # Of each step.
        self._spans: list[list[_Span]] = []
        # Phases that have begun, the innermost last.
        self._open: list[str] = []
        self._instrumented = False
        self._started_s = 0.0

    def start(self, *, instrumented: bool = False) -> None:
        """Start a window unless one is running."""
        if self._marks:
            return
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
        step_s = [_seconds_between(begin, end) for begin, end in pairwise(self._marks)]
        self._marks = []
        own_s = []
        phases_s = []
        # The last list is that of a step which hasn't begun.
        for whole_s, spans in zip(step_s, self._spans, strict=False):
            totals_s: dict[str, float] = defaultdict(float)
            for span in spans:
                totals_s[span.phase] += span.sign * _seconds_between(span.begin, span.end)
            own_s.append(whole_s - totals_s.pop(PEER_WAIT, 0.0))
            phases_s.append(totals_s)
        return StepTimes(window_s, step_s, own_s, phases_s)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Record the body as a phase of the step; time of phases in its body is subtracted."""
        is_timed = self._instrumented or phase == ALWAYS_TIMED
        if not self._marks or not is_timed:
            with self.label(phase):
                yield
            return
        begin = self._edge()
        self._open.append(phase)
        try:
            with self.label(phase):
                yield
        finally:
            end = self._edge()
            self._open.pop()
            self._spans[-1].append(_Span(phase, 1, begin, end))
            if self._open:
                self._spans[-1].append(_Span(self._open[-1], -1, begin, end))

    @contextmanager
    def peer_wait(self) -> Iterator[None]:
        """Record the body as a wait for other ranks."""
        if not self._marks:
            yield
            return
        begin = _mark(self.device)
        yield
        # The body may have ended the window.
        if self._marks:
            self._spans[-1].append(_Span(PEER_WAIT, 1, begin, _mark(self.device)))

    @contextmanager
    def feature_wait(self) -> Iterator[None]:
        """Record the body as a wait for other ranks' features, which is a phase of its own."""
        with self(FEATURE_WAIT), self.peer_wait():
            yield

    def _edge(self) -> _Mark:
        if self._instrumented and self.device.type == "cuda":
            # Not for the whole device: a gather on another stream would end in the forward pass.
            torch.cuda.current_stream(self.device).synchronize()
        return _mark(self.device)
