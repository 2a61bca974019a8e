"""Reads runs from what there is: this project's run directories, DeepSpeed logs, and tables of either.

The one door to measured numbers for every other command here. Run as a command it lists what it found:

    python analysis/throughput.py runs/ slurm-*.out [--nodes 2 --gpus 8]

A run directory's counts come from its record; a log's from the launcher's or the engine's lines, else from `--nodes`
and `--gpus`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.deepspeed_log import scan_log
from clap_ds.analysis.log_state import Attempt, LogScan
from clap_ds.analysis.record import interval_fields, is_record, read_record
from clap_ds.analysis.runs import InputError, Run, run_command, warn

GIB = 1024**3
LOG_NOTE = "DeepSpeed's timer: leaves out data loading"


@dataclass(frozen=True)
class Given:
    """What the user says about inputs that don't say it themselves."""

    num_nodes: int | None = None
    num_gpus: int | None = None
    model: str | None = None
    micro_batch_per_gpu: int | None = None
    peak_tflops: float | None = None
    warmup_steps: int = 10


def read_all(paths: Sequence[Path], given: Given | None = None) -> list[Run]:
    """Runs of every path; a file that holds none is named on stderr and the rest goes on.

    Args:
        paths: run directories, folders of run directories, DeepSpeed logs (plain or gzip) or CSV tables.
        given: what to assume where an input doesn't say.

    Raises:
        InputError: none of the paths holds a run.
    """
    given = given or Given()
    runs: list[Run] = []
    problems: list[str] = []
    for path in paths:
        try:
            runs += read_path(path, given)
        except InputError as error:
            problems.append(str(error))
    if not runs:
        raise InputError("; ".join(problems) or "no input given")
    for problem in problems:
        warn(f"{problem}; going on without it")
    return runs


def read_path(path: Path, given: Given) -> list[Run]:
    """Runs of one run directory, folder of them, log or table.

    Raises:
        InputError: it holds no run, or lacks a count that nothing else gives.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if is_record(path):
        return [_complete(read_record(path), given)]
    if path.is_dir():
        records = sorted(folder for folder in path.iterdir() if is_record(folder))
        if not records:
            raise InputError(f"{path}: neither a run directory nor a folder of them")
        return [_complete(read_record(folder), given) for folder in records]
    if path.suffix == ".csv":
        from clap_ds.analysis.table import read_table_runs

        return [_complete(run, given) for run in read_table_runs(path)]
    return [_complete(run, given) for run in read_log(path, given.warmup_steps)]


def _complete(run: Run, given: Given) -> Run:
    """Fill what the input left out from what the user gave, and insist on the counts."""
    run = replace(
        run,
        num_nodes=run.num_nodes or given.num_nodes,
        num_gpus=run.num_gpus or given.num_gpus,
        model=run.model or given.model,
        micro_batch_per_gpu=run.micro_batch_per_gpu or given.micro_batch_per_gpu,
        peak_tflops=run.peak_tflops or given.peak_tflops,
    )
    missing = [
        f"number of {what} ({option})"
        for value, what, option in ((run.num_nodes, "nodes", "--nodes"), (run.num_gpus, "GPUs", "--gpus"))
        if value is None
    ]
    if missing:
        raise InputError(f"{run.source}: doesn't state the {' and the '.join(missing)}; give it")
    assert run.num_nodes is not None
    assert run.num_gpus is not None
    if run.num_gpus < run.num_nodes:
        raise InputError(f"{run.source}: {run.num_gpus} GPUs on {run.num_nodes} nodes; expected at least one per node")
    if run.kind == "log" and run.rate is not None:
        per_gpu = 1 / run.num_gpus
        step_time = run.batch_per_gpu / (run.rate * per_gpu) if run.batch_per_gpu else None
        run = replace(
            run,
            rate=run.rate * per_gpu,
            rate_low=run.rate_low and run.rate_low * per_gpu,
            rate_high=run.rate_high and run.rate_high * per_gpu,
            windows=tuple(rate * per_gpu for rate in run.windows),
            step_time_s=step_time,
        )
    return run


def read_log(path: Path, warmup_steps: int = 10) -> list[Run]:
    """Runs of a DeepSpeed log: one per shape (nodes, GPUs, batch), restarts of the same shape taken together.

    Rates of the returned runs are of all GPUs together: their number may not be known yet.

    Raises:
        InputError: empty, binary, no throughput, or only zero or infinite throughput; says which.
    """
    scan = scan_log(path, warmup_steps)
    measured = [attempt for attempt in scan.attempts if attempt.last_step]
    last = scan.attempts[-1]
    if not measured and last.state in ("unknown", "completed"):
        raise InputError(f"{path}: {_why_nothing(scan)}")
    groups: dict[tuple[object, ...], list[Attempt]] = {}
    for attempt in measured if last in measured or last.state == "unknown" else [*measured, last]:
        shape = (attempt.num_nodes, attempt.world_size, attempt.micro_batch, attempt.accumulation)
        groups.setdefault(shape, []).append(attempt)
    return [_log_run(path, attempts, scan) for attempts in groups.values()]


def _why_nothing(scan: LogScan) -> str:
    if not scan.num_bytes:
        return "empty file" + (" (truncated gzip)" if scan.truncated_gzip else "")
    if scan.unusable:
        return f"all {scan.unusable} throughput lines have a zero, negative or infinite rate"
    if scan.binary:
        return "binary file, not a log"
    return 'no throughput lines (DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps)'


def _log_run(path: Path, attempts: list[Attempt], scan: LogScan) -> Run:
    windows = tuple(rate for attempt in attempts for rate in attempt.windows.rates())
    last = attempts[-1]
    notes = [LOG_NOTE]
    averages = [attempt.last_average for attempt in attempts if attempt.last_step]
    if averages and not windows:
        notes.append("too short to drop the warm-up: the running average is given")
    if len(scan.attempts) > 1:
        notes.append(f"{len(scan.attempts)} starts in the log")
    if scan.unusable:
        notes.append(f"{scan.unusable} throughput lines with an impossible rate left out")
    if scan.damaged:
        notes.append(f"{scan.damaged} damaged throughput lines left out")
    if scan.repeated:
        notes.append(f"{scan.repeated} repeated throughput lines left out")
    if scan.truncated_gzip:
        notes.append("the gzip file is cut or damaged")
    world_size, micro_batch = last.world_size, last.micro_batch
    if micro_batch is None and last.global_batch and world_size:
        micro_batch = last.global_batch // world_size // (last.accumulation or 1)
    rate = median(windows) if windows else median(averages) if averages else None
    fields = {"rate": rate, **interval_fields(windows)} if rate else {}
    memory = max(attempt.max_memory_gib for attempt in attempts)
    return Run(
        source=str(path),
        kind="log",
        state=last.state,
        precision=last.precision,
        num_nodes=last.num_nodes,
        num_gpus=world_size,
        micro_batch_per_gpu=micro_batch,
        gradient_accumulation_steps=last.accumulation or 1,
        **fields,
        memory_peak_bytes=memory * GIB if memory else None,
        breakdown_s=_breakdown_s(attempts),
        notes=tuple(notes),
    )


def _breakdown_s(attempts: list[Attempt]) -> dict[str, float]:
    """Mean seconds a step by part; DeepSpeed times the loss within the forward pass and data loading not at all."""
    steps = sum(attempt.breakdown_steps for attempt in attempts)
    if not steps:
        return {}
    sums = [sum(attempt.breakdown_ms[index] for attempt in attempts) for index in range(4)]
    names = ("forward", "backward", "exposed_communication", "optimizer")
    return {name: total / steps / 1000 for name, total in zip(names, sums, strict=True)}


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Options of `Given`, shared by every command that reads runs."""
    parser.add_argument("--nodes", type=positive_int, help="node count of logs that don't state it")
    parser.add_argument("--gpus", type=positive_int, help="GPU count (all nodes together) of logs that don't state it")
    parser.add_argument("--model", help="model preset of logs, which never state it (htsat_tiny_roberta_base, …)")
    parser.add_argument("--micro_batch", type=positive_int, help="samples per GPU and micro-step where not stated")
    parser.add_argument("--peak_tflops", type=positive_float, help="dense peak of one GPU where not stated, for MFU")
    parser.add_argument(
        "--warmup_steps", type=int, default=10, help="steps of a log to drop at each start (default 10)"
    )


def given_of(options: argparse.Namespace) -> Given:
    return Given(
        options.nodes, options.gpus, options.model, options.micro_batch, options.peak_tflops, options.warmup_steps
    )


def positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above zero")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above zero")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="List the runs found in run directories, DeepSpeed logs and tables.")
    parser.add_argument("inputs", nargs="+", type=Path)
    add_input_options(parser)
    options = parser.parse_args()
    for run in read_all(options.inputs, given_of(options)):
        print(
            f"{run.source}: {run.model or 'model not stated'}, {run.num_nodes} nodes × {run.num_gpus} GPUs, {run.state}"
        )
        if run.rate is not None:
            between = f" ({run.rate_low:.5g}–{run.rate_high:.5g}, {run.interval_from})" if run.rate_low else ""
            print(f"  {run.rate:.5g} samples/s/GPU{between}")
        for note in run.notes:
            print(f"  {note}")


if __name__ == "__main__":
    run_command(main)
