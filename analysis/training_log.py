"""Logs of DeepSpeed, open_clip and this project's benchmark → runs, for logs of any size, in the state that real logs are in.

Throughput lines say by which time which step was done (`dialects.py`): the rate is all samples over all seconds after the
warm-up, whatever the log's length and how often it prints. The launcher's lines give nodes and ranks, the engine's printed
configuration batch sizes. A log of the benchmark's has its own figures, which count the wait for data as DeepSpeed's timer
doesn't. The engine's rate, beside them, is that of its table, or of DeepSpeed's lines if none was printed. The parts of a step
are those of `wall_clock_breakdown`, whose n-th line is of a start's n-th step.

The file is read once, in blocks; what is kept are two numbers for each throughput line.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from clap_ds.analysis.attempt import STATES, Attempt, mean_parts
from clap_ds.analysis.dialects import Dialect
from clap_ds.analysis.log_files import FileState, blocks
from clap_ds.analysis.log_lines import Matches, find_lines, find_parts, find_rates, label_of, without_colours
from clap_ds.analysis.record import HOST_ALONE, interval_fields, rate_over, run_of
from clap_ds.analysis.table import LEAST, MOST, Run
from clap_ds.config.errors import UserError
from clap_ds.record.plausible import uneven_steps


class Scan:
    """What a log holds: attempts in order, and how many throughput lines could not be used."""

    def __init__(self, warmup_steps: int = 10) -> None:
        self.warmup_steps = warmup_steps
        self.attempts = [Attempt()]
        self.left_out = 0
        """Lines of an impossible rate, of a step already seen (another rank's, or out of order), cut or overwritten."""
        self.file = FileState()

    def read(self, block: bytes) -> None:
        """Take in the lines of a block, in the order they stand."""
        block = without_colours(block)
        events = find_lines(block)
        dialect, rates, damaged = find_rates(block) or (None, [], 0)
        parts = find_parts(block)
        self.left_out += damaged
        edges = [0, *(match.start() for _, match in events), len(block)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            if number:
                self._event(*events[number - 1])
            first, last = (bisect_left(parts, edge, key=re.Match.start) for edge in (begin, end))
            if first < last:
                self.attempts[-1].add_parts([match.groups() for match in parts[first:last]], self.warmup_steps)
            first, last = (bisect_left(rates, edge, key=re.Match.start) for edge in (begin, end))
            if dialect and first < last:
                self._throughput(dialect, rates[first:last])

    def _restart(self) -> Attempt:
        last = self.attempts[-1]
        facts = {name: fact for name, fact in last.facts.items() if name != "start"}
        self.attempts.append(Attempt(dict(last.shape), facts))
        return self.attempts[-1]

    def _event(self, kind: str, match: re.Match[bytes]) -> None:
        attempt = self.attempts[-1]
        if kind in STATES:
            attempt.state = max(attempt.state, kind, key=STATES.index)
        elif kind.startswith("bench_"):
            self._bench(kind, match)
        else:
            self._launch(kind, match[1])

    def _launch(self, kind: str, text: bytes) -> None:
        """A line of the launcher or of the engine's configuration; after throughput it can only be a new start's."""
        attempt = self.attempts[-1]
        if attempt.measured or attempt.state not in ("unknown", "completed"):
            attempt = self._restart()
        if kind in ("start", "engine"):
            attempt.announced = True
            attempt.facts.pop("precision", "")
        word, precision = text.decode(errors="replace"), attempt.facts.get("precision", "")
        if kind in ("bf16", "fp16"):
            attempt.facts["precision"] = kind if word == "True" and precision in ("", "fp32") else precision or "fp32"
        elif kind == "autocast":
            attempt.facts["precision"] = f"torch_autocast_{word}"
        elif kind in ("start", "model", "precision", "host_alone"):
            attempt.facts[kind] = word
        elif kind != "engine" and int(word):
            attempt.shape[kind] = int(word)

    def _bench(self, kind: str, match: re.Match[bytes]) -> None:
        attempt = self.attempts[-1]
        if attempt.bench.begins_anew(kind, match):
            attempt = self._restart()
        attempt.bench.add(kind, match)
        if kind == "bench_window":
            attempt.timed = len(attempt.positions)
        if attempt.bench.has_table:
            attempt.state = max(attempt.state, "completed", key=STATES.index)

    def _throughput(self, dialect: Dialect, matches: Matches) -> None:
        """Take in lines of throughput between which nothing else happens."""
        attempt = self.attempts[-1]
        if attempt.dialect not in (None, dialect):
            attempt = self._restart()
        attempt.dialect = dialect
        if attempt.source is None:
            attempt.source = next((label for match in matches if (label := label_of(match)) is not None), None)
        own = [match for match in matches if label_of(match) in (None, attempt.source)] if attempt.source else matches
        groups = [match.groups() for match in own]
        if not dialect.has_data_wait:
            attempt.max_memory_gib = max([attempt.max_memory_gib, *map(float, {line[2] or 0 for line in groups})])
        known = dialect.facts(groups)
        attempt.shape = known | attempt.shape
        positions, values = dialect.points(groups)
        possible = (positions > dialect.untimed) & (values >= LEAST) & (values <= MOST)
        self.left_out += len(matches) - int(possible.sum())
        positions, values = positions[possible], values[possible]
        while len(positions):
            attempt = self.attempts[-1]
            highest = np.maximum.accumulate(np.concatenate(([*attempt.positions[-1:], 0][:1], positions)))[:-1]
            ahead = positions - highest
            attempt.interval = min([attempt.interval, *ahead[ahead > 0]])
            anew = np.flatnonzero((ahead < -2 * attempt.interval) & (not attempt.announced))
            until = int(anew[0]) if len(anew) else len(positions)
            new = ahead[:until] > 0
            attempt.add(positions[:until][new], values[:until][new])
            self.left_out += int((~new).sum())
            positions, values = positions[until:], values[until:]
            if len(positions):
                restarted = self._restart()
                restarted.dialect, restarted.source = attempt.dialect, attempt.source


def scan_log(path: Path, warmup_steps: int = 10) -> Scan:
    """Read a log, plain or gzip; UserError where it can't be read."""
    scan = Scan(warmup_steps)
    for block in blocks(path, scan.file):
        scan.read(block)
    return scan


def read_log(path: Path, warmup_steps: int = 10) -> list[Run]:
    """Runs of a log: one for each of the benchmark's; of an engine's, one per shape (nodes, GPUs, batch), restarts of the same
    shape taken together.

    Where the log doesn't say how many GPUs there are (`gpus` is 0), rates and batch are of all of them.
    Raises UserError where the file can't be read, is empty or binary, or has no throughput that is possible; says which.
    """
    scan = scan_log(path, warmup_steps)
    found = [attempt for attempt in scan.attempts if attempt.measured]
    last = scan.attempts[-1]
    if not found and last.state in ("unknown", "completed"):
        raise UserError(f"{path}: {_why_nothing(scan)}")
    # What measured nothing and didn't end by itself is a run, unless it is but another host's part of the run before.
    if not last.measured and last.state not in ("unknown", "completed"):
        found += [last] if last.announced or not found or last.shape != found[-1].shape else []
    groups: dict[object, list[Attempt]] = {}
    for attempt in found:
        shape = tuple(attempt.shape.get(name, 0) for name in ("nodes", "gpus", "micro_batch", "accumulation"))
        groups.setdefault(id(attempt) if attempt.is_bench else shape, []).append(attempt)
    return [_run(path, attempts, scan) for attempts in groups.values()]


def _why_nothing(scan: Scan) -> str:
    if not scan.file.num_bytes:
        return "empty file" + (" (truncated gzip)" if scan.file.truncated_gzip else "")
    if scan.left_out:
        return f"all {scan.left_out} throughput lines have a zero, negative or infinite rate, or are damaged"
    if scan.file.binary:
        return "binary file, not a log"
    return (
        'no throughput lines (DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps), no table and no'
        " window of the benchmark"
    )


def _run(path: Path, attempts: list[Attempt], scan: Scan) -> Run:
    last = attempts[-1]
    if last.is_bench:
        return _bench_run(path, last, scan.warmup_steps)
    paces = [attempt.pace(scan.warmup_steps) for attempt in attempts]
    shape, gpus = last.shape, last.shape.get("gpus", 1)
    windows = tuple(rate / gpus for pace in paces for rate in pace.rates)
    averages = [pace.average / gpus for pace in paces if pace.average]
    window_s = [seconds for pace in paces for seconds in pace.window_s]
    rate = rate_over(windows, window_s) or (averages[-1] if averages else None)
    step_s = next((pace.step_s for pace in paces if pace.step_s), None)
    by_timer = any(attempt.dialect and not attempt.dialect.has_data_wait for attempt in attempts)
    noted = {
        "DeepSpeed's timer: leaves out data loading": by_timer,
        HOST_ALONE: by_timer and "host_alone" in last.facts,
        "too short to drop the warm-up: the running average is given": averages and not windows,
        f"{len(scan.attempts)} starts in the log": len(scan.attempts) > 1,
        f"{scan.left_out} throughput lines left out (repeated, damaged or impossible)": scan.left_out,
        "the gzip file is cut or damaged": scan.file.truncated_gzip,
    }
    notes = [note for note, holds in noted.items() if holds]
    if rate and step_s:
        notes += uneven_steps(rate, (last.global_batch or 1) / gpus, step_s)
    accumulation = shape.get("accumulation", 1)
    micro_batch = shape.get("micro_batch") or shape.get("global_batch", 0) // gpus // accumulation
    return Run(
        source=str(path), kind="log", state=last.state, precision=last.facts.get("precision", ""),
        model=last.facts.get("model", ""), identity=_identity(attempts), directory=last.facts.get("start", ""),
        nodes=shape.get("nodes", 0), gpus=shape.get("gpus", 0),
        batch_per_gpu=micro_batch * accumulation or None, accumulation=accumulation,
        samples_per_s_per_gpu=rate, engine_samples_per_s_per_gpu=rate if by_timer else None,
        **interval_fields(windows, window_s), **mean_parts(attempts),
        step_time_s=step_s if last.global_batch else None,
        memory_peak_gib=max(attempt.max_memory_gib for attempt in attempts) or None,
        notes="; ".join(notes),
    )  # fmt: skip


def _identity(attempts: Sequence[Attempt]) -> str:
    lines = b"".join(bytes(numbers) for attempt in attempts for numbers in (attempt.positions, attempt.values))
    return hashlib.sha256(lines).hexdigest()


def _bench_run(path: Path, attempt: Attempt, warmup_steps: int) -> Run:
    """What the benchmark printed, and of what it didn't (a run that was killed) what DeepSpeed's lines say."""
    shape = attempt.shape
    known = {"world_size": shape.get("gpus"), "num_nodes": shape.get("nodes"), "state": attempt.state,
             "precision": attempt.facts.get("precision", ""), "micro_batch_per_gpu": shape.get("micro_batch")}  # fmt: skip
    printed = attempt.bench.summary(shape.get("gpus", 0), shape.get("accumulation"))
    engine = printed["deepspeed_samples_per_s"] or attempt.pace(warmup_steps, attempt.timed or None).rate
    printed |= {"deepspeed_samples_per_s": engine, "deepspeed_times_host_alone": printed["deepspeed_times_host_alone"]
                or "host_alone" in attempt.facts}  # fmt: skip
    windows_alone = "no table: rates of windows, as the benchmark printed them while it ran"
    notes = [] if attempt.bench.has_table else [windows_alone]
    run = run_of(str(path), known | printed, {}, {}, notes)
    engine = engine and engine / (run.gpus or 1)
    return replace(run, kind="log", directory=attempt.facts.get("start", ""), engine_samples_per_s_per_gpu=engine)
