"""One start of a training program, as its log tells it: its size, how it ended, and its throughput lines as rates over time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clap_ds.analysis.bench_output import BenchOutput
from clap_ds.analysis.dialects import Dialect, Numbers
from clap_ds.analysis.record import rate_over
from clap_ds.analysis.table import LEAST, MOST

MAX_WINDOWS = 96
"""Of one start; neighbours are taken together."""
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""
TIMED_PARTS = ("forward_s", "backward_s", "exposed_communication_s", "optimizer_s")
"""What DeepSpeed's `wall_clock_breakdown` times, in its order: the loss within forward, data loading not at all."""


@dataclass(frozen=True)
class Pace:
    """What throughput lines tell, of all ranks together."""

    rates: tuple[float, ...] = ()
    """Samples/s of windows, at most `MAX_WINDOWS`, without those of the warm-up."""
    window_s: tuple[float, ...] = ()
    """Seconds each lasted; for each sample of a global batch where that isn't known."""
    step_s: float | None = None
    """Median step, in the same unit, where every step was printed."""
    average: float | None = None
    """Samples/s from the first timed step on: what a log too short for windows still says."""

    @property
    def rate(self) -> float | None:
        return rate_over(self.rates, self.window_s)


@dataclass
class Attempt:
    """One start of the training program; a restart begins the next, of the same shape until its own lines say otherwise."""

    shape: dict[str, int] = field(default_factory=dict)
    """`nodes`, `gpus`, `micro_batch`, `accumulation`, `global_batch`, where the log says."""
    facts: dict[str, str] = field(default_factory=dict)
    """`model`, `precision`, `start` (the run directory) and `host_alone`, where the log says."""
    state: str = "unknown"
    announced: bool = False
    """The engine printed its configuration, or the benchmark its directory, as they do at each start."""
    source: bytes | None = None
    """Label of the rank or host whose throughput is read."""
    dialect: Dialect | None = None
    positions: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """What `Dialect.points` keeps of each line."""
    interval: float = float("inf")
    """Least distance of two positions."""
    timed: int = 0
    """Lines before the benchmark's last window was told: those after it are of its instrumented steps."""
    max_memory_gib: float = 0.0
    parts_ms: Numbers = field(default_factory=lambda: np.zeros(len(TIMED_PARTS)))
    """Of `TIMED_PARTS`, sums over `parts_steps` steps after the warm-up."""
    parts_lines: int = 0
    """With those of the warm-up."""
    parts_steps: int = 0
    bench: BenchOutput = field(default_factory=BenchOutput)

    @property
    def is_bench(self) -> bool:
        return bool(self.bench.windows or self.bench.has_table)

    @property
    def measured(self) -> bool:
        return bool(self.positions) or self.is_bench

    @property
    def global_batch(self) -> int:
        """0 where it isn't known."""
        of_parts = self.shape.get("micro_batch", 0) * self.shape.get("gpus", 0) * self.shape.get("accumulation", 1)
        return of_parts or self.shape.get("global_batch", 0)

    def add(self, positions: Numbers, values: Numbers) -> None:
        self.positions.frombytes(positions.tobytes())
        self.values.frombytes(values.tobytes())

    def add_parts(self, lines: Sequence[Sequence[Any]], warmup_steps: int) -> None:
        """Take in milliseconds of `TIMED_PARTS`, a line for each step."""
        timed = np.array(lines, float)[max(warmup_steps - self.parts_lines, 0) :]
        self.parts_ms += timed.sum(axis=0)
        self.parts_lines += len(lines)
        self.parts_steps += len(timed)

    def pace(self, warmup_steps: int, until: int | None = None) -> Pace:
        """Of the first `until` lines, or all."""
        if not (self.dialect and self.positions):
            return Pace()
        points = np.array(self.positions[:until]), np.array(self.values[:until])
        steps, times, batch = self.dialect.curve(*points, self.global_batch)
        if batch:
            self.shape["global_batch"] = round(batch)
        keep = _in_order(times)
        steps, times = steps[keep], times[keep]
        average = float((steps[-1] - self.dialect.untimed) / times[-1])
        begin = int(np.searchsorted(steps, max(warmup_steps, 1)))
        steps, times = steps[begin:], times[begin:]
        if len(steps) < 2:
            return Pace(average=average)
        size = -(-(len(steps) - 1) // MAX_WINDOWS)
        edges = [*range(0, len(steps) - 1, size), len(steps) - 1]
        rates, window_s = np.diff(steps[edges]) / np.diff(times[edges]), np.diff(times[edges]) * (batch or 1)
        possible = (rates >= LEAST) & (rates <= MOST)
        single = np.diff(steps) == 1
        step_s = float(np.median(np.diff(times)[single])) * (batch or 1) if 2 * single.sum() > len(single) else None
        return Pace(tuple(rates[possible].tolist()), tuple(window_s[possible].tolist()), step_s, average)


def mean_parts(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Seconds a step by `TIMED_PARTS`; empty where none was timed after the warm-up."""
    steps = sum(attempt.parts_steps for attempt in attempts)
    sums_ms = np.sum([attempt.parts_ms for attempt in attempts], axis=0)
    return dict(zip(TIMED_PARTS, (sums_ms / steps / 1000).tolist(), strict=True)) if steps else {}


def _in_order(times: Numbers) -> NDArray[np.bool_]:
    """Which are later than all before them; first without each that isn't between its neighbours, where those are in order."""
    keep = np.ones(len(times), bool)
    before, at, after = times[:-2], times[1:-1], times[2:]
    keep[1:-1] = (before >= after) | ((before < at) & (at < after))
    latest = np.maximum.accumulate(np.where(keep, times, -np.inf))
    keep[1:] &= times[1:] > latest[:-1]
    return keep
