"""Read a run from a log of DeepSpeed, open_clip, LAION-CLAP and similar programs. After a restart, only the last start counts.

The rate is total samples over total time after the warm-up, independent of the log's length and printing interval.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.analysis.log_formats import DIALECTS, Dialect, facts_in, title_in
from clap_ds.analysis.read_run import BY_TIMER
from clap_ds.analysis.table import MOST, Run
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular

WARMUP_STEPS = 10
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""Later ones take precedence: an out-of-memory error also prints a traceback and a nonzero exit code."""


@dataclass
class Log:
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts from lines other than progress, by their kinds in `log_formats.py`; later ones replace earlier ones."""
    dialect: Dialect | None = None
    state: str = "unknown"
    points: list[tuple[float, float]] = field(default_factory=list)
    """For each progress line: samples done, or steps if the batch is unknown, and seconds (then in proportion)."""

    @property
    def global_batch(self) -> int:
        of_parts = self.facts.get("micro_batch", 0) * self.facts.get("gpus", 0) * self.facts.get("accumulation", 1)
        return of_parts or self.facts.get("global_batch", 0)

    def read(self, line: str) -> None:
        line = _COLORS.sub("", line)
        for kind, word in title_in(line).items():
            self.facts[kind] = int(word) if word.isdigit() else word
        for kind, word in facts_in(line):
            if kind in STATES:
                self.state = max(self.state, kind, key=STATES.index)
            else:  # printed at a start
                self.facts[kind] = int(word) if word.isdigit() else word
                self._start()
        for dialect in DIALECTS.values():
            for numbers in dialect.numbers(line):
                self._progress(dialect, numbers)

    def _start(self) -> None:
        self.state, self.points = "unknown", []

    def _progress(self, dialect: Dialect, numbers: dict[str, float]) -> None:
        position = numbers["step"] if "step" in numbers else numbers["samples"]
        position += numbers.get("epoch", 0) * numbers.get("epoch_samples", 0)
        value = next(numbers[name] for name in ("average", "rate", "step_s", "step_ms") if name in numbers)
        value /= 1000 if "step_ms" in numbers else 1
        if not (position > dialect.untimed and 0 < value < MOST):
            return
        self.dialect = dialect
        self.facts["memory_gib"] = max(numbers.get("memory_gib", 0.0), self.facts.get("memory_gib", 0.0))
        self.facts |= {name: int(numbers[name]) for name in ("global_batch", "gpus") if name in numbers}
        batch = self.global_batch or 1
        samples = position * batch if "step" in numbers else position
        if self.points and samples < self.points[-1][0] / 2:
            self._start()
        before, before_s = self.points[-1] if self.points else (0.0, 0.0)
        timed = samples - batch * dialect.untimed
        since_s = (samples - before) / value if "rate" in numbers else (samples - before) / batch * value
        time_s = timed / value if dialect.is_cumulative else before_s + since_s
        if samples > before and time_s > before_s:  # else the line is from another rank
            self.points.append((samples, time_s))

    def rate(self) -> tuple[float | None, bool]:
        """Return samples/s after the warm-up and True, or if all is warm-up the running average and False."""
        batch, dialect = self.global_batch, self.dialect
        if not (self.points and dialect and (batch or dialect.states_rate)):
            return None, False
        batch, (last, last_s) = batch or 1, self.points[-1]
        first, first_s = next((point for point in self.points if point[0] >= WARMUP_STEPS * batch), (last, last_s))
        if last > first:
            return (last - first) / (last_s - first_s), True
        return (last - dialect.untimed * batch) / last_s, False


def read_log(path: Path, given_gpus: int = 0) -> Run:
    """Read a log. `given_gpus`: number of GPUs if the log doesn't state it. UserError if there is neither a rate nor a
    failure."""
    log = Log()
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, "utf-8", "replace") as text:  # "\r" ends lines, too
            for line in text:
                log.read(line)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    facts, batch = log.facts, log.global_batch
    if not log.points and STATES.index(log.state) < 2:
        printed = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        kinds = f"a log of {', '.join(DIALECTS)}, a run directory, or a table whose name ends with .csv"
        raise UserError(f"{path}: no usable throughput lines; expected {kinds} ({printed})")
    gpus, accumulation = facts.get("gpus") or given_gpus or 1, facts.get("accumulation", 1)
    total, is_warm = log.rate()
    rate = total and total / gpus
    by_timer = bool(log.dialect and not log.dialect.counts_data_wait)
    # This project's timer runs from step to step.
    of_timer = BY_TIMER if "directory" in facts else f"{BY_TIMER}, which excludes data loading and time between steps"
    noted = {
        of_timer: by_timer,
        "too short to drop the warm-up: using the running average": rate and not is_warm,
        "no rate, because the log doesn't state its batch": log.points and not rate,
    }
    micro_batch = facts.get("micro_batch") or batch // gpus // accumulation
    names = ("model", "precision", "directory", "nodes", "gpus", "device", "context_length")
    return Run(
        source=str(path), kind="log", state=log.state, **{name: facts[name] for name in names if name in facts},
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        memory_peak_gib=facts.get("memory_gib") or None, deepspeed_samples_per_s_per_gpu=rate if by_timer else None,
        samples_per_s_per_gpu=rate, notes="; ".join(note for note, holds in noted.items() if holds),
    )  # fmt: skip
