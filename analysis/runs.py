"""Read runs from run directories, logs and tables."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from clap_ds.analysis.published import PUBLISHED_CONTEXT_LENGTH, training_gflops
from clap_ds.analysis.read_run import BY_TIMER, is_record, read_record
from clap_ds.analysis.table import Run, noted, read_table_runs
from clap_ds.analysis.training_log import read_log, read_log_lines
from clap_ds.config.arguments import make_parser, positive, whole_number
from clap_ds.config.model_names import preset_of
from clap_ds.flop_count.device_specs import peak_for
from clap_ds.utils.errors import UserError, printable

_NAMED = re.compile(r"(?<![a-z0-9])(nodes?|n|gpus?)[-_=]?(\d{1,9})(?![a-z0-9])")


def read_runs(paths: Sequence[Path], given: argparse.Namespace) -> list[Run]:
    """Read the runs of run directories, logs, folders of them (such as sweeps) and CSV tables.

    `given`: options of `input_parser`, for what inputs don't state. An input without runs causes a
    warning, as does a log in a folder without run directories. A log is ignored if its run
    directory is also an input. UserError if no input has a run.
    """
    problems = dict[Path, str]()
    runs = list[Run]()
    try:
        sources = dict.fromkeys(source for path in paths for source in _inputs_in(path))
    except RecursionError:
        raise UserError(f"{', '.join(map(str, paths))}: folders are nested too deeply") from None
    for source in sources:
        try:
            runs += [_complete(run, given) for run in _read(source, given)]
        except UserError as error:
            problems[source] = str(error)
    if not runs:
        raise UserError(
            "; ".join(problems.values())
            or f"{', '.join(map(str, paths))}: found neither run directories nor logs"
        )
    records = {run.name for run in runs if run.kind == "record"}
    for source, problem in problems.items():
        if source in paths or not records:  # jobs' outputs lie next to their run directories
            print(f"warning: {printable(problem)}; skipping it", file=sys.stderr)
    return _drop_copies([run for run in runs if Path(run.directory).name not in records])


def _drop_copies(runs: Sequence[Run]) -> list[Run]:
    """Return runs once, with a note on their copies: records of the same end and windows, logs of
    the same words, and tables of the same rows."""
    copies: dict[tuple[object, ...], list[list[Run]]] = {}
    for source, members in groupby(runs, attrgetter("source")):
        rows = [*members]  # several of a table, else one
        run = rows[0]
        identity: object = str([replace(row, source="") for row in rows])
        if run.kind == "record":
            identity = (
                (run.finished, run.windows, run.rate) if run.finished or run.windows else source
            )
        elif run.kind == "log":
            words = hashlib.sha256()
            for line in read_log_lines(Path(source)):  # editors and transfers change line ends
                words.update(f"{' '.join(line.split())} ".encode() if line.strip() else b"")
            identity = words.digest()
        copies.setdefault((run.gpus, run.nodes, identity), []).append(rows)
    return [
        noted(run, f"counts once: {len(others)} of its copies are also inputs") if others else run
        for first, *others in copies.values()
        for run in first
    ]


def _inputs_in(path: Path) -> Iterator[Path]:
    """Yield the run directories and logs below a folder, sorted by name; or the path itself."""
    if is_record(path) or not path.is_dir():
        yield path
        return
    for name in sorted(os.listdir(path)):
        inside = path / name
        is_hidden = name.startswith(".") or inside.is_symlink()  # caches of compiled code, `latest`
        if not is_hidden and (inside.suffix.lower() in (".log", ".out") or inside.is_dir()):
            yield from _inputs_in(inside)


def _read(path: Path, given: argparse.Namespace) -> list[Run]:
    if is_record(path):
        return [read_record(path)]
    return (
        read_table_runs(path)
        if path.suffix.lower() in (".csv", ".tsv")
        else [_read_log(path, given)]
    )


def _read_log(path: Path, given: argparse.Namespace) -> Run:
    """Read a log. If it doesn't state nodes or GPUs, its name or folder may: `n2.log`,
    `n2-gpus8.log`, `nodes_4/slurm.out`."""
    counts = _NAMED.findall(path.name.lower()) or _NAMED.findall(
        path.absolute().parent.name.lower()
    )
    named = {
        "gpus" if unit.startswith("g") else "nodes": int(count) for unit, count in reversed(counts)
    }
    if given.nodes or given.gpus:
        named = {}
    nodes = given.nodes or named.get("nodes", 0)
    per_node = given.gpus_per_node or 0
    gpus = given.gpus or named.get("gpus") or nodes * per_node
    run = read_log(path, gpus, given.batch_per_gpu or 0)
    if run.nodes or not named or (run.gpus and "nodes" not in named):  # the log states more
        return run
    return noted(
        replace(run, nodes=0 if per_node else nodes, gpus=run.gpus or gpus),
        "scale by the log's name",
    )


def _complete(run: Run, given: argparse.Namespace) -> Run:
    """Fill in missing fields from the user's options. UserError if nodes or GPUs are unknown."""
    per_node = given.gpus_per_node or 0
    gpus = run.gpus or given.gpus or (given.nodes or 0) * per_node
    nodes = run.nodes or (gpus / per_node if per_node else given.nodes) or int(gpus == 1)
    if not (gpus >= nodes > 0 and nodes % 1 == 0):
        found = f"found {gpus or 'unknown'} GPUs on {nodes or 'unknown'} nodes"
        told = "pass --nodes and --gpus, or --gpus_per_node, for inputs that don't state them"
        raise UserError(f"{run.source}: {found}; {told}")
    batch = run.batch_per_gpu
    peak_tflops = run.peak_tflops or given.peak_tflops
    if peak_tflops is None and run.kind == "log" and (gpu := peak_for(run.device)):
        peak_tflops = gpu.bf16_tflops
    of_log = batch / run.rate if run.kind == "log" and run.rate and batch else None
    run = replace(
        run, nodes=int(nodes), gpus=gpus, micro_batch=run.micro_batch or (batch and batch // run.accumulation),
        step_time_s=run.step_time_s or of_log, model=preset_of(run.model or given.model or ""),
        peak_tflops=peak_tflops,
    )  # fmt: skip
    run = _with_mfu(run, run.context_length or given.context_length) if run.kind == "log" else run
    return _by_deepspeed(run) if given.rate == "deepspeed" else run


def _with_mfu(run: Run, context_length: int) -> Run:
    """Fill in TFLOPS and model MFU of a log if its model is known."""
    if not (run.rate and (gflops := training_gflops(run.model, context_length))):
        return run
    tflops = run.rate * gflops / 1000
    mfu = 100 * tflops / run.peak_tflops if run.peak_tflops else None
    return replace(
        run, achieved_tflops=tflops, mfu_model_percent=mfu, context_length=context_length
    )


def _by_deepspeed(run: Run) -> Run:
    """Replace the measured rate by DeepSpeed's. TFLOPS and MFU are then known for logs only."""
    rate = run.deepspeed_samples_per_s_per_gpu
    run = replace(run, samples_per_s_per_gpu=rate)
    if run.kind == "record":
        run = replace(run, achieved_tflops=None, mfu_model_percent=None)
    if BY_TIMER in run.notes and rate:
        return run
    return noted(run, BY_TIMER if rate else "no rate from DeepSpeed's timer")


def input_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that reads runs: `inputs`, and values for what they don't
    state."""
    parser = make_parser(doc)
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="run directories, logs, folders of them, sweeps, tables",
    )
    rate = "use the throughput that this project measured, or that of DeepSpeed's timer"
    add(
        "--rate", type=_parse_rate, choices=("measured", "deepspeed"), default="measured", help=rate
    )
    add = parser.add_argument_group("for inputs that don't state it").add_argument
    add("--nodes", type=whole_number(), metavar="N", help="set the number of nodes")
    add("--gpus", type=whole_number(), metavar="N", help="set the total number of GPUs")
    add(
        "--gpus_per_node",
        type=whole_number(),
        metavar="N",
        help="set GPUs per node, instead of nodes or GPUs",
    )
    add("--batch_per_gpu", type=whole_number(), metavar="N", help="set samples per step and GPU")
    model = "set the model of logs: a preset or a published name, such as HTSAT-tiny-Roberta-base"
    add("--model", type=preset_of, metavar="NAME", help=model)
    tokens = "set the caption length of logs in tokens, for TFLOPS and MFU"
    add(
        "--context_length",
        type=whole_number(),
        default=PUBLISHED_CONTEXT_LENGTH,
        metavar="N",
        help=tokens,
    )
    peak = "set the dense peak of one GPU in TFLOPS, or its name, such as H200, for MFU"
    add("--peak_tflops", type=peak_argument, metavar="TFLOPS", help=peak)
    return parser


def _parse_rate(text: str) -> str:
    return "deepspeed" if text == "engine" else text  # its former name


def peak_argument(text: str) -> float:
    return gpu.bf16_tflops if (gpu := peak_for(text)) else positive(text)
