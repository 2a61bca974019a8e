"""Read runs from logs of DeepSpeed, open_clip, LAION-CLAP and similar programs.

The rate is total samples over total time after the warm-up, independent of the log's length and printing interval.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from clap_ds.analysis.log_formats import DIALECTS, Dialect, facts_in
from clap_ds.analysis.read_run import BY_TIMER, HOST_ALONE, mean_rate
from clap_ds.analysis.table import MOST, Run
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular

WARMUP_STEPS = 10
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""Later ones take precedence: an out-of-memory error also prints a traceback and a nonzero exit code."""


@dataclass
class Start:
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts from lines other than progress, by their kinds in `log_formats.py`."""
    dialect: Dialect | None = None
    state: str = "unknown"
    position: float = 0.0
    """Steps or samples of the furthest progress line."""
    points: list[tuple[float, float]] = field(default_factory=list)
    """For each progress line: steps done, and seconds since the first timed step (only proportional without a batch)."""

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.facts.get(name, 0) for name in ("nodes", "gpus", "micro_batch", "accumulation"))

    @property
    def global_batch(self) -> int:
        of_parts = self.facts.get("micro_batch", 0) * self.facts.get("gpus", 0) * self.facts.get("accumulation", 1)
        return of_parts or self.facts.get("global_batch", 0)

    def windows(self) -> tuple[list[float], list[float], float | None]:
        """Return samples/s of all GPUs and seconds between progress lines after the warm-up, and samples/s since the first
        timed step."""
        if not (self.points and self.dialect and (self.global_batch or self.dialect.is_cumulative)):
            return [], [], None
        batch, (last, last_s) = self.global_batch or 1, self.points[-1]
        timed = [point for point in self.points if point[0] >= WARMUP_STEPS]
        window_s = [after - before for (_, before), (_, after) in pairwise(timed)]
        steps = [after - before for (before, _), (after, _) in pairwise(timed)]
        rates = [batch * count / seconds for count, seconds in zip(steps, window_s, strict=True)]
        return rates, window_s, batch * (last - self.dialect.untimed) / last_s


def _read_line(starts: list[Start], line: str) -> None:
    """Add a line to the last start or to a new one."""
    for kind, word in facts_in(line):
        last = starts[-1]
        if kind in STATES:
            last.state = max(last.state, kind, key=STATES.index)
        else:  # after progress, it belongs to a new start
            facts = (_restart(starts) if last.points or STATES.index(last.state) > 1 else last).facts
            facts[kind] = int(word) if word.isdigit() else word
    for dialect in DIALECTS.values():
        for numbers in dialect.numbers(line):
            _progress(starts, dialect, numbers)


def _restart(starts: list[Start]) -> Start:
    """Add a start with the size of the previous one, until its lines state another."""
    own = ("precision", "directory", "memory_gib")
    starts.append(Start({name: fact for name, fact in starts[-1].facts.items() if name not in own}))
    return starts[-1]


def _progress(starts: list[Start], dialect: Dialect, numbers: dict[str, float]) -> None:
    position = numbers["step"] if "step" in numbers else numbers["samples"]
    position += numbers.get("epoch", 0) * numbers.get("epoch_samples", 0)
    value = next(numbers[name] for name in ("average", "step_s", "step_ms") if name in numbers)
    value /= 1000 if "step_ms" in numbers else 1
    if not (position > dialect.untimed and 0 < value < MOST):
        return
    start = starts[-1] if position >= starts[-1].position / 2 else _restart(starts)
    start.dialect = dialect
    if "global_batch" in numbers:
        start.facts["global_batch"] = int(numbers["global_batch"])
    start.facts["memory_gib"] = max(numbers.get("memory_gib", 0.0), start.facts.get("memory_gib", 0.0))
    if position <= start.position:  # the line is from another rank
        return
    before, before_s = start.points[-1] if start.points else (0.0, 0.0)
    batch = start.global_batch or 1
    step = position if "step" in numbers else position / batch
    time_s = batch * (step - dialect.untimed) / value if dialect.is_cumulative else before_s + (step - before) * value
    start.position = position
    if time_s > before_s:
        start.points.append((step, time_s))


def read_log(path: Path, gpus: int = 0) -> list[Run]:
    """Read a log: one run per size (nodes, GPUs, batch), with its restarts, or a run without a rate if the log shows a failure.

    `gpus`: number of GPUs if the log doesn't state it. UserError if there is neither a rate nor a failure.
    """
    starts = [Start()]
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, "utf-8", "replace") as text:  # "\r" ends lines, too
            for line in text:
                _read_line(starts, line)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    found = [start for start in starts if start.points] or [
        start for start in starts[-1:] if STATES.index(start.state) > 1
    ]
    if not found:
        printed = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        raise UserError(f"{path}: no usable throughput lines ({printed})")
    groups: dict[object, list[Start]] = {}
    for start in found:
        groups.setdefault(start.size, []).append(start)
    return [_run(path, starts, gpus) for starts in groups.values()]


def _run(path: Path, starts: Sequence[Start], given_gpus: int) -> Run:
    last, facts = starts[-1], starts[-1].facts
    gpus, accumulation = facts.get("gpus") or given_gpus or 1, facts.get("accumulation", 1)
    measured = [start.windows() for start in starts]
    rates = [rate / gpus for of_start, _, _ in measured for rate in of_start]
    window_s = [seconds for _, of_start, _ in measured for seconds in of_start]
    averages = [average / gpus for _, _, average in measured if average]
    rate = mean_rate(rates, window_s) or (averages[-1] if averages else None)
    by_timer = bool(last.dialect and not last.dialect.counts_data_wait)
    noted = {
        BY_TIMER: by_timer,
        HOST_ALONE: by_timer and "host_alone" in facts,
        "too short to drop the warm-up: using the running average": averages and not rates,
        "no rate, because the log doesn't state its batch": not rate and last.points,
        f"{len(starts)} starts in the log": len(starts) > 1,
    }
    micro_batch = facts.get("micro_batch") or last.global_batch // gpus // accumulation
    names = ("model", "precision", "directory", "nodes", "gpus")
    return Run(
        source=str(path), kind="log", state=last.state, **{name: facts[name] for name in names if name in facts},
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        memory_peak_gib=max(start.facts.get("memory_gib", 0.0) for start in starts) or None,
        engine_samples_per_s_per_gpu=rate if by_timer else None,
        samples_per_s_per_gpu=rate, windows=tuple(rates),
        notes="; ".join(note for note, holds in noted.items() if holds),
    )  # fmt: skip
