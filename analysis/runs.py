"""Reads runs from what there is: this project's run directories, logs, and tables of either.

The one way to measured numbers, and the one place of options, for every command here. A run directory's counts come from its
record; a log's from the launcher's or the engine's lines, else from the options or its name.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.record import is_record, read_record
from clap_ds.analysis.table import Run, count_of
from clap_ds.analysis.training_log import read_log
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.config.model_names import preset_names, preset_of
from clap_ds.record.schema import RECORD_FILES

DEPTH = 4
"""Folders down to the runs of a sweep: sweeps/NAME/runs/RUN of `runs`."""
TABLE_SUFFIXES = (".csv", ".tsv")
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
"""Of files that are looked into where a folder is given."""
SAME_RATE = 0.05
"""Difference up to which a log's rate can be its run directory's: not both need be read to the same digit."""
MOST_SHOWN = 5
"""Of inputs that come again."""


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
        for source in _inputs_in(path, problems) if is_folder else [_record_around(path)]:
            try:
                found = _read(source, given)
                # A log that only lies in a folder may be any program's: it counts with a rate, or where it says its size.
                runs += [run for run in found if run.rate or run.gpus or not (is_folder and run.kind == "log")]
            except UserError as error:
                problems += [] if is_folder and source.suffix in LOG_SUFFIXES else [str(error)]
        if len(runs) + len(problems) == before:
            problems.append(f"{path}: neither a run directory nor a log, or a folder of them")
    _refuse_one_count(runs, given)
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
    return read_table_runs(path) if path.suffix.lower() in TABLE_SUFFIXES else read_log(path, given.warmup_steps)


def _record_around(path: Path) -> Path:
    """The run directory that a file is part of, or the path itself."""
    of_record = path.name in (*RECORD_FILES, "rank0.log")
    summed_up = any(os.path.isfile(path.parent / name) for name in RECORD_FILES if name.endswith(".json"))
    return path.parent if of_record and summed_up else path


def _inputs_in(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Run directories and logs in a folder, in the order of their names; folders that can't be read go to the problems."""

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: can't be read ({error.strerror})")

    for place, inside, files in os.walk(folder, onerror=unreadable):
        here = Path(place)
        if is_record(here):
            inside.clear()
            yield here
        else:
            inside[:] = sorted(inside) if len(here.relative_to(folder).parts) < DEPTH else []
            logs = (here / name for name in sorted(files) if Path(name).suffix.lower() in LOG_SUFFIXES)
            yield from (log for log in logs if not log.is_symlink())


def _each_once(runs: Sequence[Run]) -> list[Run]:
    """The runs without copies (all that is known of them is the same, and they measured something or ended), and without those
    of logs that name a run directory which is there, too, or has another log."""
    groups: dict[object, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.kind == "log"):
        told = run.rate or run.finished or run.kind == "table"
        key = next((key for key, group in groups.items() if run.directory and _is_log_of(run, group[0])), None)
        groups.setdefault(key or repr(replace(run, source="" if told else run.source)), []).append(run)
    again = dict.fromkeys(", ".join(run.source for run in group) for group in groups.values() if len(group) > 1)
    if again:
        more = f"; and {len(again) - MOST_SHOWN} more" if len(again) > MOST_SHOWN else ""
        print(f"note: the same run, counted once: {'; '.join([*again][:MOST_SHOWN])}{more}", file=sys.stderr)
    return [next((run for run in group if run.rate), group[0]) for group in groups.values()]


def _is_log_of(log: Run, other: Run) -> bool:
    """Whether both are of the run directory that the log names, and nothing says otherwise."""
    alike = not (log.rate and other.rate) or abs(log.rate / other.rate - 1) < SAME_RATE
    return Path(log.directory).name in (other.name, Path(other.directory).name) and log.gpus == other.gpus and alike


_IN_NAME = {
    "nodes": re.compile(r"(?<![a-z0-9])(?:n(?:odes)?[-_=]?0*(\d+)|0*(\d+)[-_]?n(?:odes?)?)(?![a-z0-9])"),
    "gpus": re.compile(r"(?<![a-z0-9])(?:gpus[-_=]?0*(\d+)|0*(\d+)[-_]?gpus?)(?![a-z0-9])"),
}


def _count_in_name(what: str, source: str) -> int:
    """A count that a file's name, or else its folder's, says once: `n4.log`, `4nodes/`, `nodes-4_8gpus.out`; else 0."""
    for part in (Path(source).name, Path(source).parent.name):
        counts = {int(before or after) for before, after in _IN_NAME[what].findall(part.casefold())}
        if counts:
            return counts.pop() if len(counts) == 1 else 0
    return 0


def _refuse_one_count(runs: Sequence[Run], given: argparse.Namespace) -> None:
    """One `--nodes` or `--gpus` for inputs of several scales, by what they state or their names, would put them all at one."""
    words = {"nodes": "nodes", "gpus": "GPUs"}
    for name in words:
        lacking = [run for run in runs if getattr(given, name) and not getattr(run, name)]
        for what, word in words.items():
            sizes = sorted({getattr(run, what) or _count_in_name(what, run.source) for run in lacking} - {0})
            if len(sizes) > 1:
                lack = f"inputs that don't state their {words[name]} have {', '.join(map(str, sizes))} {word}"
                raise UserError(f"--{name} {getattr(given, name)}: {lack}; give --gpus_per_node instead")


def _complete(run: Run, given: argparse.Namespace) -> Run:
    """Fill what the input left out from what the user gave, then from its name, and insist on the counts."""
    per_node, named = given.gpus_per_node or 0, {what: _count_in_name(what, run.source) for what in _IN_NAME}
    gpus = (
        run.gpus
        or given.gpus
        or (run.nodes or given.nodes or 0) * per_node
        or named["gpus"]
        or named["nodes"] * per_node
    )
    if per_node and gpus % per_node and not run.nodes:
        raise UserError(f"{run.source}: {gpus} GPUs are no multiple of --gpus_per_node {per_node}")
    nodes = run.nodes or (gpus // per_node if per_node else given.nodes) or int(gpus == 1) or named["nodes"]
    counts = {"number of nodes (--nodes, --gpus_per_node)": nodes, "number of GPUs (--gpus)": gpus}
    if missing := [what for what, count in counts.items() if not count]:
        raise UserError(f"{run.source}: doesn't state the {' and the '.join(missing)}; give it")
    if gpus < nodes:
        raise UserError(f"{run.source}: {gpus} GPUs on {nodes} nodes; expected at least one per node")
    notes = [run.notes]
    if not (run.gpus or given.gpus) and gpus == named["gpus"]:
        notes.append(f"{gpus} GPUs by its name")
    if not (run.nodes or given.nodes or (per_node and (run.gpus or given.gpus))) and nodes == named["nodes"]:
        notes.append(f"{count_of(nodes, 'node')} by its name")
    if run.kind == "log" and not run.gpus:
        run = _per_gpu(run, gpus)
    batch = run.batch_per_gpu or (given.micro_batch and given.micro_batch * run.accumulation)
    step_s = run.step_time_s or (batch / run.rate if run.kind == "log" and run.rate and batch else None)
    return replace(
        run, nodes=nodes, gpus=gpus, batch_per_gpu=batch, step_time_s=step_s, notes="; ".join(filter(None, notes)),
        model=preset_of(run.model or given.model or ""), peak_tflops=run.peak_tflops or given.peak_tflops,
        micro_batch=run.micro_batch or (batch and batch // run.accumulation),
    )  # fmt: skip


def _per_gpu(run: Run, gpus: int) -> Run:
    """A run whose rates and batch are those of all of its GPUs, as its log didn't say how many."""
    rate, engine = (value and value / gpus for value in (run.rate, run.engine_samples_per_s_per_gpu))
    return replace(
        run, samples_per_s_per_gpu=rate, engine_samples_per_s_per_gpu=engine,
        interval=run.interval and (run.interval[0] / gpus, run.interval[1] / gpus),
        windows=tuple(value / gpus for value in run.windows), batch_per_gpu=(run.batch_per_gpu or 0) // gpus or None,
    )  # fmt: skip


def _model(name: str) -> str:
    """A model's name, of others' models, too; one that is nearly a preset's is doubted on stderr."""
    preset, known = preset_of(name), preset_names()
    if preset not in known and (near := did_you_mean(name.casefold().replace("-", "_"), known, most_listed=0)):
        print(f"warning: --model {name}: not a preset{near}", file=sys.stderr)
    return preset


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
    "--model": {"type": _model, "help": "of logs that don't state it: a preset, or as published (HTSAT-tiny-Roberta-base)"},
    "--micro_batch": {"type": whole_number(), "help": "samples per GPU and micro-step where not stated"},
    "--warmup_steps": {"type": int, "default": 10, "help": "steps of a log to drop at each start (default 10)"},
    "--baseline_nodes": {"type": whole_number(), "help": "node count that is 100 %% (default: the smallest)"},
    "--rate": {"choices": ("measured", "engine"), "default": "measured", "help": "engine: as DeepSpeed's timer counts"},
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
