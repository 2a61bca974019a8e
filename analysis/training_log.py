"""Logs of DeepSpeed, open_clip, LAION-CLAP and programs like them → runs.

Lines of progress say by which time which step was done (`dialects.py`): the rate is all samples over all seconds after the
warm-up, whatever the log's length and how often it prints. The launcher's lines give nodes and ranks, the engine's printed
configuration batch sizes. A log, plain or gzip, is read once, line by line.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.analysis.dialects import DIALECTS, Dialect, facts_in
from clap_ds.analysis.record import BY_TIMER, HOST_ALONE, rate_fields
from clap_ds.analysis.table import Run, is_measurable
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular

MAX_WINDOWS = 96
"""Of one start; neighbours are taken together."""
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""
_TEXTS = ("directory", "model", "precision", "host_alone")
"""Kinds of lines that tell a word; others tell a count."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Start:
    """One start of the training program."""

    facts: dict[str, Any] = field(default_factory=dict)
    """What lines beside progress say, by their kinds in `dialects.py`."""
    dialect: Dialect | None = None
    state: str = "unknown"
    points: list[tuple[float, float]] = field(default_factory=list)
    """Of each line of progress how far the run is, in a number that only rises, and its average rate or seconds a step."""

    @property
    def is_broken_off(self) -> bool:
        return self.state not in ("unknown", "completed")

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.facts.get(name, 0) for name in ("nodes", "gpus", "micro_batch", "accumulation"))

    @property
    def global_batch(self) -> int:
        """0 where it isn't known."""
        of_parts = self.facts.get("micro_batch", 0) * self.facts.get("gpus", 0) * self.facts.get("accumulation", 1)
        return of_parts or self.facts.get("global_batch", 0)

    def note(self, kind: str, word: str) -> None:
        """Take in a line of the launcher or of the engine's configuration."""
        if kind in ("bf16", "fp16"):
            known = self.facts.get("precision", "fp32")
            self.facts["precision"] = kind if word == "True" and known == "fp32" else known
        elif kind == "torch_autocast":
            self.facts["precision"] = f"torch_autocast_{word}"
        elif kind in _TEXTS:
            self.facts[kind] = word
        elif int(word):
            self.facts[kind] = int(word)

    def windows(self, warmup_steps: int) -> tuple[list[float], list[float], float | None]:
        """Of at most `MAX_WINDOWS` stretches after the warm-up samples/s of all GPUs and seconds (in proportion to them where
        the global batch isn't known); and samples/s from the first timed step on."""
        if not (self.points and self.dialect and (self.global_batch or self.dialect.is_cumulative)):
            return [], [], None
        positions, values = np.array(self.points).T
        batch, untimed = self.global_batch or 1, self.dialect.untimed
        if self.dialect.is_cumulative:
            steps, times = positions, batch * (positions - untimed) / values
        else:
            steps = positions / batch if "samples" in self.dialect.pattern.groupindex else positions
            times = np.cumsum(np.diff(steps, prepend=0) * values)
        later = np.append(True, times[1:] > np.maximum.accumulate(times)[:-1])
        steps, times = steps[later], times[later]
        average = float(batch * (steps[-1] - untimed) / times[-1])
        begin = int(np.searchsorted(steps, max(warmup_steps, 1)))
        steps, times = steps[begin:], times[begin:]
        if len(steps) < 2:
            return [], [], average
        edges = [*range(0, len(steps) - 1, -(-(len(steps) - 1) // MAX_WINDOWS)), len(steps) - 1]
        window_s = np.diff(times[edges])
        return (batch * np.diff(steps[edges]) / window_s).tolist(), window_s.tolist(), average


class Scan:
    """What a log holds: the starts of the training program, in order."""

    def __init__(self) -> None:
        self.starts = [Start()]
        self.left_out = 0
        """Lines of progress that repeat others, or whose rate is cut or impossible."""
        self.is_empty = True
        self.is_damaged = False
        """The gzip file ends too early or is broken."""

    def read(self, line: str) -> None:
        self.is_empty = False
        for kind, word in facts_in(line):
            start = self.starts[-1]
            if kind in STATES:
                start.state = max(start.state, kind, key=STATES.index)
            else:  # after progress it can only be a new start's
                start = self._restart() if start.points or start.is_broken_off else start
                start.note(kind, word)
        for dialect in DIALECTS.values():
            if dialect.gate in line:
                self.left_out += line.count(dialect.gate)
                for numbers in dialect.numbers(line):
                    self._progress(dialect, numbers)

    def _restart(self) -> Start:
        """The next start, of the size of the one before until its own lines say otherwise."""
        own = ("precision", "directory", "memory_gib")
        self.starts.append(Start({name: fact for name, fact in self.starts[-1].facts.items() if name not in own}))
        return self.starts[-1]

    def _progress(self, dialect: Dialect, numbers: dict[str, float]) -> None:
        position = numbers["step"] if "step" in numbers else numbers["samples"]
        position += numbers.get("epoch", 0) * numbers.get("epoch_samples", 0)
        value = next(numbers[name] for name in ("average", "step_s", "step_ms") if name in numbers)
        value /= 1000 if "step_ms" in numbers else 1
        if not (position > dialect.untimed and is_measurable(value)):
            return
        start = self.starts[-1]
        furthest = start.points[-1][0] if start.points else 0.0
        if start.dialect not in (None, dialect) or position < furthest / 2:
            start, furthest = self._restart(), 0.0
        start.dialect = dialect
        if "global_batch" in numbers:
            start.facts["global_batch"] = int(numbers["global_batch"])
        memory = numbers.get("memory_gib", 0.0)
        if is_measurable(memory):
            start.facts["memory_gib"] = max(memory, start.facts.get("memory_gib", 0.0))
        if position > furthest:  # else it is another rank's line
            start.points.append((position, value))
            self.left_out -= 1


def scan_log(path: Path) -> Scan:
    """Read a log; UserError where it can't be read."""
    scan = Scan()
    try:
        for line in _lines(path, scan):
            scan.read(_ANSI.sub("", line) if "\x1b" in line else line)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    return scan


def _lines(path: Path, scan: Scan) -> Iterator[str]:
    """Of the file, decompressed; carriage returns end lines, too."""
    with open_regular(path) as file:
        raw = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        try:
            with io.TextIOWrapper(raw, "utf-8", "replace") as text:
                yield from text
        except (EOFError, zlib.error, gzip.BadGzipFile):
            scan.is_damaged = True


def read_log(path: Path, warmup_steps: int = 10, gpus: int = 0) -> list[Run]:
    """Runs of a log: one for each size (nodes, GPUs, batch) that measured something, restarts of the same size taken together;
    or one without a rate of a log that says how it failed.

    Where it doesn't say how many GPUs there are (`gpus` of the run is 0), rates and batch are of one of `gpus`, or of all.
    Raises UserError where the file can't be read, is empty or binary, or has no rate that is possible; says which.
    """
    scan = scan_log(path)
    found = [start for start in scan.starts if start.points] or [
        start for start in scan.starts[-1:] if start.is_broken_off
    ]
    if not found:
        none = f"no throughput lines that can be used, {scan.left_out} damaged or of an impossible rate"
        printed = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        raise UserError(f"{path}: {'empty file' if scan.is_empty else f'{none} ({printed})'}")
    groups: dict[object, list[Start]] = {}
    for start in found:
        groups.setdefault(start.size, []).append(start)
    return [_run(path, starts, scan, warmup_steps, gpus) for starts in groups.values()]


def _run(path: Path, starts: Sequence[Start], scan: Scan, warmup_steps: int, given_gpus: int) -> Run:
    last, facts = starts[-1], starts[-1].facts
    gpus, accumulation = facts.get("gpus") or given_gpus or 1, facts.get("accumulation", 1)
    measured = [start.windows(warmup_steps) for start in starts]
    rates = [rate / gpus for of_start, _, _ in measured for rate in of_start]
    window_s = [seconds for _, of_start, _ in measured for seconds in of_start]
    averages = [average / gpus for _, _, average in measured if average]
    fields = rate_fields(rates, window_s) or {"samples_per_s_per_gpu": averages[-1] if averages else None}
    rate = fields["samples_per_s_per_gpu"]
    by_timer = any(start.dialect and not start.dialect.counts_data_wait for start in starts)
    noted = {
        BY_TIMER: by_timer,
        HOST_ALONE: by_timer and "host_alone" in facts,
        "too short to drop the warm-up: the running average is given": averages and not rates,
        "no rate, as the log doesn't state its batch": not rate and last.points and not last.global_batch,
        f"{len(starts)} starts in the log": len(starts) > 1,
        f"{scan.left_out} throughput lines left out (repeated, damaged or impossible)": scan.left_out,
        "the gzip file is cut or damaged": scan.is_damaged,
    }
    micro_batch = facts.get("micro_batch") or last.global_batch // gpus // accumulation
    return Run(
        source=str(path), kind="log", state=last.state, model=facts.get("model", ""), precision=facts.get("precision", ""),
        directory=facts.get("directory", ""), nodes=facts.get("nodes", 0), gpus=facts.get("gpus", 0),
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        memory_peak_gib=max((start.facts.get("memory_gib", 0.0) for start in starts), default=0.0) or None,
        engine_samples_per_s_per_gpu=rate if by_timer else None, **fields,
        notes="; ".join(note for note, holds in noted.items() if holds),
    )  # fmt: skip
