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
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from clap_ds.analysis.log_formats import (
    LOG_FORMATS,
    SPEEDS,
    LogFormat,
    find_facts,
    find_title,
)
from clap_ds.analysis.table import BY_TIMER, COLUMNS, MAX_VALUE, Run, find_encoding
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import LONGEST_LINE, MOST_BYTES, open_regular

WARMUP_STEPS = 10
# A note states half of the last digit of rates and times if it exceeds this fraction of them.
COARSE = 0.005
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# Later ones take precedence: an out-of-memory error also prints a traceback and a nonzero exit
# code.
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")


@dataclass
class Progress:
    """What a program's progress lines state since the last start."""

    log_format: LogFormat
    # After each line: what is done, in steps or samples as its position, and the time in seconds,
    # or in proportion to it.
    points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    roundings: list[float] = field(default_factory=list)
    epoch: float = 0.0
    # Of the last line, in its epoch.
    position: float = 0.0
    elapsed_s: float = 0.0
    # Later than 0 if the log lacks earlier ones.
    first_epoch: float = 0.0

    def is_restart(self, numbers: Mapping[str, float]) -> bool:
        """Return whether the program has started again before this line."""
        # A summary of the whole run.
        if "elapsed" in numbers and "rate" in numbers:
            return True
        epoch, position = self._locate(numbers)
        if epoch != self.epoch or numbers.get("elapsed", math.inf) < self.elapsed_s:
            return epoch <= self.epoch
        # Lines of slower ranks come up to two intervals late.
        interval = 0.0
        if len(self.points) > 1:
            interval = self.points[-1][0] - self.points[-2][0]
        return position < max(self.position / 2, self.position - 2 * interval)

    def add(self, numbers: Mapping[str, float]) -> bool:
        """Add the numbers of a line. Return whether it adds to what is done; otherwise it is
        damaged or from another rank."""
        epoch, position = self._locate(numbers)
        speed = next(name for name in SPEEDS if name in numbers)
        value = numbers[speed]
        if not (position > self.log_format.untimed and 0 < value < MAX_VALUE):
            return False
        # No line counts samples that the last epoch dropped.
        if epoch > self.epoch:
            self.position = 0.0
            self.elapsed_s = 0.0
        if not self.roundings:
            self.first_epoch = epoch
        gained = position - self.position
        done, done_s = self.points[-1]
        if speed == "average":
            time_s = (position - self.log_format.untimed) / value
        elif speed == "elapsed":
            time_s = done_s + value - self.elapsed_s
        elif speed == "step_s":
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

    def _locate(self, numbers: Mapping[str, float]) -> tuple[float, float]:
        """Return a line's epoch and its position there."""
        next_step = self.position + 1
        position = numbers.get("step", numbers.get("samples", next_step))
        return numbers.get("epoch", 0.0), position

    def rate(self, warmup: float) -> tuple[float, bool]:
        """Return what is done per second after the warm-up and True, or if all is warm-up the
        running average and False.

        A log that begins late, such as a resumed run's, is warm at the line nearest to `warmup`
        after its first.
        """
        last, last_s = self.points[-1]
        start: tuple[float, float] = (self.log_format.untimed, 0.0)
        warm = next((point for point in self.points if point[0] >= warmup), self.points[-1])
        if self._begins_late(warmup):
            start = self.points[1]
            warm = min(self.points, key=lambda point: abs(point[0] - start[0] - warmup))
        is_warm = warm[0] < last
        done, done_s = warm if is_warm else start
        return (last - done) / (last_s - done_s), is_warm

    def _begins_late(self, warmup: float) -> bool:
        if len(self.points) < 3:
            return False
        # A log from the start has its first line after about one interval, or before the warm-up's
        # end.
        first = self.points[1][0]
        interval = self.points[2][0] - first
        return self.first_epoch > 0 or first > max(2 * interval, warmup)


@dataclass
class Log:
    """What a log states, line by line."""

    # The number of GPUs of a log that doesn't state it.
    default_gpus: int = 0
    # Samples per step and GPU of a log that doesn't state its batch.
    default_batch: int = 0
    # Facts from lines other than progress, by their kinds in `log_formats.py`; later ones replace
    # earlier ones.
    facts: dict[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    # By program: a log may have the lines of two, such as Megatron's and DeepSpeed's.
    progress: dict[str, Progress] = field(default_factory=dict)

    @property
    def stated_gpus(self) -> int:
        """The number of GPUs, or 0. Replicas are all GPUs, unless another line states more."""
        of_nodes = self.facts.get("nodes", 0) * self.facts.get("gpus_per_node", 0)
        return self.facts.get("gpus") or of_nodes or self.facts.get("replicas", 0)

    @property
    def gpus(self) -> int:
        return self.stated_gpus or self.default_gpus or 1

    @property
    def global_batch(self) -> int:
        replicas = self.facts.get("replicas") or self.gpus
        batch = self.facts.get("micro_batch", 0) * self.facts.get("accumulation", 1)
        if batch:
            return batch * replicas
        return self.facts.get("global_batch") or self.default_batch * self.gpus

    def read(self, line: str) -> None:
        line = _COLORS.sub("", line)
        for kind, text in find_title(line).items():
            self._set_fact(kind, text)
        for kind, text in find_facts(line):
            if kind in STATES:
                self.state = max(self.state, kind, key=STATES.index)
            else:
                # Programs print these at a start.
                self._set_fact(kind, text)
                self.state = "unknown"
                self.progress.clear()
        for program, log_format in LOG_FORMATS.items():
            for numbers in log_format.numbers(line):
                self._add_progress(program, log_format, numbers)

    def _set_fact(self, kind: str, text: str) -> None:
        self.facts[kind] = int(text) if text.isdigit() else text

    def _add_progress(
        self, program: str, log_format: LogFormat, numbers: Mapping[str, float]
    ) -> None:
        progress = self.progress.setdefault(program, Progress(log_format))
        if progress.is_restart(numbers):
            self.state = "unknown"
            progress = Progress(log_format)
            self.progress[program] = progress
        if not progress.add(numbers):
            return
        memory_gib = max(numbers.get("memory_gib", 0.0), self.facts.get("memory_gib", 0.0))
        self.facts["memory_gib"] = memory_gib
        for name in ("global_batch", "gpus"):
            if name in numbers:
                self.facts[name] = int(numbers[name])

    def compute_rate(self, progress: Progress) -> tuple[float | None, bool]:
        """Return samples/s/GPU, None if the log lacks what it depends on, and whether it excludes
        the warm-up."""
        log_format = progress.log_format
        warmup = WARMUP_STEPS
        if log_format.states("samples"):
            warmup *= self.global_batch
        rate, is_warm = progress.rate(warmup)
        if log_format.states("gpu_tokens"):
            length = self.facts.get("sequence_length")
            return rate / length if length else None, is_warm
        # The rate is in steps/s, unless lines state samples.
        if not log_format.states("average", "rate", "global_batch"):
            rate *= self.global_batch
        return rate / self.gpus or None, is_warm


def read_log_lines(path: Path) -> Iterator[str]:
    """Yield a log's lines, cut after `LONGEST_LINE` characters; "\\r" ends lines, too.

    Raises OSError, also for a file that isn't text: one with a line of more than `MOST_BYTES`
    characters.
    """
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
                problem = f"a line has more than {MOST_BYTES:,} characters"
                raise OSError(errno.EFBIG, problem, str(path))


def read_log(path: Path, default_gpus: int = 0, default_batch: int = 0) -> Run:
    """Read a log. UserError if there is neither a rate nor a failure.

    `default_gpus`, `default_batch`: number of GPUs, and samples per step and GPU, if the log
    doesn't state them.
    """
    log = Log(default_gpus, default_batch)
    try:
        for line in read_log_lines(path):
            log.read(line)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    measured = [progress for progress in log.progress.values() if progress.roundings]
    if not measured and log.state in ("unknown", "completed"):
        programs = ", ".join(LOG_FORMATS)
        hint = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        columns = ", ".join(COLUMNS[:3])
        alternative = f"give results of other programs as a .csv table with the columns {columns}"
        raise UserError(f"{path}: no usable throughput lines of {programs} ({hint}); {alternative}")
    facts = log.facts
    names = ("model", "precision", "directory", "nodes", "device", "context_length")
    run = Run(
        **{name: facts[name] for name in names if name in facts},
        source=str(path),
        kind="log",
        state=log.state,
        gpus=log.stated_gpus,
        batch_per_gpu=log.global_batch // log.gpus or None,
        micro_batch=facts.get("micro_batch"),
        accumulation=facts.get("accumulation", 1),
        memory_peak_gib=facts.get("memory_gib") or None,
    )
    return _add_rates(run, log, measured) if measured else run


def _add_rates(run: Run, log: Log, measured: list[Progress]) -> Run:
    # Of two programs, prefer one with more than a summary, then one whose times include the wait
    # for data.
    progress = max(
        measured,
        key=lambda progress: (len(progress.roundings) > 1, progress.log_format.counts_data_wait),
    )
    # DeepSpeed's lines may stand beside another program's.
    deepspeed_rate = None
    for candidate in measured:
        if not candidate.log_format.counts_data_wait:
            deepspeed_rate, _ = log.compute_rate(candidate)
    rate, is_warm = log.compute_rate(progress)
    rounding = median(progress.roundings)
    return replace(
        run,
        samples_per_s_per_gpu=rate,
        deepspeed_samples_per_s_per_gpu=deepspeed_rate,
        rounding=rounding,
        notes="; ".join(_list_notes(log, progress, rate, is_warm, rounding)),
    )


def _list_notes(
    log: Log, progress: Progress, rate: float | None, is_warm: bool, rounding: float
) -> Iterator[str]:
    """Yield notes about a rate."""
    if not progress.log_format.counts_data_wait:
        # This project's timer runs from step to step.
        is_complete = "directory" in log.facts
        excluded = "" if is_complete else ", which excludes data loading and time between steps"
        yield f"{BY_TIMER}{excluded}"
    if not rate:
        yield (
            "no rate, because the log lacks its batch (pass --batch_per_gpu)"
            " or, of torchtitan, its sequence length"
        )
    elif not is_warm:
        yield "too short to drop the warm-up, or only a summary: using the average of all steps"
    if rounding > COARSE:
        yield f"the log rounds its times or rates: ±{100 * rounding:.1f}%"
