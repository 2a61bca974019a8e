"""Reads runs from what there is: this project's run directories, DeepSpeed logs, and tables of either.

The one way to measured numbers, and the one place of options, for every other command here. As a command it lists what
it found:

    python analysis/runs.py runs/ slurm-*.out [--nodes 2 --gpus 8]

A run directory's counts come from its record; a log's from the launcher's or the engine's lines, else from `--nodes`
and `--gpus`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.deepspeed_log import read_log
from clap_ds.analysis.record import is_record, read_record
from clap_ds.analysis.table import Run, count_of, read_table_runs
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import UserError, run_alone

DEPTH = 4
"""Folders down to the runs of a sweep: sweeps/NAME/runs/RUN of `runs`."""
MOST_SHOWN = 5
"""Of inputs that come again."""


def read_runs(paths: Sequence[Path], given: argparse.Namespace) -> list[Run]:
    """Runs of run directories, folders of them (a sweep's, too), DeepSpeed logs (plain or gzip) and CSV tables.

    `given` holds the values of `INPUT_OPTIONS`: what to assume where an input doesn't say. A path without a run is named
    on stderr and the rest goes on, but for a folder whose neighbour has runs: `runs/*` names the jobs' folder, too. An input
    that comes again, as it is or as a copy, counts once, and that is said. UserError where none has a run.
    """
    runs: list[Run] = []
    problems: dict[Path, str] = {}
    same: dict[object, list[Path]] = {}
    fruitful: set[Path] = set()
    without: set[Path] = set()
    for path in paths:
        sources = [*_records_in(path, problems)] if os.path.isdir(path) and not is_record(path) else [path]
        if not sources and path not in problems:
            problems[path] = f"{path}: neither a run directory nor a folder of them"
            without.add(path)
        for source in sources:
            try:
                group = same.get(source.resolve())
                if group is None:
                    found = [_complete(run, given) for run in _read(source, given)]
                    group = same[source.resolve()] = same.setdefault(_content(source, found), [])
                    runs += [] if group else found
                group.append(source)
                fruitful.add(path.absolute().parent)
            except UserError as error:
                problems[source] = str(error)
    if not runs:
        raise UserError("; ".join(problems.values()))
    for path, problem in problems.items():
        if not (path in without and path.absolute().parent in fruitful):
            print(f"warning: {problem}; going on without it", file=sys.stderr)
    groups = list({id(group): group for group in same.values()}.values())
    if any(len(group) > 1 for group in groups):
        print(f"note: {_say_same(groups)}", file=sys.stderr)
    return runs


def _content(source: Path, runs: Sequence[Run]) -> object:
    """What only copies of an input have in common: measured windows, or when it ended, with all that is known of it; else the
    bytes of a file. A killed run without either is like no other."""
    if all(run.windows or run.finished for run in runs):
        return repr([replace(run, source="") for run in runs])
    if source.is_dir() or not source.is_file():  # a pipe can't be read twice
        return source.resolve()
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _say_same(groups: Sequence[Sequence[Path]]) -> str:
    """`2 of 5 inputs are the same run: a, b; it counts once`, for as many as there are."""
    again = [group for group in groups if len(group) > 1]
    shown = [
        ", ".join(f"{path} ({n} times)" if n > 1 else str(path) for path, n in Counter(group).items())
        for group in again
    ]
    total, more = sum(map(len, groups)), f"; and {len(again) - MOST_SHOWN} more" if len(again) > MOST_SHOWN else ""
    runs, each = ("the same run", "it") if len(again) == 1 else (f"{len(again)} runs", "each")
    return f"{sum(map(len, again))} of {total} inputs are {runs}: {'; '.join(shown[:MOST_SHOWN])}{more}; {each} counts once"


def _read(path: Path, given: argparse.Namespace) -> list[Run]:
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file or directory")
    if is_record(path):
        return [read_record(path)]
    return (
        read_table_runs(path)
        if path.suffix.lower() in (".csv", ".tsv")
        else read_log(path, given.warmup_steps, given.gpus)
    )


def _records_in(folder: Path, problems: dict[Path, str], depth: int = DEPTH) -> Iterator[Path]:
    """Run directories somewhere in a folder, in the order of their names; folders that can't be read go to the problems."""
    try:
        inside = sorted(path for path in folder.iterdir() if os.path.isdir(path) and not path.is_symlink())
    except OSError as error:
        problems[folder] = f"{folder}: can't be read ({error.strerror})"
        return
    for path in inside:
        if is_record(path):
            yield path
        elif depth > 1:
            yield from _records_in(path, problems, depth - 1)


def _complete(run: Run, given: argparse.Namespace) -> Run:
    """Fill what the input left out from what the user gave, and insist on the counts."""
    nodes, gpus = run.nodes or given.nodes, run.gpus or given.gpus
    counts = {"number of nodes (--nodes)": nodes, "number of GPUs (--gpus)": gpus}
    if missing := [what for what, count in counts.items() if not count]:
        raise UserError(f"{run.source}: doesn't state the {' and the '.join(missing)}; give it")
    if gpus < nodes:
        raise UserError(f"{run.source}: {gpus} GPUs on {nodes} nodes; expected at least one per node")
    batch = run.batch_per_gpu or (given.micro_batch and given.micro_batch * run.accumulation)
    step_s = batch / run.rate if run.kind == "log" and run.rate and batch else run.step_time_s
    model, peak = run.model or given.model or "", run.peak_tflops or given.peak_tflops
    return replace(run, nodes=nodes, gpus=gpus, batch_per_gpu=batch, step_time_s=step_s, model=model, peak_tflops=peak)


PROJECTED_GPUS = (256, 512, 1024, 2048, 4096)
FIT_NODES = 16
INPUT_OPTIONS = ("--nodes", "--gpus", "--model", "--micro_batch", "--peak_tflops", "--warmup_steps")
MACHINE_OPTIONS = (
    "--node_gbytes_per_s", "--gpu_gbytes_per_s", "--latency_us", "--peak_tflops", "--memory_tbytes_per_s",
)  # fmt: skip
PRICE_OPTIONS = ("--samples", "--price_per_gpu_hour", "--currency", "--price_source")
COST_OPTIONS = (*PRICE_OPTIONS, "--deadline_hours")
_OPTIONS: dict[str, dict[str, Any]] = {
    "inputs": {"nargs": "+", "type": Path, "help": "run directories, folders of them, sweeps, DeepSpeed logs, tables"},
    "tables": {"nargs": "+", "type": Path, "metavar": "TABLE", "help": "of efficiency.py, or published"},
    "directories": {"nargs": "+", "type": Path, "metavar": "RUN_DIRECTORY"},
    "a": {"type": Path, "metavar": "A", "help": "run directory, folder of them, DeepSpeed log or table"},
    "b": {"type": Path, "metavar": "B", "help": "another"},
    "--run_spread": {
        "type": positive,
        "metavar": "PERCENT",
        "help": "standard deviation of runs of one configuration, where there are no repeats to show it",
    },
    "--nodes": {"type": whole_number(), "help": "node count of logs that don't state it"},
    "--gpus": {"type": whole_number(), "help": "GPU count (all nodes together) of logs that don't state it"},
    "--model": {"help": "model preset of logs, which never state it (htsat_tiny_roberta_base, …)"},
    "--micro_batch": {"type": whole_number(), "help": "samples per GPU and micro-step where not stated"},
    "--warmup_steps": {"type": int, "default": 10, "help": "steps of a log to drop at each start (default 10)"},
    "--baseline_nodes": {"type": whole_number(), "help": "node count that is 100 %% (default: the smallest)"},
    "--csv": {"type": Path, "help": "write the table here"},
    "--markdown": {"type": Path, "help": "write what is printed here"},
    "--output": {"type": Path, "help": "picture to write: .png, .svg, .pdf or .html"},
    "--no_published": {"action": "store_true", "help": "leave the published curves out"},
    "--samples": {"type": positive, "help": "samples to train on, each pass counted"},
    "--price_per_gpu_hour": {"type": positive, "help": "money for an hour of one GPU"},
    "--currency": {"help": "of the price: EUR, …"},
    "--price_source": {"help": "whose price it is, and of when"},
    "--deadline_hours": {"type": positive, "help": "name the cheapest scale that meets it"},
    "--series": {
        "metavar": "NAME",
        "help": "of the series in a table that holds several: its model, or part of its title",
    },
    "--fit_nodes": {
        "type": whole_number(),
        "default": FIT_NODES,
        "help": "hold-out: largest scale fitted (default 16)",
    },
    "--project_gpus": {"type": whole_number(), "nargs": "+", "default": PROJECTED_GPUS, "metavar": "GPUS"},
    "--faster_rate": {"type": positive, "help": "samples/s/GPU of a faster step (default: 5 times)"},
    "--num_parameters": {"type": positive, "help": "trained parameters, for models not published"},
    "--joint_dim": {"type": whole_number(), "help": "width of the joint embedding, for models not published"},
    "--gradient_bytes": {"type": int, "choices": (2, 4), "default": 4, "help": "per gradient on the network"},
    "--no_overlap": {"action": "store_true", "help": "the all-reduce was not overlapped with backward"},
    "--loss": {"choices": ("gather_with_grad", "exact_local"), "default": "gather_with_grad"},
    "--node_gbytes_per_s": {"type": positive, "default": 80, "help": "into one node (default 80)"},
    "--gpu_gbytes_per_s": {"type": positive, "default": 150, "help": "between a node's GPUs"},
    "--latency_us": {"type": positive, "default": 10, "help": "of a hop between nodes"},
    "--peak_tflops": {"type": positive, "help": "dense peak of one GPU where not stated"},
    "--memory_tbytes_per_s": {"type": positive, "default": 4, "help": "of one GPU's memory"},
}
"""Every option of every command here."""


def add_options(parser: argparse.ArgumentParser, *names: str, required: str = "") -> None:
    """Options of those that all commands share."""
    for name in dict.fromkeys(names):
        parser.add_argument(name, **(_OPTIONS[name] | ({"required": True} if name == required else {})))


def parse_options(description: str, *names: str, required: str = "", **defaults: object) -> argparse.Namespace:
    """Options of a command, of those that all commands share; `defaults` are its own."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, *names, required=required)
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main() -> None:
    options = parse_options("List the runs found in run directories, logs and tables.", "inputs", *INPUT_OPTIONS)
    for run in read_runs(options.inputs, options):
        size = f"{count_of(run.nodes, 'node')} × {run.gpus} {run.unit}"
        print(f"{run.source}: {run.model or 'model not stated'}, {size}, {run.state}")
        if run.rate is not None:
            low, high = run.interval or (0.0, 0.0)
            between = f" ({low:.5g}–{high:.5g}, {run.uncertainty_from})" if run.interval else ""
            print(f"  {run.rate:.5g} samples/s/GPU{between}")
        for note in filter(None, run.notes.split("; ")):
            print(f"  {note}")


if __name__ == "__main__":
    run_alone(main)
