"""Logs of DeepSpeed and of this project's benchmark → runs, for logs of any size and in the state that real logs are in.

DeepSpeed's rank 0 prints a running average R of samples/s at its step k. It covers every step since the timer began at step
3, so with global batch B the timer has run (k - 2)·B/R seconds, and two lines give the exact mean rate of all steps between
them. The launcher's lines give nodes and ranks, the engine's printed configuration batch sizes, `time (ms) | fwd: …` the
breakdown. The timer leaves out data loading. A log of the benchmark's has its own figures, which count it.

The file is read once, in blocks; what is kept are sums for each of at most `MAX_WINDOWS` windows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from clap_ds.analysis.bench_output import BenchOutput
from clap_ds.analysis.log_files import FileState, blocks
from clap_ds.analysis.log_lines import find_lines, in_order, label_of, without_colours
from clap_ds.analysis.record import interval_fields, run_of
from clap_ds.analysis.table import MOST, Run, is_measurable
from clap_ds.config.errors import UserError

MAX_WINDOWS = 128
TIMER_START_STEP = 2
"""DeepSpeed's ThroughputTimer doesn't time the first two steps."""
BREAKDOWN_PHASES = ("forward", "backward", "exposed_communication", "optimizer")
"""What DeepSpeed times, in its order: the loss within the forward pass, and data loading not at all."""
_STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""


@dataclass
class Attempt:
    """One start of the training program; a restart begins the next, of the same shape until its own lines say otherwise."""

    shape: dict[str, int] = field(default_factory=dict)
    """`nodes`, `gpus`, `micro_batch`, `accumulation`, `global_batch`, where the log says."""
    precision: str = ""
    state: str = "unknown"
    announced: bool = False
    """The engine printed its configuration, or the benchmark its directory, as they do at each start."""
    source: bytes | None = None
    """Label of the rank or host whose throughput is read."""
    windows: list[tuple[int, float]] = field(default_factory=list)
    """Steps, and their timer seconds divided by the global batch, of windows of `window_intervals` printed intervals each,
    fewer than `MAX_WINDOWS`; without those of the warm-up."""
    window_intervals: int = 1
    part: tuple[int, int, float] = (0, 0, 0.0)
    """Of the window that isn't whole yet: intervals, steps, time."""
    last_step: int = 0
    last_average: float = 0.0
    """The latest running average, over all timed steps: what a log too short for windows still says."""
    interval: int = 0
    max_memory_gib: float = 0.0
    breakdown_ms: list[float] = field(default_factory=lambda: [0.0] * len(BREAKDOWN_PHASES))
    """Sums over `breakdown_steps`."""
    breakdown_steps: int = 0
    bench: BenchOutput = field(default_factory=BenchOutput)

    @property
    def is_bench(self) -> bool:
        return bool(self.bench.windows or self.bench.has_table)

    def add(self, steps: int, time: float, intervals: int = 1) -> None:
        """Take in what lies between printed lines, `intervals` of them. Windows grow with the log: two full ones make one."""
        so_far, steps_so_far, time_so_far = self.part
        self.part = so_far + intervals, steps_so_far + steps, time_so_far + time
        if self.part[0] == self.window_intervals:
            self.windows.append(self.part[1:])
            self.part = 0, 0, 0.0
        if len(self.windows) == MAX_WINDOWS:
            pairs = zip(self.windows[::2], self.windows[1::2], strict=True)
            self.windows = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            self.window_intervals *= 2

    def add_throughput(self, lines: Sequence[re.Match[bytes]], warmup_steps: int) -> int | None:
        """Take in many lines of throughput at once, provided that nothing happens in them: no start, no impossible rate. How
        many were other ranks', by their labels, and left out; None, with none taken in, where something happens."""
        own = [match for match in lines if label_of(match) in (None, self.source)] if self.source else lines
        if self.last_step < max(warmup_steps, 1) or not own or label_of(own[0]) not in (None, self.source):
            return None
        others, lines = len(lines) - len(own), own
        texts = [match.groups() for match in lines]
        steps = [self.last_step, *(int(step) for step, _, _ in texts)]
        averages = [float(average) for _, average, _ in texts]
        if not all(map(is_measurable, averages)):
            return None
        averages.insert(0, self.last_average)
        elapsed = [(step - TIMER_START_STEP) / average for step, average in zip(steps, averages, strict=True)]
        intervals = [after - before for before, after in pairwise(steps)]
        times = [after - before for before, after in pairwise(elapsed)]
        if not all(0 < steps_between < time * MOST for steps_between, time in zip(intervals, times, strict=True)):
            return None
        at = 0
        while at < len(times):
            end = min(at + self.window_intervals - self.part[0], len(times))
            self.add(sum(intervals[at:end]), sum(times[at:end]), end - at)
            at = end
        self.last_step, self.last_average = steps[-1], averages[-1]
        self.interval = min(self.interval, *intervals)
        self.max_memory_gib = max(self.max_memory_gib, *(float(memory or 0) for memory in {text[2] for text in texts}))
        return others

    def add_breakdown(self, lines: Sequence[re.Match[bytes]]) -> None:
        for column, texts in enumerate(zip(*(match.groups() for match in lines), strict=True)):
            self.breakdown_ms[column] += sum(map(float, texts))
        self.breakdown_steps += len(lines)

    def rates(self) -> list[float]:
        """Global samples/s of the windows."""
        return [steps / time for steps, time in self.windows]


class Scan:
    """What a log holds: attempts in order, and how many throughput lines could not be used."""

    def __init__(self, warmup_steps: int = 10) -> None:
        self.warmup_steps = warmup_steps
        self.attempts = [Attempt()]
        self.unusable = 0  # a zero, negative, infinite or undecodable rate
        self.repeated = 0  # of a step already seen (another rank's, or out of order)
        self.damaged = 0  # cut or overwritten by another rank's
        self.file = FileState()

    def read(self, block: bytes) -> None:
        """Take in the lines of a block, in the order they stand."""
        lines, damaged = find_lines(without_colours(block))
        self.damaged += damaged
        attempt, steady = self.attempts[-1], lines.get("throughput")
        if steady and lines.keys() <= {"throughput", "breakdown"}:
            others = attempt.add_throughput(steady, self.warmup_steps)
            if others is not None:
                self.repeated += others
                attempt.add_breakdown(lines.get("breakdown", []))
                return
        for kind, match in in_order(lines):
            attempt = self.attempts[-1]
            if kind in ("throughput", "micro_throughput", "pipeline"):
                self._throughput(kind, match)
            elif kind == "breakdown":
                attempt.add_breakdown([match])
            elif kind in _STATES:
                attempt.state = max(attempt.state, kind, key=_STATES.index)
            elif kind.startswith("bench_"):
                self._bench(kind, match)
            else:
                self._launch(kind, match[1])

    def _restart(self) -> Attempt:
        self.attempts.append(Attempt(dict(self.attempts[-1].shape), self.attempts[-1].precision))
        return self.attempts[-1]

    def _launch(self, kind: str, text: bytes) -> None:
        """A line of the launcher or of the engine's configuration; after throughput it can only be a new start's."""
        attempt = self.attempts[-1]
        if attempt.last_step or attempt.is_bench or attempt.state not in ("unknown", "completed"):
            attempt = self._restart()
        if kind in ("start", "engine"):
            attempt.announced, attempt.precision = True, ""
        elif kind in ("bf16", "fp16"):
            if text == b"True" and attempt.precision in ("", "fp32"):
                attempt.precision = kind
            attempt.precision = attempt.precision or "fp32"
        elif kind == "autocast":
            attempt.precision = f"torch_autocast_{text.decode()}"
        elif int(text):
            attempt.shape[kind] = int(text)

    def _bench(self, kind: str, match: re.Match[bytes]) -> None:
        attempt = self.attempts[-1]
        if attempt.bench.begins_anew(kind, match):
            attempt = self._restart()
        attempt.bench.add(kind, match)
        if attempt.bench.has_table:
            attempt.state = max(attempt.state, "completed", key=_STATES.index)

    def _throughput(self, kind: str, match: re.Match[bytes]) -> None:
        attempt, step, average = self.attempts[-1], int(match[1]), float(match[2])
        start_step = 0 if kind == "pipeline" else TIMER_START_STEP
        if not (is_measurable(average) and start_step < step):
            self.unusable += 1
            return
        label = label_of(match)
        if None not in (label, attempt.source) and label != attempt.source:
            self.repeated += 1
            return
        if attempt.last_step and step <= attempt.last_step:
            if attempt.last_step - step <= 2 * attempt.interval or attempt.announced:
                self.repeated += 1
                return
            attempt = self._restart()
        attempt.source = label if attempt.source is None else attempt.source
        if kind != "pipeline" and match[3]:
            attempt.max_memory_gib = max(attempt.max_memory_gib, float(match[3]))
        previous_step, previous_average = attempt.last_step, attempt.last_average
        attempt.last_step, attempt.last_average = step, average
        attempt.interval = min(attempt.interval, step - previous_step) if previous_step else step
        micro_steps = attempt.shape.get("accumulation", 1) if kind == "micro_throughput" else 1
        if previous_step < self.warmup_steps * micro_steps:
            attempt.breakdown_ms, attempt.breakdown_steps = [0.0] * len(BREAKDOWN_PHASES), 0
        if previous_step < max(self.warmup_steps * micro_steps, 1):
            return
        if kind == "pipeline":  # the mean since the line before
            time = (step - previous_step) / average
        else:
            time = (step - start_step) / average - (previous_step - start_step) / previous_average
        if time > 0 and is_measurable((step - previous_step) / time):
            attempt.add(step - previous_step, time)
        else:
            self.unusable += 1


def scan_log(path: Path, warmup_steps: int = 10) -> Scan:
    """Read a log, plain or gzip, no window of which covers a start's first steps; UserError where it can't be read."""
    scan = Scan(warmup_steps)
    for block in blocks(path, scan.file):
        scan.read(block)
    return scan


def read_log(path: Path, warmup_steps: int = 10, gpus: int | None = None) -> list[Run]:
    """Runs of a log: one for each of the benchmark's; of DeepSpeed's, one per shape (nodes, GPUs, batch), restarts of the same
    shape taken together.

    Where the log doesn't say how many GPUs there are it is `gpus`; rates are of all of them where that isn't given either.
    Raises UserError where the file can't be read, is empty or binary, or has no throughput that is possible; says which.
    """
    scan = scan_log(path, warmup_steps)
    measured = [attempt for attempt in scan.attempts if attempt.last_step or attempt.is_bench]
    last = scan.attempts[-1]
    if not measured and last.state in ("unknown", "completed"):
        raise UserError(f"{path}: {_why_nothing(scan)}")
    groups: dict[object, list[Attempt]] = {}
    for attempt in measured if last in measured or last.state == "unknown" else [*measured, last]:
        shape = tuple(attempt.shape.get(name, 0) for name in ("nodes", "gpus", "micro_batch", "accumulation"))
        groups.setdefault(id(attempt) if attempt.is_bench else shape, []).append(attempt)
    return [_run(path, attempts, scan, gpus or 1) for attempts in groups.values()]


def _why_nothing(scan: Scan) -> str:
    if not scan.file.num_bytes:
        return "empty file" + (" (truncated gzip)" if scan.file.truncated_gzip else "")
    if scan.unusable:
        return f"all {scan.unusable} throughput lines have a zero, negative or infinite rate"
    if scan.file.binary:
        return "binary file, not a log"
    return (
        'no throughput lines (DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps), no table and no'
        " window of the benchmark"
    )


def _run(path: Path, attempts: list[Attempt], scan: Scan, given_gpus: int) -> Run:
    last, shape = attempts[-1], attempts[-1].shape
    gpus, accumulation = shape.get("gpus", given_gpus), shape.get("accumulation", 1)
    if last.is_bench:
        return _bench_run(path, last, given_gpus)
    windows = tuple(rate / gpus for attempt in attempts for rate in attempt.rates())
    averages = [attempt.last_average / gpus for attempt in attempts if attempt.last_step]
    noted = {
        "DeepSpeed's timer: leaves out data loading": True,
        "too short to drop the warm-up: the running average is given": averages and not windows,
        f"{len(scan.attempts)} starts in the log": len(scan.attempts) > 1,
        f"{scan.unusable} throughput lines with an impossible rate left out": scan.unusable,
        f"{scan.damaged} damaged throughput lines left out": scan.damaged,
        f"{scan.repeated} repeated throughput lines left out": scan.repeated,
        "the gzip file is cut or damaged": scan.file.truncated_gzip,
    }
    micro_batch = shape.get("micro_batch") or shape.get("global_batch", 0) // gpus // accumulation
    steps = sum(attempt.breakdown_steps for attempt in attempts)
    sums_ms = [sum(column) for column in zip(*(attempt.breakdown_ms for attempt in attempts), strict=True)]
    totals = zip(BREAKDOWN_PHASES, sums_ms, strict=True)
    parts: dict[str, Any] = {f"{name}_s": ms / steps / 1000 for name, ms in totals if steps}
    return Run(
        source=str(path), kind="log", state=last.state, precision=last.precision,
        nodes=shape.get("nodes", 0), gpus=shape.get("gpus", 0),
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        samples_per_s_per_gpu=median(windows or averages) if averages else None, **interval_fields(windows), **parts,
        memory_peak_gib=max(attempt.max_memory_gib for attempt in attempts) or None,
        notes="; ".join(note for note, holds in noted.items() if holds),
    )  # fmt: skip


def _bench_run(path: Path, attempt: Attempt, given_gpus: int) -> Run:
    """What the benchmark printed, and of what it didn't (a run that was killed) what DeepSpeed's lines say."""
    shape = attempt.shape
    known = {"world_size": shape.get("gpus"), "num_nodes": shape.get("nodes"), "precision": attempt.precision,
             "micro_batch_per_gpu": shape.get("micro_batch"), "state": attempt.state}  # fmt: skip
    printed = attempt.bench.summary(shape.get("gpus", given_gpus), shape.get("accumulation"))
    notes = (
        [] if attempt.bench.has_table else ["no table: rates of windows, as the benchmark printed them while it ran"]
    )
    return replace(run_of(str(path), known | printed, {}, {}, notes), kind="log")
