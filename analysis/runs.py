"""Read runs from run directories, logs and tables."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from clap_ds.analysis.published import PUBLISHED_CONTEXT_LENGTH, training_gflops
from clap_ds.analysis.read_run import is_record, read_record
from clap_ds.analysis.table import BY_TIMER, Run, add_note, read_table_runs
from clap_ds.analysis.training_log import read_log, read_log_lines
from clap_ds.config.arguments import make_parser, positive, whole_number
from clap_ds.config.model_names import find_preset
from clap_ds.flop_count.device_specs import find_peak
from clap_ds.utils.errors import UserError, printable

_NAMED_COUNT = re.compile(r"(?<![a-z0-9])(nodes?|n|gpus?)[-_=]?(\d{1,9})(?![a-z0-9])")


def read_runs(paths: Sequence[Path], options: argparse.Namespace) -> list[Run]:
    """Read the runs of run directories, logs, folders of them (such as sweeps) and CSV tables.

    `options`: those of `input_parser`, for what inputs don't state. An input without runs causes a
    warning, as does a log in a folder without run directories. A log is ignored if its run
    directory is also an input. UserError if no input has a run.
    """
    names = ", ".join(map(str, paths))
    # A path that is given twice, or lies below another, is read once.
    sources = dict[Path, None]()
    try:
        for path in paths:
            sources |= dict.fromkeys(_find_inputs(path))
    except RecursionError:
        raise UserError(f"{names}: folders are nested too deeply") from None
    problems = dict[Path, str]()
    runs = list[Run]()
    for source in sources:
        try:
            runs += [_complete(run, options) for run in _read(source, options)]
        except UserError as error:
            problems[source] = str(error)
    if not runs:
        reasons = "; ".join(problems.values())
        raise UserError(reasons or f"{names}: found neither run directories nor logs")
    records = {run.name for run in runs if run.kind == "record"}
    for source, problem in problems.items():
        # Outputs of jobs, which aren't logs, lie next to their run directories.
        if source in paths or not records:
            print(f"warning: {printable(problem)}; skipping it", file=sys.stderr)
    return _drop_copies([run for run in runs if Path(run.directory).name not in records])


def _drop_copies(runs: Sequence[Run]) -> list[Run]:
    """Return runs once, with a note on their copies: records of the same end and windows, logs of
    the same words, and tables of the same rows."""
    # By identity: each source's rows.
    copies = defaultdict[object, list[list[Run]]](list)
    # A table has several rows, other sources have one run.
    for _, members in groupby(runs, attrgetter("source")):
        rows = [*members]
        copies[rows[0].gpus, rows[0].nodes, _identify(rows)].append(rows)
    unique = list[Run]()
    for sources in copies.values():
        for run in sources[0]:
            if len(sources) > 1:
                run = add_note(
                    run, f"counts once: {len(sources) - 1} of its copies are also inputs"
                )
            unique.append(run)
    return unique


def _identify(rows: Sequence[Run]) -> object:
    """Return what a source has in common with its copies."""
    run = rows[0]
    if run.kind == "record":
        # An unfinished run without windows has nothing to compare.
        if run.finished or run.windows:
            return run.finished, run.windows, run.rate
        return run.source
    if run.kind == "table":
        return str([replace(row, source="") for row in rows])
    # Editors and transfers change line ends.
    words = hashlib.sha256()
    for line in read_log_lines(Path(run.source)):
        words.update("".join(f"{word} " for word in line.split()).encode())
    return words.digest()


def _find_inputs(path: Path) -> Iterator[Path]:
    """Yield the run directories and logs below a folder, sorted by name; or the path itself."""
    if is_record(path) or not path.is_dir():
        yield path
        return
    for name in sorted(os.listdir(path)):
        child = path / name
        # Such as caches of compiled code, and the link `latest`.
        is_hidden = name.startswith(".") or child.is_symlink()
        if not is_hidden and (child.suffix.lower() in (".log", ".out") or child.is_dir()):
            yield from _find_inputs(child)


def _read(path: Path, options: argparse.Namespace) -> list[Run]:
    if is_record(path):
        return [read_record(path)]
    if path.suffix.lower() in (".csv", ".tsv"):
        return read_table_runs(path)
    return [_read_log(path, options)]


def _read_log(path: Path, options: argparse.Namespace) -> Run:
    """Read a log. If it doesn't state nodes or GPUs, its name or folder may: `n2.log`,
    `n2-gpus8.log`, `nodes_4/slurm.out`."""
    nodes = options.nodes or 0
    gpus = options.gpus or 0
    # Options have precedence over names.
    is_named = not (nodes or gpus)
    if is_named:
        names = (path.name, path.absolute().parent.name)
        counts = next(filter(None, (_NAMED_COUNT.findall(name.lower()) for name in names)), [])
        # The first count of a unit, of several.
        for unit, count in reversed(counts):
            if unit.startswith("g"):
                gpus = int(count)
            else:
                nodes = int(count)
        is_named = bool(counts)
    names_nodes = is_named and nodes > 0
    gpus_per_node = options.gpus_per_node or 0
    gpus = gpus or nodes * gpus_per_node
    run = read_log(path, gpus, options.batch_per_gpu or 0)
    # The log's own counts have precedence.
    if not is_named or run.nodes or (run.gpus and not names_nodes):
        return run
    # They follow from the GPUs.
    if gpus_per_node:
        nodes = 0
    return add_note(replace(run, nodes=nodes, gpus=run.gpus or gpus), "scale by the log's name")


def _complete(run: Run, options: argparse.Namespace) -> Run:
    """Fill in missing fields from the user's options. UserError if nodes or GPUs are unknown."""
    # Tables and records state these, logs may not.
    run = _complete_scale(run, options)
    run = replace(run, model=find_preset(run.model or options.model or ""))
    if run.batch_per_gpu:
        micro_batch = run.micro_batch or run.batch_per_gpu // run.accumulation
        run = replace(run, micro_batch=micro_batch)
    peak_tflops = run.peak_tflops or options.peak_tflops
    if run.kind == "log":
        gpu = find_peak(run.device)
        if peak_tflops is None and gpu:
            # This project's logs name their GPU.
            peak_tflops = gpu.bf16_tflops
        if run.rate and run.batch_per_gpu:
            run = replace(run, step_time_s=run.batch_per_gpu / run.rate)
    run = replace(run, peak_tflops=peak_tflops)
    if run.kind == "log":
        run = _add_mfu(run, run.context_length or options.context_length)
    return _use_deepspeed_rate(run) if options.rate == "deepspeed" else run


def _complete_scale(run: Run, options: argparse.Namespace) -> Run:
    nodes = run.nodes
    gpus = run.gpus or options.gpus or 0
    if options.gpus_per_node:
        if not gpus and options.nodes:
            gpus = options.nodes * options.gpus_per_node
        nodes = nodes or gpus / options.gpus_per_node
    nodes = nodes or options.nodes or 0
    # One GPU needs no option.
    if gpus == 1:
        nodes = nodes or 1
    if not (gpus >= nodes > 0 and nodes % 1 == 0):
        scale = f"found {gpus or 'unknown'} GPUs on {nodes or 'unknown'} nodes"
        advice = "pass --nodes and --gpus, or --gpus_per_node, for inputs that don't state them"
        raise UserError(f"{run.source}: {scale}; {advice}")
    return replace(run, nodes=int(nodes), gpus=gpus)


def _add_mfu(run: Run, context_length: int) -> Run:
    """Fill in TFLOPS and model MFU of a log if its model is known."""
    gflops = training_gflops(run.model, context_length)
    if not run.rate or not gflops:
        return run
    # GFLOPs per sample × samples/s/GPU.
    tflops = run.rate * gflops / 1000
    run = replace(run, achieved_tflops=tflops, context_length=context_length)
    if not run.peak_tflops:
        return run
    return replace(run, mfu_model_percent=100 * tflops / run.peak_tflops)


def _use_deepspeed_rate(run: Run) -> Run:
    """Replace the measured rate by DeepSpeed's. TFLOPS and MFU are then known for logs only."""
    rate = run.deepspeed_samples_per_s_per_gpu
    run = replace(run, samples_per_s_per_gpu=rate)
    if run.kind == "record":
        # These were computed from the measured rate.
        run = replace(run, achieved_tflops=None, mfu_model_percent=None)
    if not rate:
        return add_note(run, "no rate from DeepSpeed's timer")
    return run if BY_TIMER in run.notes else add_note(run, BY_TIMER)


def input_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that reads runs: `inputs`, and values for what they don't
    state."""
    parser = make_parser(doc)
    inputs = "run directories, logs, folders of them, sweeps, tables"
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help=inputs)
    rate = "use the throughput that this project measured, or that of DeepSpeed's timer"
    choices = ("measured", "deepspeed")
    parser.add_argument("--rate", type=_parse_rate, choices=choices, default=choices[0], help=rate)
    add = parser.add_argument_group("for inputs that don't state it").add_argument
    counts = {
        "--nodes": "set the number of nodes",
        "--gpus": "set the total number of GPUs",
        "--gpus_per_node": "set GPUs per node, instead of nodes or GPUs",
        "--batch_per_gpu": "set samples per step and GPU",
    }
    for name, text in counts.items():
        add(name, type=whole_number(), metavar="N", help=text)
    model = "set the model of logs: a preset or a published name, such as HTSAT-tiny-Roberta-base"
    add("--model", type=find_preset, metavar="NAME", help=model)
    tokens = "set the caption length of logs in tokens, for TFLOPS and MFU"
    default = PUBLISHED_CONTEXT_LENGTH
    add("--context_length", type=whole_number(), default=default, metavar="N", help=tokens)
    peak = "set the dense peak of one GPU in TFLOPS, or its name, such as H200, for MFU"
    add("--peak_tflops", type=_parse_peak, metavar="TFLOPS", help=peak)
    return parser


def _parse_rate(text: str) -> str:
    # `engine` is the former name.
    return "deepspeed" if text == "engine" else text


def _parse_peak(text: str) -> float:
    gpu = find_peak(text)
    return gpu.bf16_tflops if gpu else positive(text)
