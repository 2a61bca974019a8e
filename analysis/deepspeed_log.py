"""DeepSpeed's printed throughput → runs, for logs of any size and in the state that real logs are in.

DeepSpeed's rank 0 prints `global_step=k, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c`. R covers every step since
the timer began at step 3, so with global batch B the timer has run (k - 2)·B/R seconds; two lines give the exact mean
rate of all steps between them, where c is the rate of one step. The launcher's lines give nodes and ranks, the
engine's printed configuration gives batch sizes, `time (ms) | fwd: …` gives the breakdown. Prefixes (pdsh, srun) and
merged lines don't matter, as nothing is anchored to a line's start. The timer leaves out data loading; that is said
with every run read from a log.

The file is read once, in blocks, in constant memory. Only regular expressions with a literal at the front touch the
bytes, and only where a faster substring search has found that literal.
"""

from __future__ import annotations

import gzip
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clap_ds.analysis.log_state import TIMER_START_STEP, Attempt, LogScan
from clap_ds.analysis.runs import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

BLOCK_BYTES = 8 << 20
LONGEST_LINE = 64 << 10
"""A line (or progress bar without line ends) longer than this may be cut between blocks."""
PROGRESS_BAR_BYTES = 64 << 20

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = rb"(-?(?:[0-9.]+(?:[eE][+-]?[0-9]+)?|inf|nan))"
_PATTERNS: dict[str, tuple[bytes, re.Pattern[bytes]]] = {
    "throughput": (
        b"RunningAvgSamplesPerSec=",
        re.compile(
            rb"global_step=(\d+), RunningAvgSamplesPerSec="
            + _NUMBER
            + rb", CurrSamplesPerSec="
            + _NUMBER
            + rb"(?=[,\s])"
            rb"(?:, MemAllocated=[0-9.]+GB, MaxMemAllocated=([0-9.]+)GB)?"
        ),
    ),
    "breakdown": (
        b"time (ms) | fwd:",
        re.compile(
            rb"time \(ms\) \| fwd: ([0-9.]+) \| bwd: [0-9.]+ \| bwd_inner: ([0-9.]+) \| bwd_allreduce: ([0-9.]+)"
            rb" \| step: ([0-9]+\.[0-9]{2})"
        ),
    ),
    "nodes": (b"num_local_procs=", re.compile(rb"nnodes=(\d+), num_local_procs=(\d+)")),
    "world": (b"dist_world_size=", re.compile(rb"dist_world_size=(\d+)\b")),
    "engine": (b"DeepSpeedEngine configuration", re.compile(rb"DeepSpeedEngine configuration")),
    "micro_batch": (
        b"train_micro_batch_size_per_gpu ",
        re.compile(rb"train_micro_batch_size_per_gpu [ .]*(\d+)\b"),
    ),
    "accumulation": (
        b"gradient_accumulation_steps ..",
        re.compile(rb"gradient_accumulation_steps [ .]*(\d+)\b"),
    ),
    "train_batch": (b"train_batch_size ...", re.compile(rb"train_batch_size [ .]*(\d+)\b")),
    "config_world": (b"world_size ....", re.compile(rb"(?<![a-z_])world_size [ .]*(\d+)\b")),
    "bf16": (b"bfloat16_config ...", re.compile(rb"bfloat16_config [ .]*enabled=(True|False)")),
    "autocast": (b"torch_autocast_dtype ...", re.compile(rb"torch_autocast_dtype [ .]*torch\.(\w+)")),
    "out_of_memory": (b"OutOfMemoryError", re.compile(rb"OutOfMemoryError")),
    "out_of_memory ": (b"CUDA out of memory", re.compile(rb"CUDA out of memory")),
    "timeout": (b"DUE TO TIME LIMIT", re.compile(rb"DUE TO TIME LIMIT")),
    "terminated": (b"CANCELLED AT", re.compile(rb"CANCELLED AT")),
    "terminated ": (b"Main process received SIG", re.compile(rb"Main process received SIG")),
    "failed": (b"Traceback (most recent call last)", re.compile(rb"Traceback \(most recent call last\)")),
    "failed ": (b"exits with return code", re.compile(rb"exits with return code = -?[1-9]")),
    "completed": (b"exits successfully", re.compile(rb"exits successfully")),
}
_STATES = ("unknown", "completed", "failed", "terminated", "timeout", "out_of_memory")
"""The later ones win: an out-of-memory error also leaves a traceback and a bad return code."""


def scan_log(path: Path, warmup_steps: int = 10, progress: bool | None = None) -> LogScan:
    """Read a DeepSpeed log, plain or gzip (told by content, not by name).

    Args:
        path: the log.
        warmup_steps: steps at each start that no window covers.
        progress: show a progress bar; None shows one on a terminal for files above 64 MiB.

    Raises:
        InputError: the file can't be read.
    """
    scan = LogScan()
    scanner = _Scanner(scan, warmup_steps)
    try:
        with path.open("rb") as raw, _progress_bar(path, progress) as bar:
            for block in _blocks(raw, scan, bar):
                scanner.read(block)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from error
    return scan


class _Bar(AbstractContextManager["_Bar"]):
    """A progress bar over a file's bytes on stderr."""

    def __init__(self, progress: Progress, name: str, size: int) -> None:
        self.progress = progress
        self.task = progress.add_task(name, total=size)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def move_to(self, position: int) -> None:
        self.progress.update(self.task, completed=position)


def _progress_bar(path: Path, wanted: bool | None) -> AbstractContextManager[_Bar | None]:
    size = path.stat().st_size
    if wanted is None:
        wanted = size >= PROGRESS_BAR_BYTES and sys.stderr.isatty()
    if not wanted:
        return nullcontext()
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:  # on a login node nothing but Python need be there
        return nullcontext()
    return _Bar(Progress(console=Console(stderr=True), transient=True), path.name, size)


def _blocks(raw: IO[bytes], scan: LogScan, bar: _Bar | None) -> Iterator[bytes]:
    """Pieces of the (decompressed) file that end at a line's end, carriage returns counted as one."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    carry = b""
    while True:
        block = _gzip_block(stream, scan) if isinstance(stream, gzip.GzipFile) else stream.read(BLOCK_BYTES)
        if bar is not None:
            bar.move_to(raw.tell())
        if not block:
            break
        if not scan.num_bytes:
            scan.binary = b"\0" in block[:8192]
        scan.num_bytes += len(block)
        block = carry + block if carry else block
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if len(block) - end > LONGEST_LINE:
            end = len(block) - LONGEST_LINE // 2
        carry = block[end:]
        yield block[:end]
    if carry:
        yield carry + b"\n"


def _gzip_block(stream: gzip.GzipFile, scan: LogScan) -> bytes:
    """About `BLOCK_BYTES` decompressed; small reads, so that all that precedes a damaged or cut end is kept."""
    pieces: list[bytes] = []
    size = 0
    while size < BLOCK_BYTES and not scan.truncated_gzip:
        try:
            piece = stream.read1(BLOCK_BYTES - size)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            scan.truncated_gzip = True
            break
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


class _Scanner:
    """Feeds the matches of each block, in the order they stand, to the attempts."""

    def __init__(self, scan: LogScan, warmup_steps: int) -> None:
        self.scan = scan
        self.warmup_steps = warmup_steps

    @property
    def attempt(self) -> Attempt:
        return self.scan.attempts[-1]

    def read(self, block: bytes) -> None:
        if b"\x1b[" in block:
            block = _ANSI.sub(b"", block)
        found: list[tuple[int, str, re.Match[bytes]]] = []
        for kind, (marker, pattern) in _PATTERNS.items():
            if marker not in block:
                continue
            matches = [(match.start(), kind, match) for match in pattern.finditer(block)]
            if kind == "throughput":
                self.scan.damaged += block.count(marker) - len(matches)
            found += matches
        found.sort(key=itemgetter(0))
        handlers: dict[str, Callable[[re.Match[bytes]], None]] = {
            "throughput": self._throughput,
            "breakdown": self._breakdown,
        }
        for _, kind, match in found:
            handler = handlers.get(kind)
            if handler is not None:
                handler(match)
            elif kind.strip() in _STATES:
                self._state(kind.strip())
            else:
                self._launch(kind, match)

    def _state(self, state: str) -> None:
        if _STATES.index(state) > _STATES.index(self.attempt.state):
            self.attempt.state = state

    def _restart(self) -> Attempt:
        """Begin a new attempt, of the same shape until its own lines say otherwise."""
        self.scan.attempts.append(self.attempt.restarted())
        return self.attempt

    def _launch(self, kind: str, match: re.Match[bytes]) -> None:
        """A line of the launcher or of the engine's configuration; after throughput it can only be a new start's."""
        if self.attempt.last_step or self.attempt.state not in ("unknown", "completed"):
            self._restart()
        attempt = self.attempt
        text = match[1] if match.re.groups else b""
        if kind == "nodes":
            attempt.num_nodes = int(text)
        elif kind in ("world", "config_world"):
            attempt.world_size = int(text)
        elif kind == "micro_batch":
            attempt.micro_batch = int(text)
        elif kind == "accumulation":
            attempt.accumulation = int(text)
        elif kind == "train_batch":
            attempt.global_batch = int(text)
        elif kind == "bf16" and attempt.precision is None:
            attempt.precision = "bf16" if text == b"True" else "fp32"
        elif kind == "autocast":
            attempt.precision = f"torch_autocast_{text.decode()}"

    def _throughput(self, match: re.Match[bytes]) -> None:
        step = int(match[1])
        try:
            average = float(match[2])
        except ValueError:
            self.scan.unusable += 1
            return
        if not (math.isfinite(average) and average > 0 and step > TIMER_START_STEP):
            self.scan.unusable += 1
            return
        attempt = self.attempt
        if attempt.last_step and step <= attempt.last_step:
            if attempt.last_step - step <= 2 * attempt.interval:
                self.scan.repeated += 1
                return
            attempt = self._restart()
        if match[4]:
            attempt.max_memory_gib = max(attempt.max_memory_gib, float(match[4]))
        previous_step, previous_average = attempt.last_step, attempt.last_average
        attempt.last_step, attempt.last_average = step, average
        if not previous_step:
            attempt.interval = step
        else:
            attempt.interval = min(attempt.interval, step - previous_step)
        if previous_step < self.warmup_steps:
            attempt.breakdown_ms, attempt.breakdown_steps = [0.0] * 4, 0
        if previous_step < max(self.warmup_steps, 1):
            return
        time = (step - TIMER_START_STEP) / average - (previous_step - TIMER_START_STEP) / previous_average
        if time > 0:
            attempt.windows.add(step - previous_step, time)
        else:
            self.scan.unusable += 1

    def _breakdown(self, match: re.Match[bytes]) -> None:
        attempt = self.attempt
        sums = attempt.breakdown_ms
        for index in range(4):
            sums[index] += float(match[index + 1])
        attempt.breakdown_steps += 1
