"""The durations of steps and of their phases.

A step's edges are marked without synchronising the device: on CUDA by events on the stream, elsewhere by the host's
clock. The device is synchronised only at the edges of a window, when the marks are read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Durations of the steps of one window.

    Call `start()`, then `mark()` after each step, then `stop()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []
        self._started_s = 0.0

    def start(self) -> None:
        """Synchronise and begin a window."""
        synchronize(self._device)
        self._marks.clear()
        self.mark()
        self._started_s = time.perf_counter()

    def mark(self) -> None:
        """The edge of a step."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> tuple[float, list[float]]:
        """Synchronise and end the window.

        Returns:
            Seconds of the whole window by the host's clock, and seconds of each step.
        """
        synchronize(self._device)
        window_s = time.perf_counter() - self._started_s
        return window_s, [
            _seconds_between(before, after) for before, after in zip(self._marks, self._marks[1:], strict=False)
        ]


def _seconds_between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert not isinstance(before, float)
    assert not isinstance(after, float)
    return before.elapsed_time(after) / 1000


class PhaseTimer:
    """Where a step's time goes, by phase.

    Phases named in `host_phases` are always timed on the host. The others are timed only when `instrumented`, with the
    device synchronised at both edges, which slows the step: never while throughput is measured.
    """

    def __init__(
        self, device: torch.device, *, instrumented: bool, host_phases: Sequence[str] = ("data_wait",)
    ) -> None:
        self._device = device
        self._instrumented = instrumented
        self._host_phases = frozenset(host_phases)
        self.seconds: dict[str, float] = defaultdict(float)
        """Total seconds by phase since `reset()`; a phase inside another is taken out of the outer one."""
        self._open: list[float] = []

    def reset(self) -> None:
        self.seconds.clear()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._instrumented and phase not in self._host_phases:
            yield
            return
        if self._instrumented:
            synchronize(self._device)
        self._open.append(0.0)
        started_s = time.perf_counter()
        try:
            yield
        finally:
            if self._instrumented:
                synchronize(self._device)
            elapsed_s = time.perf_counter() - started_s
            self.seconds[phase] += elapsed_s - self._open.pop()
            if self._open:
                self._open[-1] += elapsed_s
