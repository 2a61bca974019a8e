"""Reads runs from what there is: this project's run directories, logs, and tables of either.

The one way to measured numbers, and the one place of options, for every command here. A run directory's counts come from its
record; a log's from the launcher's or the engine's lines, else from the options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.record import is_record, read_record
from clap_ds.analysis.table import Run
from clap_ds.analysis.training_log import read_log
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model_names import preset_of

TABLE_SUFFIXES = (".csv", ".tsv")
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
"""Of files that are looked into where a folder is given."""


def read_runs(paths: Sequence[Path], given: argparse.Namespace) -> list[Run]:
    """Runs of run directories, logs (plain or gzip), folders of them (a sweep's, too), `metrics.jsonl` alone, and CSV tables.

    `given` holds the values of `INPUT_OPTIONS`: what to assume where an input doesn't say. A path without a run is named
    on stderr and the rest goes on. An input that comes again, as it is, as a copy or as the log of a run directory, counts
    once, and that is said. UserError where none has a run.
    """
    problems: list[str] = []
    runs: list[Run] = []
    for path in paths:
        before = len(runs) + len(problems)
        is_folder = os.path.isdir(path) and not is_record(path)
        for source in _inputs_in(path) if is_folder else [path]:
            try:
                found = _read(source, given)
                # A log that only lies in a folder may be any program's: it counts with a rate, or where it says its size.
                runs += [run for run in found if run.rate or run.gpus or not (is_folder and run.kind == "log")]
            except UserError as error:
                problems += [] if is_folder and source.suffix in LOG_SUFFIXES else [str(error)]
        if len(runs) + len(problems) == before:
            problems.append(f"{path}: neither a run directory nor a log, or a folder of them")
    sizes = sorted({run.gpus for run in runs if not run.nodes} - {0})
    if given.nodes and len(sizes) > 1:
        counts = ", ".join(map(str, sizes))
        raise UserError(
            f"--nodes {given.nodes}: inputs that don't state their nodes have {counts} GPUs; give --gpus_per_node"
        )
    completed = []
    for run in runs:
        try:
            completed.append(_complete(run, given))
        except UserError as error:
            problems.append(str(error))
    if not completed:
        raise UserError("; ".join(problems))
    for problem in problems:
        print(f"warning: {problem}; going on without it", file=sys.stderr)
    return _each_once(completed)


def _read(path: Path, given: argparse.Namespace) -> list[Run]:
    """Runs of one input."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file or directory")
    if is_record(path) or path.suffix == ".jsonl":
        return [read_record(path, given.micro_batch)]
    if path.suffix.lower() in TABLE_SUFFIXES:
        return read_table_runs(path)
    return read_log(path, given.warmup_steps, given.gpus or (given.nodes or 0) * (given.gpus_per_node or 0))


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
    return replace(
        run, nodes=nodes, gpus=gpus, batch_per_gpu=batch, micro_batch=run.micro_batch or (batch and batch // run.accumulation),
        step_time_s=run.step_time_s or of_log, model=preset_of(run.model or given.model or ""),
        peak_tflops=run.peak_tflops or given.peak_tflops,
    )  # fmt: skip


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


INPUT_OPTIONS = ("--nodes", "--gpus", "--gpus_per_node", "--model", "--micro_batch", "--peak_tflops", "--warmup_steps")
MACHINE_OPTIONS = ("--node_gbytes_per_s",)
PRICE_OPTIONS = ("--samples", "--price_per_gpu_hour")
_OPTIONS: dict[str, dict[str, Any]] = {
    "inputs": {"nargs": "+", "type": Path, "help": "run directories, logs, folders of them, sweeps, tables"},
    "directories": {"nargs": "+", "type": Path, "metavar": "RUN_DIRECTORY"},
    "a": {"type": Path, "metavar": "A", "help": "run directory, folder of them, DeepSpeed log or table"},
    "b": {"type": Path, "metavar": "B", "help": "another"},
    "--nodes": {"type": whole_number(), "help": "node count of inputs that don't state it"},
    "--gpus": {"type": whole_number(), "help": "GPU count (all nodes together) of inputs that don't state it"},
    "--gpus_per_node": {"type": whole_number(), "help": "for inputs that don't state nodes or GPUs"},
    "--model": {"type": preset_of, "help": "of logs that don't state it: a preset, or as published (HTSAT-tiny-Roberta-base)"},
    "--micro_batch": {"type": whole_number(), "help": "samples per GPU and micro-step where not stated"},
    "--warmup_steps": {"type": int, "default": 10, "help": "steps of a log to drop at each start (default 10)"},
    "--baseline_nodes": {"type": whole_number(), "help": "node count that is 100 %% (default: the smallest)"},
    "--target": {"type": positive, "metavar": "PERCENT", "help": "mark scales whose efficiency is below it"},
    "--csv": {"type": Path, "help": "write the table here"},
    "--markdown": {"type": Path, "help": "write what is printed here"},
    "--output": {"type": Path, "help": "picture to write: .png, .svg or .pdf"},
    "--samples": {"type": positive, "help": "samples to train on, each pass counted"},
    "--price_per_gpu_hour": {"type": positive, "help": "money for an hour of one GPU"},
    "--node_gbytes_per_s": {"type": positive, "default": 80, "help": "of all links into a node (default 80, a GH200 node's)"},
    "--peak_tflops": {"type": positive, "help": "dense peak of one GPU where not stated"},
}  # fmt: skip
"""Every option of every command here."""


def add_options(parser: argparse.ArgumentParser, *names: str, required: str = "", **changes: Mapping[str, Any]) -> None:
    """Options of those that all commands share, with what a command changes of one by its name; the `required` one is in a
    group of its own, called so."""
    for name in dict.fromkeys(names):
        settings = {**_OPTIONS[name], **changes.get(name.lstrip("-"), {})}
        if name == required:
            parser.add_argument_group("required").add_argument(name, **settings, required=True)
        else:
            parser.add_argument(name, **settings)


def parse_options(
    description: str, *names: str, required: str = "", **changes: Mapping[str, Any]
) -> argparse.Namespace:
    """Options of a command; arguments as of `add_options`."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, *names, required=required, **changes)
    return parser.parse_args()
