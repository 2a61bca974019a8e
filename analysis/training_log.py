"""Read a run from a log of one of the programs in `log_formats.py`. After a restart, only the last
start counts.

The rate is total samples over total time after the warm-up, independent of the log's length and
printing interval.
"""

from __future__ import annotations

import errno
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from clap_ds.analysis.log_formats import DIALECTS, VALUES, Dialect, facts_in, title_in
from clap_ds.analysis.read_run import BY_TIMER
from clap_ds.analysis.table import COLUMNS, MOST, Run, find_encoding
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import LONGEST_LINE, MOST_BYTES, open_regular

WARMUP_STEPS = 10
COARSE = 0.005
"""A note states half of the last digit of rates and times if it exceeds this share of them."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""Later ones take precedence: an out-of-memory error also prints a traceback and a nonzero exit
code."""


@dataclass
class Progress:
    """What a program's progress lines state since the last start."""

    dialect: Dialect
    points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    """After each line: what is done, in steps or samples as its position, and the time in seconds,
    or in proportion to it."""
    roundings: list[float] = field(default_factory=list)
    epoch: float = 0.0
    position: float = 0.0
    """Of the last line, in its epoch."""
    elapsed_s: float = 0.0
    first_epoch: float = 0.0
    """Later than 0 if the log lacks earlier ones."""

    def begins_anew(self, numbers: Mapping[str, float]) -> bool:
        """Return whether the program has started again before this line."""
        if "elapsed" in numbers and "rate" in numbers:  # a summary of the whole run
            return True
        epoch, position = self._find_place(numbers)
        if epoch != self.epoch or numbers.get("elapsed", math.inf) < self.elapsed_s:
            return epoch <= self.epoch
        # Lines of slower ranks come up to two intervals late.
        interval = self.points[-1][0] - self.points[-2:][0][0]
        return position < max(self.position / 2, self.position - 2 * interval)

    def add(self, numbers: Mapping[str, float]) -> bool:
        """Add the numbers of a line. Return whether it adds to what is done; otherwise it is
        damaged or from another rank."""
        epoch, position = self._find_place(numbers)
        value_name = next(name for name in VALUES if name in numbers)
        value = numbers[value_name]
        if not (position > self.dialect.untimed and 0 < value < MOST):
            return False
        if epoch > self.epoch:  # no line counts samples that the last epoch dropped
            self.position = 0.0
            self.elapsed_s = 0.0
        if not self.roundings:
            self.first_epoch = epoch
        gained = position - self.position
        done, done_s = self.points[-1]
        if value_name == "average":
            time_s = (position - self.dialect.untimed) / value
        elif value_name == "elapsed":
            time_s = done_s + value - self.elapsed_s
        elif value_name == "step_s":
            time_s = done_s + gained * value / numbers.get("global_batch", 1.0)
        else:
            time_s = done_s + gained / value
        if gained <= 0 or time_s <= done_s:
            return False
        self.points.append((done + gained, time_s))
        self.roundings.append(numbers["rounding"])
        self.epoch = epoch
        self.position = position
        self.elapsed_s = numbers.get("elapsed", 0.0)
        return True

    def _find_place(self, numbers: Mapping[str, float]) -> tuple[float, float]:
        """Return a line's epoch and its position there."""
        position = numbers.get("step", numbers.get("samples", self.position + 1))
        return numbers.get("epoch", 0.0), position

    def rate(self, warmup: float) -> tuple[float, bool]:
        """Return what is done per second after the warm-up and True, or if all is warm-up the
          running average and False.

        A log that begins late, such as a resumed run's, is warm at the line nearest to `warmup`
          after its first.
        """
        first, *others = self.points[1:]
        start: tuple[float, float] = (self.dialect.untimed, 0.0)
        warm = next((point for point in self.points if point[0] >= warmup), self.points[-1])
        # A log from the start has its first line after about one interval, or before the warm-up's
        # end.
        if others and (self.first_epoch or first[0] > max(2 * (others[0][0] - first[0]), warmup)):
            start = first
            warm = min(self.points, key=lambda point: abs(point[0] - first[0] - warmup))
        last, last_s = self.points[-1]
        is_warm = warm[0] < last
        done, done_s = warm if is_warm else start
        return (last - done) / (last_s - done_s), is_warm


@dataclass
class Log:
    given_gpus: int = 0
    given_batch: int = 0
    """Samples per step and GPU; like `given_gpus` for a log that doesn't state it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts from lines other than progress, by their kinds in `log_formats.py`; later ones replace
    earlier ones."""
    state: str = "unknown"
    progress: dict[str, Progress] = field(default_factory=dict)
    """By program: a log may have the lines of two, such as Megatron's and DeepSpeed's."""

    @property
    def stated_gpus(self) -> int:
        """The number of GPUs, or 0. Replicas are all GPUs, unless another line states more."""
        of_nodes = self.facts.get("nodes", 0) * self.facts.get("gpus_per_node", 0)
        return self.facts.get("gpus") or of_nodes or self.facts.get("replicas", 0)

    @property
    def gpus(self) -> int:
        return self.stated_gpus or self.given_gpus or 1

    @property
    def global_batch(self) -> int:
        replicas = self.facts.get("replicas") or self.gpus
        of_parts = self.facts.get("micro_batch", 0) * replicas * self.facts.get("accumulation", 1)
        return of_parts or self.facts.get("global_batch") or self.given_batch * self.gpus

    def read(self, line: str) -> None:
        line = _COLORS.sub("", line)
        for kind, word in title_in(line).items():
            self.facts[kind] = int(word) if word.isdigit() else word
        for kind, word in facts_in(line):
            if kind in STATES:
                self.state = max(self.state, kind, key=STATES.index)
            else:  # printed at a start
                self.facts[kind] = int(word) if word.isdigit() else word
                self.state = "unknown"
                self.progress.clear()
        for program, dialect in DIALECTS.items():
            for numbers in dialect.numbers(line):
                progress = self.progress.setdefault(program, Progress(dialect))
                if progress.begins_anew(numbers):
                    self.state = "unknown"
                    progress = self.progress[program] = Progress(dialect)
                if progress.add(numbers):
                    self._add_facts(numbers)

    def _add_facts(self, numbers: Mapping[str, float]) -> None:
        self.facts["memory_gib"] = max(
            numbers.get("memory_gib", 0.0), self.facts.get("memory_gib", 0.0)
        )
        self.facts |= {
            name: int(numbers[name]) for name in ("global_batch", "gpus") if name in numbers
        }

    def compute_rate(self, progress: Progress) -> tuple[float | None, bool]:
        """Return samples/s/GPU, None if the log lacks what it depends on, and whether it excludes
        the warm-up."""
        dialect = progress.dialect
        batch = self.global_batch
        warmup = WARMUP_STEPS * batch if dialect.states("samples") else WARMUP_STEPS
        rate, is_warm = progress.rate(warmup)
        if dialect.states("gpu_tokens"):
            length = self.facts.get("sequence_length")
            return length and rate / length, is_warm
        if not dialect.states("average", "rate", "global_batch"):
            rate *= batch
        return rate / self.gpus or None, is_warm


def read_log_lines(path: Path) -> Iterator[str]:
    """Yield a log's lines, cut after `LONGEST_LINE` characters; "\\r" ends lines, too. Raises
    OSError, also for a file that isn't text: one with a line of more than `MOST_BYTES`
    characters."""
    length = 0
    with (
        open_regular(path) as file,
        io.TextIOWrapper(file, find_encoding(file.peek(2)), "replace") as text,
    ):
        while piece := text.readline(LONGEST_LINE):
            if length == 0:
                yield piece
            length = 0 if piece.endswith("\n") else length + len(piece)
            if length > MOST_BYTES:
                raise OSError(
                    errno.EFBIG, f"a line has more than {MOST_BYTES:,} characters", str(path)
                )


def read_log(path: Path, given_gpus: int = 0, given_batch: int = 0) -> Run:
    """Read a log. UserError if there is neither a rate nor a failure.

    `given_gpus`, `given_batch`: number of GPUs, and samples per step and GPU, if the log doesn't
    state them.
    """
    log = Log(given_gpus, given_batch)
    try:
        for line in read_log_lines(path):
            log.read(line)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    measured = [progress for progress in log.progress.values() if progress.roundings]
    if not measured and STATES.index(log.state) < 2:
        hint = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        others = f"give results of other programs as a .csv table with the columns {', '.join(COLUMNS[:3])}"
        raise UserError(
            f"{path}: no usable throughput lines of {', '.join(DIALECTS)} ({hint}); {others}"
        )
    # Of two programs, prefer one with more than a summary, then one whose times include the wait
    # for data.
    measured.sort(
        key=lambda progress: (len(progress.roundings) > 1, progress.dialect.counts_data_wait),
        reverse=True,
    )
    by_timer = [progress for progress in measured if not progress.dialect.counts_data_wait]
    rate = log.compute_rate(measured[0])[0] if measured else None
    rate_by_timer = log.compute_rate(by_timer[0])[0] if by_timer else None
    facts = log.facts
    if measured:
        facts["rounding"] = median(measured[0].roundings)
    names = ("model", "precision", "directory", "nodes", "device", "context_length", "rounding")
    return Run(
        source=str(path), kind="log", state=log.state, **{name: facts[name] for name in names if name in facts},
        gpus=log.stated_gpus, batch_per_gpu=log.global_batch // log.gpus or None,
        micro_batch=facts.get("micro_batch"), accumulation=facts.get("accumulation", 1),
        memory_peak_gib=facts.get("memory_gib") or None, samples_per_s_per_gpu=rate,
        deepspeed_samples_per_s_per_gpu=rate_by_timer,
        notes="; ".join(note for progress in measured[:1] for note in _describe(log, progress)),
    )  # fmt: skip


def _describe(log: Log, progress: Progress) -> Iterator[str]:
    """Yield notes about a rate."""
    dialect = progress.dialect
    rate, is_warm = log.compute_rate(progress)
    if not dialect.counts_data_wait:
        # This project's timer runs from step to step.
        yield (
            BY_TIMER
            if "directory" in log.facts
            else f"{BY_TIMER}, which excludes data loading and time between steps"
        )
    if not rate:
        yield "no rate, because the log lacks its batch (pass --batch_per_gpu) or, of torchtitan, its sequence length"
    elif not is_warm:
        yield "too short to drop the warm-up, or only a summary: using the average of all steps"
    if log.facts["rounding"] > COARSE:
        yield f"the log rounds its times or rates: ±{100 * log.facts['rounding']:.1f}%"
