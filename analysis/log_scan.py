"""A log of any size, in the state that real logs are in → what each start of the training program in it tells of itself.

The file (plain, gzip or UTF-16) is read once, in blocks that end where lines do; two numbers are kept of each line of progress.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clap_ds.analysis.dialects import DIALECTS, Dialect, Numbers, find_breakdown, find_lines, label_of
from clap_ds.analysis.table import LEAST, MOST
from clap_ds.config.errors import UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 10
"""A line (or progress bar without line ends) longer than this may be cut between blocks."""
MAX_WINDOWS = 96
"""Of one start; neighbours are taken together."""
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""
_ANNOUNCED = ("directory", "engine")
_BENCH_TITLE = ("model", "gpus", "device", "nodes", "precision", "micro_batch", "text_tokens")
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Windows(NamedTuple):
    """Stretches of a log without the warm-up, at most `MAX_WINDOWS`."""

    rates: tuple[float, ...] = ()
    """Samples/s of all GPUs."""
    window_s: tuple[float, ...] = ()
    """Seconds each lasted; for each sample of a global batch where that isn't known."""
    step_s: float | None = None
    """Median step, in the same unit, where every step was printed."""
    average: float | None = None
    """Samples/s from the first timed step on: what a log too short for windows still says."""


@dataclass
class LogStart:
    """One start of the training program."""

    facts: dict[str, Any] = field(default_factory=dict)
    """What lines of the launcher, the engine and open_clip say, by their kinds in `dialects.py`."""
    state: str = "unknown"
    label: bytes | None = None
    """Of the rank or host whose progress is read."""
    dialect: Dialect | None = None
    positions: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """What `Dialect.points` makes of each line."""
    interval: float = float("inf")
    """Least distance of two positions."""
    max_memory_gib: float = 0.0
    breakdown_ms: Numbers = field(default_factory=lambda: np.zeros(4))
    """Of `wall_clock_breakdown` (forward, backward, all-reduce, optimiser), sums over `breakdown_steps` after the warm-up."""
    breakdown_lines: int = 0
    breakdown_steps: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    """Of the benchmark's final table."""
    title: dict[str, Any] = field(default_factory=dict)
    """What stands over it, by `_BENCH_TITLE`."""

    @property
    def is_bench(self) -> bool:
        """Whether the benchmark's table was printed; others in the same log (of an evaluation) have no rate."""
        return any(name.startswith("samples/s/") for name in self.figures)

    @property
    def measured(self) -> bool:
        return bool(self.positions) or self.is_bench

    @property
    def announced(self) -> bool:
        """The engine printed its configuration, or the benchmark its directory, as they do at each start."""
        return any(name in self.facts for name in _ANNOUNCED)

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

    def end_as(self, state: str) -> None:
        self.state = max(self.state, state, key=STATES.index)

    def add_breakdown(self, steps_ms: Numbers, warmup_steps: int) -> None:
        timed = steps_ms[max(warmup_steps - self.breakdown_lines, 0) :]
        self.breakdown_ms += timed.sum(axis=0)
        self.breakdown_lines += len(steps_ms)
        self.breakdown_steps += len(timed)

    def windows(self, warmup_steps: int) -> Windows:
        if not (self.dialect and self.positions):
            return Windows()
        points = np.array(self.positions), np.array(self.values)
        steps, times, batch = self.dialect.curve(*points, self.global_batch)
        if batch:
            self.facts["global_batch"] = round(batch)
        keep = _in_order(times)
        steps, times = steps[keep], times[keep]
        if not len(steps):
            return Windows()
        average = float((steps[-1] - self.dialect.untimed) / times[-1])
        begin = int(np.searchsorted(steps, max(warmup_steps, 1)))
        steps, times = steps[begin:], times[begin:]
        if len(steps) < 2:
            return Windows(average=average)
        edges = [*range(0, len(steps) - 1, -(-(len(steps) - 1) // MAX_WINDOWS)), len(steps) - 1]
        seconds = np.diff(times[edges])
        rates, window_s = np.diff(steps[edges]) / seconds, seconds * (batch or 1)
        possible = (rates >= LEAST) & (rates <= MOST)
        single = np.diff(steps) == 1
        step_s = float(np.median(np.diff(times)[single])) * (batch or 1) if 2 * single.sum() > len(single) else None
        return Windows(tuple(rates[possible].tolist()), tuple(window_s[possible].tolist()), step_s, average)


def _in_order(times: Numbers) -> NDArray[np.bool_]:
    """Which are later than all before them; first without each that isn't between its neighbours, where those are in order."""
    keep = np.isfinite(times)
    before, at, after = times[:-2], times[1:-1], times[2:]
    keep[1:-1] &= (before >= after) | ((before < at) & (at < after))
    latest = np.maximum.accumulate(np.where(keep, times, -np.inf))
    keep[1:] &= times[1:] > latest[:-1]
    return keep


def _number_in(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


class Scan:
    """What a log holds: the starts of the training program, in order."""

    def __init__(self, warmup_steps: int = 10) -> None:
        self.warmup_steps = warmup_steps
        self.starts = [LogStart()]
        self.left_out = 0
        """Lines of an impossible rate, of a step already seen (another rank's, or out of order), cut or overwritten."""
        self.num_bytes = 0
        self.truncated_gzip = False

    def read(self, block: bytes) -> None:
        """Take in the lines of a block, in the order they stand."""
        block = _ANSI.sub(b"", block) if b"\x1b" in block else block
        begin = 0
        for where, kind, match in find_lines(block):
            self._progress(block[begin:where])
            self._line(kind, match)
            begin = where
        self._progress(block[begin:])

    def _restart(self) -> LogStart:
        """The next start, of the size of the one before until its own lines say otherwise."""
        facts = {name: fact for name, fact in self.starts[-1].facts.items() if name not in _ANNOUNCED}
        self.starts.append(LogStart(facts))
        return self.starts[-1]

    def _line(self, kind: str, match: re.Match[bytes]) -> None:
        groups = [text.decode(errors="replace") for text in match.groups()]
        if kind in STATES:
            self.starts[-1].end_as(kind)
        elif kind == "bench_title":
            start = self.starts[-1] if not self.starts[-1].title else self._restart()
            before = match.string[max(0, match.start() - 100) : match.start()].decode(errors="replace")
            model = re.split(r"[^\w.-]", before)[-1]  # without a label that may stand before it
            start.title = {name: _number_in(word) for name, word in zip(_BENCH_TITLE, [model, *groups], strict=True)}
        elif kind == "bench_figure":
            self.starts[-1].figures[groups[0]] = groups[1]
            self.starts[-1].end_as("completed" if self.starts[-1].is_bench else "unknown")
        else:
            self._launch_line(kind, groups[0])

    def _launch_line(self, kind: str, word: str) -> None:
        """A line of the launcher or of the engine's configuration; after progress it can only be a new start's."""
        start = self.starts[-1]
        if start.measured or start.is_broken_off:
            start = self._restart()
        if kind in _ANNOUNCED:
            start.facts.pop("precision", "")
        if kind in ("bf16", "fp16"):
            known = start.facts.get("precision", "fp32")
            start.facts["precision"] = kind if word == "True" and known == "fp32" else known
        elif kind == "torch_autocast":
            start.facts["precision"] = f"torch_autocast_{word}"
        elif word != "0":
            start.facts[kind] = _number_in(word)

    def _progress(self, block: bytes) -> None:
        """Take in what lies between two other lines."""
        start = self.starts[-1]
        if breakdown := find_breakdown(block):
            start.add_breakdown(np.array(breakdown, float), self.warmup_steps)
        for dialect in DIALECTS.values():
            if dialect.gate in block and (first := dialect.pattern.search(block)):
                break
        else:
            return
        if start.dialect not in (None, dialect):
            start = self._restart()
        start.dialect = dialect
        if start.label is None:
            start.label = label_of(first)
        if start.label:
            matches = dialect.pattern.finditer(block, first.start())
            lines = [match.groups(b"") for match in matches if label_of(match) in (None, start.label)]
        else:
            lines = dialect.pattern.findall(block, first.start())
        self.left_out += block.count(dialect.gate) - len(lines)
        if lines:
            self._points(start, dialect, dialect.columns(lines))

    def _points(self, start: LogStart, dialect: Dialect, columns: dict[str, Numbers]) -> None:
        start.facts = dialect.facts(columns) | start.facts
        memory = columns.get("memory_gb", np.zeros(1))
        start.max_memory_gib = float(np.fmax.reduce(memory, initial=start.max_memory_gib))
        positions, values = dialect.points(columns)
        possible = (positions > dialect.untimed) & (values >= LEAST) & (values <= MOST)
        self.left_out += int((~possible).sum())
        positions, values = positions[possible], values[possible]
        while len(positions):
            highest = np.maximum.accumulate(np.append([*start.positions[-1:], 0][:1], positions))[:-1]
            ahead = positions - highest
            start.interval = float(ahead[ahead > 0].min(initial=start.interval))
            back = np.flatnonzero((ahead < -2 * start.interval) & (not start.announced))
            until = int(back[0]) if len(back) else len(positions)
            new = ahead[:until] > 0
            start.positions.frombytes(positions[:until][new].tobytes())
            start.values.frombytes(values[:until][new].tobytes())
            self.left_out += int((~new).sum())
            positions, values = positions[until:], values[until:]
            if len(positions):
                label, start = start.label, self._restart()
                start.dialect, start.label = dialect, label


def scan_log(path: Path, warmup_steps: int = 10) -> Scan:
    """Read a log; UserError where it can't be read."""
    scan = Scan(warmup_steps)
    try:
        with path.open("rb") as file:
            for block in _blocks(file, scan):
                scan.read(block)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    return scan


def _blocks(file: io.BufferedReader, scan: Scan) -> Iterator[bytes]:
    """Pieces of the file, decompressed and in UTF-8, that end at a line's end, carriage returns counted as one."""
    read: Callable[[int], bytes] = file.read
    head, rest = file.peek(2)[:2], bytearray()
    if head == b"\x1f\x8b":
        read = gzip.GzipFile(fileobj=file).read1  # in small pieces, so that all before a damaged end is kept
    elif head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # what PowerShell's > writes
        read = codecs.EncodedFile(file, "utf-8", "utf-16", errors="replace").read
    ended = False
    while not ended:
        try:
            piece = read(BLOCK_BYTES)
            rest += piece
            ended = not piece
        except (EOFError, zlib.error, gzip.BadGzipFile):
            scan.truncated_gzip = ended = True
        if len(rest) >= BLOCK_BYTES or ended:
            end = max(rest.rfind(b"\n") + 1, rest.rfind(b"\r") + 1, len(rest) - LONGEST_LINE)
            end = len(rest) if ended else end
            scan.num_bytes += end
            yield bytes(rest[:end])
            del rest[:end]
