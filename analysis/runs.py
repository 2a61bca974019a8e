"""Reads runs from what there is: this project's run directories, logs, and tables of either.

The one way to measured numbers, and to their options, for every command here. A run directory's counts come from its
record; a log's from the launcher's or the engine's lines, else from the options or from its name.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.record import BY_TIMER, is_record, read_record
from clap_ds.analysis.table import Run, noted
from clap_ds.analysis.training_log import read_log
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model_names import preset_of

TABLE_SUFFIXES = (".csv", ".tsv")
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
"""Of files that are looked into where a folder is given."""
_NAMED = re.compile(r"(?<![a-z0-9])(?:(\d+)[-_ ]?(nodes?|n|gpus?)|(nodes?|n|gpus?)[-_= ]?(\d+))(?![a-z0-9])")


def read_runs(paths: Sequence[Path], given: argparse.Namespace) -> list[Run]:
    """Runs of run directories, logs (plain or gzip), folders of them (a sweep's, too), and CSV tables.

    `given` holds the options of `input_parser`: what to assume where an input doesn't say. A path without a run is named
    on stderr and the rest goes on. An input that comes again, as it is, as a copy or as the log of a run directory, counts
    once, and that is said. UserError where none has a run.
    """
    problems: list[str] = []
    runs: list[tuple[Run, argparse.Namespace]] = []
    for place, path in enumerate(paths):
        before, options = len(runs) + len(problems), _of_input(place, len(paths), given)
        is_folder = os.path.isdir(path) and not is_record(path)
        for source in _inputs_in(path) if is_folder else [path]:
            try:
                found = _read(source, options)
                # A log that only lies in a folder may be any program's: it counts with a rate, or where it says its size.
                told = [run for run in found if run.rate or run.gpus or not (is_folder and run.kind == "log")]
                runs += [(run, options) for run in told]
            except UserError as error:
                problems += [] if is_folder and source.suffix in LOG_SUFFIXES else [str(error)]
        if len(runs) + len(problems) == before:
            problems.append(f"{path}: neither a run directory nor a log, or a folder of them")
    sizes = sorted({run.gpus for run, _ in runs if not run.nodes} - {0})
    if len(given.nodes or ()) == 1 and len(sizes) > 1:
        counts = ", ".join(map(str, sizes))
        raise UserError(
            f"--nodes {given.nodes[0]}: inputs that don't state their nodes have {counts} GPUs; give --gpus_per_node"
        )
    completed = []
    for run, options in runs:
        try:
            completed.append(_complete(run, options))
        except UserError as error:
            problems.append(str(error))
    if not completed:
        raise UserError("; ".join(problems))
    for problem in problems:
        print(f"warning: {problem}; going on without it", file=sys.stderr)
    return _each_once(completed)


def _of_input(place: int, count: int, given: argparse.Namespace) -> argparse.Namespace:
    """The options for one input of so many: of counts in a list, the one at its place."""
    own: dict[str, Any] = {}
    for name in ("nodes", "gpus"):
        if (counts := getattr(given, name)) and len(counts) not in (1, count):
            raise UserError(f"--{name}: expected one count, or one for each of {count} inputs; found {len(counts)}")
        own[name] = counts and counts[place if len(counts) > 1 else 0]
    return argparse.Namespace(**{**vars(given), **own})


def _read(path: Path, given: argparse.Namespace) -> list[Run]:
    """Runs of one input."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file or directory")
    if is_record(path):
        run = read_record(path)
        return [_by_own_log(path, run, given.warmup_steps) if given.rate == "engine" else run]
    if path.suffix.lower() in TABLE_SUFFIXES:
        return read_table_runs(path)
    named = {} if given.nodes or given.gpus else _named_counts(path)
    nodes, per_node = given.nodes or named.get("nodes", 0), given.gpus_per_node or 0
    gpus = given.gpus or named.get("gpus") or nodes * per_node
    found = read_log(path, given.warmup_steps, gpus)
    if not named or all(run.nodes for run in found):
        return found
    nodes = 0 if per_node else nodes
    scaled = (replace(run, nodes=run.nodes or nodes, gpus=run.gpus or gpus) for run in found)
    return [noted(run, "scale by the log's name") for run in scaled]


def _named_counts(path: Path) -> dict[str, int]:
    """Nodes or GPUs that a log's name tells, or its folder's: `n2.log`, `4nodes/slurm.out`, `gpus-16.txt`."""
    for name in (path.name.lower(), path.absolute().parent.name.lower()):
        if match := _NAMED.search(name):
            return {"gpus" if (match[2] or match[3]).startswith("g") else "nodes": int(match[1] or match[4])}
    return {}


def _by_own_log(path: Path, run: Run, warmup_steps: int) -> Run:
    """A run directory's run with the rate and the interval that the engine's lines in its log give, where there are some."""
    with suppress(UserError):
        log = read_log(path / "rank0.log", warmup_steps, run.gpus)[-1]
        if log.engine_samples_per_s_per_gpu:
            names = ("engine_samples_per_s_per_gpu", "interval", "windows", "uncertainty_from")
            return replace(run, **{name: getattr(log, name) for name in names})
    return replace(run, interval=None, windows=(), uncertainty_from="")


def _inputs_in(folder: Path) -> Iterator[Path]:
    """Run directories and logs in a folder, at any depth, in the order of their names."""
    for place, inside, files in os.walk(folder):
        if is_record(Path(place)):
            inside.clear()
            yield Path(place)
        else:
            inside[:] = sorted(name for name in inside if not name.startswith("."))  # caches of compiled code
            logs = (Path(place, name) for name in sorted(files) if Path(name).suffix.lower() in LOG_SUFFIXES)
            yield from (log for log in logs if not log.is_symlink())


def _complete(run: Run, given: argparse.Namespace) -> Run:
    """Fill what the input left out from what the user gave, and insist on the counts."""
    per_node = given.gpus_per_node or 0
    gpus = run.gpus or given.gpus or (given.nodes or 0) * per_node
    if per_node and gpus % per_node and not run.nodes:
        raise UserError(f"{run.source}: {gpus} GPUs are no multiple of --gpus_per_node {per_node}")
    nodes = run.nodes or (gpus // per_node if per_node else given.nodes) or int(gpus == 1)
    counts = {"number of nodes (--nodes, --gpus_per_node)": nodes, "number of GPUs (--gpus)": gpus}
    if missing := [what for what, count in counts.items() if not count]:
        raise UserError(f"{run.source}: doesn't state the {' and the '.join(missing)}; give it")
    if gpus < nodes:
        raise UserError(f"{run.source}: {gpus} GPUs on {nodes} nodes; expected at least one per node")
    batch = run.batch_per_gpu or (given.micro_batch and given.micro_batch * run.accumulation)
    of_log = batch / run.rate if run.kind == "log" and run.rate and batch else None
    run = replace(
        run, nodes=nodes, gpus=gpus, batch_per_gpu=batch, micro_batch=run.micro_batch or (batch and batch // run.accumulation),
        step_time_s=run.step_time_s or of_log, model=preset_of(run.model or given.model or ""),
        peak_tflops=run.peak_tflops or given.peak_tflops,
    )  # fmt: skip
    return _by_engine(run) if given.rate == "engine" else run


def _by_engine(run: Run) -> Run:
    """With the engine's rate in place of the measured one, and what follows from the rate."""
    rate = run.engine_samples_per_s_per_gpu
    if not rate:
        run = replace(run, samples_per_s_per_gpu=None, samples_per_s=None, interval=None, windows=())
        return noted(run, "no rate by DeepSpeed's timer")
    share = rate / (run.rate or rate)
    tflops, mfu = (value and value * share for value in (run.achieved_tflops, run.mfu_model_percent))
    run = replace(run, samples_per_s_per_gpu=rate, samples_per_s=None, achieved_tflops=tflops, mfu_model_percent=mfu)
    return noted(run, BY_TIMER)


def _each_once(runs: Sequence[Run]) -> list[Run]:
    """The runs without copies (all that is known of them is the same, and they measured something or ended) and without logs
    that name a run directory which is there, too."""
    records = {run.name for run in runs if run.kind == "record"}
    found: dict[str, Run] = {}
    again = []
    for run in runs:
        told = run.rate or run.finished or run.kind == "table"
        key = repr(replace(run, source="" if told else run.source))
        if key in found or (run.kind == "log" and run.directory and Path(run.directory).name in records):
            again.append(run.source)
        else:
            found[key] = run
    if again:
        print(f"note: counted once, as the same run is there, too: {', '.join(dict.fromkeys(again))}", file=sys.stderr)
    return [*found.values()]


KINDS = "run directories, logs, folders of them, sweeps, tables"


def _counts(text: str) -> list[int]:
    return [whole_number()(each) for each in text.split(",")]


def input_parser(description: str, *inputs: str) -> argparse.ArgumentParser:
    """Options of a command that reads runs: `inputs`, as many as are given, or those named here, one each; and what to assume
    where they don't say (`given` of `read_runs`)."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    for name in inputs:
        add(name, type=Path, help=KINDS)
    if not inputs:
        add("inputs", nargs="+", type=Path, help=KINDS)
    of = "of inputs that don't state it: one, or one for each input (1,2,4)"
    add("--nodes", type=_counts, metavar="N[,N…]", help=f"node count {of}")
    add("--gpus", type=_counts, metavar="N[,N…]", help=f"GPU count, all nodes together, {of}")
    add("--gpus_per_node", type=whole_number(), help="for inputs that don't state nodes or GPUs")
    told = "samples/s by this project's clock (default), or by DeepSpeed's timer, as its log lines have it"
    add("--rate", choices=("measured", "engine"), default="measured", help=told)
    add("--model", type=preset_of, help="of logs: a preset, or as published (HTSAT-tiny-Roberta-base)")
    add("--micro_batch", type=whole_number(), help="samples per GPU and micro-step where not stated")
    add("--peak_tflops", type=positive, help="dense peak of one GPU where not stated")
    add("--warmup_steps", type=int, default=10, help="steps of a log to drop at each start (default 10)")
    return parser
