"""Options that the commands on a trained model share. Loads torch only for a model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError, printable
from clap_ds.config.model import PRESETS, preset_argument

if TYPE_CHECKING:
    from clap_ds.inference.files import Found
    from clap_ds.inference.model import Clap, Row
    from clap_ds.inference.vectors import About

INPUTS = "folders, audio files, lists of them (.csv, .tsv, .txt, .jsonl), tars and patterns of tars"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_model_options(parser: argparse.ArgumentParser, precision: str = "fp32") -> None:
    """Add which model, and its precision: a default of `DTYPES`, or words for one that is found out later."""
    add, sizes = parser.add_argument, f"the model's sizes, for a file that doesn't say them: {PRESETS}"
    best = "of a folder of checkpoints, the best by its run's best_metric (default: newest)"
    add("--best", action="store_true", help=best)
    add("--tokenizer", metavar="NAME", help="hub name or folder (default: the checkpoint's)")
    add("--preset", type=preset_argument, metavar="NAME", help=sizes)
    known = precision if precision in DTYPES else None
    add("--precision", choices=tuple(DTYPES), default=known, help=f"of the model (default: {precision})")


def make_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0], allow_abbrev=False)


def add_audio_inputs(parser: argparse.ArgumentParser, kinds: str = INPUTS) -> None:
    """Add the checkpoint, what it is to hear, and how."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or file of weights, or a name on the hub")
    add("inputs", nargs="+", metavar="INPUT", help=kinds)
    what = "of longer files: the mean of their windows' vectors, the middle alone, or a row for each window (default: mean)"
    add("--pooling", choices=("mean", "center", "none"), default="mean", help=what)
    add("--overlap", type=number(0, 0.95), default=0.0, metavar="SHARE", help="of a window and the next (default 0)")
    add("--batch_size", type=whole_number(), default=32, metavar="N", help="windows in a forward pass (default 32)")
    add("--num_workers", type=whole_number(0), default=0, metavar="N", help="decoding processes (default 0: this one)")


def embedded(clap: Clap, sources: Mapping[str, Found], arguments: argparse.Namespace) -> Iterator[Row]:
    given = {name: getattr(arguments, name) for name in ("pooling", "overlap", "batch_size", "num_workers")}
    return clap.iter_windows(sources.values(), **given)


def load_model(source: str, arguments: argparse.Namespace) -> Clap:
    """Load the model as the options say. Raises ValueError."""
    from clap_ds.distributed.init import keep_freed_memory
    from clap_ds.inference.model import load

    keep_freed_memory()
    given = {name: getattr(arguments, name) for name in ("best", "tokenizer", "preset")}
    return load(source, dtype=DTYPES[arguments.precision], **given)


def check_made_by(table: Path, about: About, clap: Clap) -> None:
    if about.fingerprint != clap.fingerprint:
        raise UserError(f"{table} holds vectors of another model, {about.model}; {clap.source} has other weights")


def left_out(num_files: int, reasons: Sequence[tuple[str, str]]) -> int:
    """Say how many files can't be used, and return the exit code: 1 where it is more than a hundredth."""
    if reasons:
        examples = "; ".join(printable(f"{name}: {reason}") for name, reason in reasons[:3])
        print(f"{len(reasons)} of {num_files} files can't be used, the first: {examples}", file=sys.stderr)
    return int(100 * len(reasons) > num_files)


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raise a UserError for a file that can't be written."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"{option} {path}: expected a file in a folder that can be written")
