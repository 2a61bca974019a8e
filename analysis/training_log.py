"""Logs of DeepSpeed, open_clip, LAION-CLAP and programs like them → runs.

Lines of progress say by which time which step was done (`dialects.py`): the rate is all samples over all seconds after the
warm-up, whatever the log's length and how often it prints. The launcher's lines give nodes and ranks, the engine's printed
configuration batch sizes. A log of any size (plain, gzip or UTF-16) is read once, in blocks that end where lines do; two
numbers are kept of each line of progress.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.analysis.dialects import DIALECTS, Dialect, Numbers, find_lines
from clap_ds.analysis.record import HOST_ALONE, rate_fields
from clap_ds.analysis.table import LEAST, MOST, Run
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 10
"""A line (or progress bar without line ends) longer than this may be cut between blocks."""
MAX_WINDOWS = 96
"""Of one start; neighbours are taken together."""
STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""
_TEXTS = ("directory", "model", "precision", "host_alone")
"""Kinds of lines that tell a word; others tell a count."""
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Start:
    """One start of the training program."""

    facts: dict[str, Any] = field(default_factory=dict)
    """What lines beside progress say, by their kinds in `dialects.py`."""
    dialect: Dialect | None = None
    state: str = "unknown"
    positions: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """What `Dialect.points` makes of each line that is possible."""

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

    def pieces(self) -> list[tuple[Numbers, Numbers]]:
        """Its points in order, without those of a step already seen (another rank's); a piece more where they fall far back,
        to a start of which only these lines are there."""
        positions, values, found = np.array(self.positions), np.array(self.values), []
        while len(positions):
            highest = np.maximum.accumulate(np.append(0, positions))[:-1]
            back = np.flatnonzero(positions < highest / 2)
            until = int(back[0]) if len(back) else len(positions)
            new = positions[:until] > highest[:until]
            found.append((positions[:until][new], values[:until][new]))
            positions, values = positions[until:], values[until:]
        return found

    def windows(
        self, points: tuple[Numbers, Numbers], warmup_steps: int
    ) -> tuple[list[float], list[float], float | None]:
        """Of at most `MAX_WINDOWS` stretches after the warm-up samples/s of all GPUs and seconds (in proportion to them where
        the global batch isn't known); and samples/s from the first timed step on."""
        if not (self.dialect and (self.global_batch or self.dialect.is_cumulative)):
            return [], [], None
        batch = self.global_batch or 1
        steps, times = self.dialect.times(*points, batch)
        later = np.append(True, times[1:] > np.maximum.accumulate(times)[:-1])
        steps, times = steps[later], times[later]
        average = float(batch * (steps[-1] - self.dialect.untimed) / times[-1])
        begin = int(np.searchsorted(steps, max(warmup_steps, 1)))
        steps, times = steps[begin:], times[begin:]
        if len(steps) < 2:
            return [], [], average
        edges = [*range(0, len(steps) - 1, -(-(len(steps) - 1) // MAX_WINDOWS)), len(steps) - 1]
        window_s = np.diff(times[edges])
        rates = batch * np.diff(steps[edges]) / window_s
        possible = (rates >= LEAST) & (rates <= MOST)
        return rates[possible].tolist(), window_s[possible].tolist(), average


class Scan:
    """What a log holds: the starts of the training program, in order."""

    def __init__(self) -> None:
        self.starts = [Start()]
        self.left_out = 0
        """Lines of an impossible rate, cut or overwritten."""
        self.num_bytes = 0
        self.is_damaged = False
        """The gzip file ends too early or is broken."""

    def read(self, block: bytes) -> None:
        """Take in the lines of a block, in the order they stand."""
        block = _ANSI.sub(b"", block) if b"\x1b" in block else block
        begin = 0
        for where, kind, word in find_lines(block):
            self._progress(block[begin:where])
            begin, start = where, self.starts[-1]
            if kind in STATES:
                start.state = max(start.state, kind, key=STATES.index)
            else:  # after progress it can only be a new start's
                start = self._restart() if start.positions or start.is_broken_off else start
                start.note(kind, word)
        self._progress(block[begin:])

    def _restart(self) -> Start:
        """The next start, of the size of the one before until its own lines say otherwise."""
        told = {name: fact for name, fact in self.starts[-1].facts.items() if name not in ("precision", "directory")}
        self.starts.append(Start(told))
        return self.starts[-1]

    def _progress(self, block: bytes) -> None:
        """Take in what lies between two other lines."""
        for dialect in DIALECTS.values():
            if dialect.gate in block and (lines := dialect.pattern.findall(block)):
                start = self.starts[-1]
                start = start if start.dialect in (None, dialect) else self._restart()
                columns = dialect.columns(lines)
                start.dialect = dialect
                if "global_batch" in columns:
                    start.facts["global_batch"] = int(np.median(columns["global_batch"]))
                positions, values = dialect.points(columns)
                possible = (positions > dialect.untimed) & (values >= LEAST) & (values <= MOST)
                start.positions.frombytes(positions[possible].tobytes())
                start.values.frombytes(values[possible].tobytes())
                self.left_out += block.count(dialect.gate) - int(possible.sum())


def scan_log(path: Path) -> Scan:
    """Read a log; UserError where it can't be read."""
    scan = Scan()
    try:
        for block in _blocks(path, scan):
            scan.num_bytes += len(block)
            scan.read(block)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    return scan


def _blocks(path: Path, scan: Scan) -> Iterator[bytes]:
    """Pieces of the file, decompressed and in UTF-8, that end at a line's end, carriage returns counted as one."""
    with open_regular(path) as file:
        read: Callable[[int], bytes] = file.read
        head, rest, ended = file.read(2), bytearray(), False
        file.seek(0)
        if head == b"\x1f\x8b":
            read = gzip.GzipFile(fileobj=file).read1  # in small pieces, so that all before a damaged end is kept
        elif head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # what PowerShell's > writes
            read = codecs.EncodedFile(file, "utf-8", "utf-16", errors="replace").read
        while not ended:
            try:
                piece = read(BLOCK_BYTES)
                rest += piece
                ended = not piece
            except (EOFError, zlib.error, gzip.BadGzipFile):
                scan.is_damaged = ended = True
            if len(rest) >= BLOCK_BYTES or ended:
                end = max(rest.rfind(b"\n") + 1, rest.rfind(b"\r") + 1, len(rest) - LONGEST_LINE)
                end = len(rest) if ended else end
                yield bytes(rest[:end])
                del rest[:end]


def read_log(path: Path, warmup_steps: int = 10, gpus: int = 0) -> list[Run]:
    """Runs of a log: one for each size (nodes, GPUs, batch) that measured something, restarts of the same size taken together;
    or one without a rate of a log that says how it failed.

    Where it doesn't say how many GPUs there are (`gpus` of the run is 0), rates and batch are of one of `gpus`, or of all.
    Raises UserError where the file can't be read, is empty or binary, or has no rate that is possible; says which.
    """
    scan = scan_log(path)
    found = [start for start in scan.starts if start.positions] or [
        start for start in scan.starts[-1:] if start.is_broken_off
    ]
    if not found:
        none = f"no throughput lines that can be used, {scan.left_out} damaged or of an impossible rate"
        printed = 'DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps'
        raise UserError(f"{path}: {f'{none} ({printed})' if scan.num_bytes else 'empty file'}")
    groups: dict[object, list[Start]] = {}
    for start in found:
        groups.setdefault(start.size, []).append(start)
    return [_run(path, starts, scan, warmup_steps, gpus) for starts in groups.values()]


def _run(path: Path, starts: Sequence[Start], scan: Scan, warmup_steps: int, given_gpus: int) -> Run:
    last, facts = starts[-1], starts[-1].facts
    gpus, accumulation = facts.get("gpus") or given_gpus or 1, facts.get("accumulation", 1)
    pieces = [(start, points) for start in starts for points in start.pieces()]
    measured = [start.windows(points, warmup_steps) for start, points in pieces]
    rates = [rate / gpus for of_piece, _, _ in measured for rate in of_piece]
    window_s = [seconds for _, of_piece, _ in measured for seconds in of_piece]
    averages = [average / gpus for _, _, average in measured if average]
    fields = rate_fields(rates, window_s) or {"samples_per_s_per_gpu": averages[-1] if averages else None}
    rate = fields["samples_per_s_per_gpu"]
    by_timer = any(start.dialect and not start.dialect.counts_data_wait for start in starts)
    left_out = (
        scan.left_out + sum(len(start.positions) for start in starts) - sum(len(steps) for _, (steps, _) in pieces)
    )
    noted = {
        "DeepSpeed's timer: leaves out data loading": by_timer,
        HOST_ALONE: by_timer and "host_alone" in facts,
        "too short to drop the warm-up: the running average is given": averages and not rates,
        "no rate, as the log doesn't state its batch": not rate and last.positions and not last.global_batch,
        f"{len(pieces)} starts in the log": len(pieces) > 1,
        f"{left_out} throughput lines left out (repeated, damaged or impossible)": left_out,
        "the gzip file is cut or damaged": scan.is_damaged,
    }
    micro_batch = facts.get("micro_batch") or last.global_batch // gpus // accumulation
    return Run(
        source=str(path), kind="log", state=last.state, model=facts.get("model", ""), precision=facts.get("precision", ""),
        directory=facts.get("directory", ""), nodes=facts.get("nodes", 0), gpus=facts.get("gpus", 0),
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        engine_samples_per_s_per_gpu=rate if by_timer else None, **fields,
        notes="; ".join(note for note, holds in noted.items() if holds),
    )  # fmt: skip
