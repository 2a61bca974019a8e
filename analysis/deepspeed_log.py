"""DeepSpeed's printed throughput → runs, for logs of any size and in the state that real logs are in.

DeepSpeed's rank 0 prints `global_step=k, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c`. R covers every step since
the timer began at step 3, so with global batch B the timer has run (k - 2)·B/R seconds; two lines give the exact mean
rate of all steps between them, where c is the rate of one step. The launcher's lines give nodes and ranks, the
engine's printed configuration gives batch sizes, `time (ms) | fwd: …` gives the breakdown. Prefixes (pdsh, srun) and
merged lines don't matter, as nothing is anchored to a line's start. The timer leaves out data loading.

The file is read once, in blocks; what is kept is two numbers for each line of throughput. Only regular expressions with
a literal at the front touch the bytes, and only where a faster substring search has found that literal.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import IO, Any

from clap_ds.analysis.record import interval_fields
from clap_ds.analysis.table import Run
from clap_ds.config.errors import UserError

BLOCK_BYTES = 8 << 20
LONGEST_LINE = 64 << 10
"""A line (or progress bar without line ends) longer than this may be cut between blocks."""
MAX_WINDOWS = 128
TIMER_START_STEP = 2
"""DeepSpeed's ThroughputTimer doesn't time the first two steps."""
BREAKDOWN_PHASES = ("forward", "backward", "exposed_communication", "optimizer")
"""What DeepSpeed times, in its order: the loss within the forward pass, and data loading not at all."""

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = rb"(-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan))"
_LINES: dict[str, tuple[bytes, bytes]] = {
    "throughput": (
        b"RunningAvgSamplesPerSec=",
        rb"global_step=(\d+), RunningAvgSamplesPerSec=" + _NUMBER + rb", CurrSamplesPerSec=" + _NUMBER + rb"(?=[,\s])"
        rb"(?:, MemAllocated=[0-9.]+GB, MaxMemAllocated=([0-9.]+)GB)?",
    ),
    "breakdown": (
        b"time (ms) | fwd:",
        rb"time \(ms\) \| fwd: ([0-9.]+) \| bwd: [0-9.]+ \| bwd_inner: ([0-9.]+) \| bwd_allreduce: ([0-9.]+)"
        rb" \| step: ([0-9]+\.[0-9]{2})",
    ),
    "engine": (b"DeepSpeedEngine configuration", rb"DeepSpeedEngine configuration()"),
    "nodes": (b"num_local_procs=", rb"nnodes=(\d+), num_local_procs=\d+"),
    "gpus": (b"dist_world_size=", rb"dist_world_size=(\d+)\b"),
    "gpus of the engine": (b"world_size ....", rb"(?<![a-z_])world_size [ .]*(\d+)\b"),
    "micro_batch": (b"train_micro_batch_size_per_gpu ", rb"train_micro_batch_size_per_gpu [ .]*(\d+)\b"),
    "accumulation": (b"gradient_accumulation_steps ..", rb"gradient_accumulation_steps [ .]*(\d+)\b"),
    "global_batch": (b"train_batch_size ...", rb"train_batch_size [ .]*(\d+)\b"),
    "bf16": (b"bfloat16_config ...", rb"bfloat16_config [ .]*enabled=(True|False)"),
    "autocast": (b"torch_autocast_dtype ...", rb"torch_autocast_dtype [ .]*torch\.(\w+)"),
    "out_of_memory": (b"OutOfMemoryError", rb"OutOfMemoryError"),
    "out_of_memory of CUDA": (b"CUDA out of memory", rb"CUDA out of memory"),
    "timeout": (b"DUE TO TIME LIMIT", rb"DUE TO TIME LIMIT"),
    "terminated": (b"CANCELLED AT", rb"CANCELLED AT"),
    "terminated by signal": (b"Main process received SIG", rb"Main process received SIG"),
    "failed": (b"Traceback (most recent call last)", rb"Traceback \(most recent call last\)"),
    "failed by exit code": (b"exits with return code", rb"exits with return code = -?[1-9]"),
    "completed": (b"exits successfully", rb"exits successfully"),
}
"""Text that must be in a block, and the expression that finds the line, by what the line is of (first word)."""
_PATTERNS = [(name.split()[0], marker, re.compile(pattern)) for name, (marker, pattern) in _LINES.items()]
_STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""


@dataclass
class Attempt:
    """One start of the training program; a restart begins the next, of the same shape until its own lines say otherwise."""

    shape: dict[str, int] = field(default_factory=dict)
    """`nodes`, `gpus`, `micro_batch`, `accumulation`, `global_batch`, where the log says."""
    precision: str = ""
    state: str = "unknown"
    steps: array[float] = field(default_factory=lambda: array("d"))
    """Between two printed lines, without those of the warm-up."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """Of these steps: timer seconds divided by the global batch."""
    last_step: int = 0
    last_average: float = 0.0
    """The latest running average, over all timed steps: what a log too short for windows still says."""
    interval: int = 0
    max_memory_gib: float = 0.0
    breakdown_ms: list[float] = field(default_factory=lambda: [0.0] * len(BREAKDOWN_PHASES))
    """Sums over `breakdown_steps`."""
    breakdown_steps: int = 0

    def rates(self) -> list[float]:
        """Global samples/s of windows of equally many printed intervals, fewer than `MAX_WINDOWS`."""
        size = 1
        while len(self.times) // size >= MAX_WINDOWS:
            size *= 2
        starts = range(0, len(self.times) - size + 1, size)
        return [sum(self.steps[at : at + size]) / sum(self.times[at : at + size]) for at in starts]


class Scan:
    """What a log holds: attempts in order, and how many throughput lines could not be used."""

    def __init__(self, warmup_steps: int = 10) -> None:
        self.warmup_steps = warmup_steps
        self.attempts = [Attempt()]
        self.unusable = 0  # a zero, negative, infinite or undecodable rate
        self.repeated = 0  # of a step already seen (another rank's, or out of order)
        self.damaged = 0  # cut or overwritten by another rank's
        self.truncated_gzip = self.binary = False
        self.num_bytes = 0

    def read(self, block: bytes) -> None:
        """Take in the lines of a block, in the order they stand."""
        block = _ANSI.sub(b"", block) if b"\x1b[" in block else block
        found: list[tuple[int, str, re.Match[bytes]]] = []
        for kind, marker, pattern in _PATTERNS:
            if marker in block:
                matches = [(match.start(), kind, match) for match in pattern.finditer(block)]
                found += matches
                if kind == "throughput":
                    self.damaged += block.count(marker) - len(matches)
        for _, kind, match in sorted(found, key=itemgetter(0)):
            attempt = self.attempts[-1]
            if kind == "throughput":
                self._throughput(match)
            elif kind == "breakdown":
                attempt.breakdown_ms = [a + float(b) for a, b in zip(attempt.breakdown_ms, match.groups(), strict=True)]
                attempt.breakdown_steps += 1
            elif kind in _STATES:
                attempt.state = max(attempt.state, kind, key=_STATES.index)
            else:
                self._launch(kind, match[1])

    def _restart(self) -> Attempt:
        self.attempts.append(Attempt(dict(self.attempts[-1].shape), self.attempts[-1].precision))
        return self.attempts[-1]

    def _launch(self, kind: str, text: bytes) -> None:
        """A line of the launcher or of the engine's configuration; after throughput it can only be a new start's."""
        attempt = self.attempts[-1]
        if attempt.last_step or attempt.state not in ("unknown", "completed"):
            attempt = self._restart()
        if kind == "bf16":
            attempt.precision = attempt.precision or ("bf16" if text == b"True" else "fp32")
        elif kind == "autocast":
            attempt.precision = f"torch_autocast_{text.decode()}"
        elif kind != "engine":
            attempt.shape[kind] = int(text)

    def _throughput(self, match: re.Match[bytes]) -> None:
        attempt, step = self.attempts[-1], int(match[1])
        average = float(match[2])
        if not (math.isfinite(average) and average > 0 and step > TIMER_START_STEP):
            self.unusable += 1
            return
        if attempt.last_step and step <= attempt.last_step:
            if attempt.last_step - step <= 2 * attempt.interval:
                self.repeated += 1
                return
            attempt = self._restart()
        attempt.max_memory_gib = max(attempt.max_memory_gib, float(match[4] or 0))
        previous_step, previous_average = attempt.last_step, attempt.last_average
        attempt.last_step, attempt.last_average = step, average
        attempt.interval = min(attempt.interval, step - previous_step) if previous_step else step
        if previous_step < self.warmup_steps:
            attempt.breakdown_ms, attempt.breakdown_steps = [0.0] * len(BREAKDOWN_PHASES), 0
        if previous_step < max(self.warmup_steps, 1):
            return
        time = (step - TIMER_START_STEP) / average - (previous_step - TIMER_START_STEP) / previous_average
        if time > 0:
            attempt.steps.append(step - previous_step)
            attempt.times.append(time)
        else:
            self.unusable += 1


def scan_log(path: Path, warmup_steps: int = 10) -> Scan:
    """Read a DeepSpeed log, plain or gzip (by content, not by name), no window of which covers a start's first steps."""
    scan = Scan(warmup_steps)
    try:
        with path.open("rb") as raw:
            for block in _blocks(raw, scan):
                scan.read(block)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    return scan


def _blocks(raw: IO[bytes], scan: Scan) -> Iterator[bytes]:
    """Pieces of the (decompressed) file that end at a line's end, carriage returns counted as one."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    carry = b""
    while block := _gzip_block(stream, scan) if isinstance(stream, gzip.GzipFile) else stream.read(BLOCK_BYTES):
        if not scan.num_bytes:
            scan.binary = b"\0" in block[:8192]
        scan.num_bytes += len(block)
        block = carry + block
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if len(block) - end > LONGEST_LINE:
            end = len(block) - LONGEST_LINE // 2
        carry = block[end:]
        yield block[:end]
    if carry:
        yield carry + b"\n"


def _gzip_block(stream: gzip.GzipFile, scan: Scan) -> bytes:
    """About `BLOCK_BYTES` decompressed; small reads, so that all that precedes a damaged or cut end is kept."""
    block = bytearray()
    try:
        while len(block) < BLOCK_BYTES and (piece := stream.read1(BLOCK_BYTES - len(block))):
            block += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        scan.truncated_gzip = True
    return bytes(block)


def read_log(path: Path, warmup_steps: int = 10, gpus: int | None = None) -> list[Run]:
    """Runs of a DeepSpeed log: one per shape (nodes, GPUs, batch), restarts of the same shape taken together.

    Where the log doesn't say how many GPUs there are it is `gpus`; rates are of all of them where that isn't given either.
    Raises UserError where the file can't be read, is empty or binary, or has no throughput that is possible; says which.
    """
    scan = scan_log(path, warmup_steps)
    measured = [attempt for attempt in scan.attempts if attempt.last_step]
    last = scan.attempts[-1]
    if not measured and last.state in ("unknown", "completed"):
        raise UserError(f"{path}: {_why_nothing(scan)}")
    groups: dict[tuple[int, ...], list[Attempt]] = {}
    for attempt in measured if last in measured or last.state == "unknown" else [*measured, last]:
        shape = tuple(attempt.shape.get(name, 0) for name in ("nodes", "gpus", "micro_batch", "accumulation"))
        groups.setdefault(shape, []).append(attempt)
    return [_run(path, attempts, scan, gpus or 1) for attempts in groups.values()]


def _why_nothing(scan: Scan) -> str:
    if not scan.num_bytes:
        return "empty file" + (" (truncated gzip)" if scan.truncated_gzip else "")
    if scan.unusable:
        return f"all {scan.unusable} throughput lines have a zero, negative or infinite rate"
    if scan.binary:
        return "binary file, not a log"
    return 'no throughput lines (DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps)'


def _run(path: Path, attempts: list[Attempt], scan: Scan, given_gpus: int) -> Run:
    last, shape = attempts[-1], attempts[-1].shape
    gpus, accumulation = shape.get("gpus", given_gpus), shape.get("accumulation", 1)
    windows = tuple(rate / gpus for attempt in attempts for rate in attempt.rates())
    averages = [attempt.last_average / gpus for attempt in attempts if attempt.last_step]
    noted = {
        "DeepSpeed's timer: leaves out data loading": True,
        "too short to drop the warm-up: the running average is given": averages and not windows,
        f"{len(scan.attempts)} starts in the log": len(scan.attempts) > 1,
        f"{scan.unusable} throughput lines with an impossible rate left out": scan.unusable,
        f"{scan.damaged} damaged throughput lines left out": scan.damaged,
        f"{scan.repeated} repeated throughput lines left out": scan.repeated,
        "the gzip file is cut or damaged": scan.truncated_gzip,
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
