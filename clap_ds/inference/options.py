"""Define the shared options and inputs of commands on a trained model. Imports torch only for
shards and models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from clap_ds.config.arguments import add_preset, number, whole_number
from clap_ds.data.build_shards.caption_lists import (
    AUDIO_SUFFIXES,
    LIST_SUFFIXES,
    audio_files_in,
    read_paths,
)
from clap_ds.inference.vectors import text_of
from clap_ds.utils.errors import UserError, printable

if TYPE_CHECKING:
    from clap_ds.data.clip import Broken
    from clap_ds.evaluation.clips import Clip
    from clap_ds.inference.model import Clap, EmbeddingRow
    from clap_ds.inference.vectors import About

Found: TypeAlias = "Path | Clip | Broken"

INPUTS = "folders, audio files, lists of them (.csv, .tsv, .txt, .jsonl, .json), tars and patterns of tars"
POOLING = {
    "mean": "the mean of all windows' vectors",
    "center": "the center window",
    "none": "a row per window",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_model_options(parser: argparse.ArgumentParser, precision: str = "fp32") -> None:
    """Add the model's options. `precision` is a default of `DTYPES`, or text that describes one
    chosen later."""
    add = parser.add_argument
    best = "use a folder's best checkpoint by its run's best_metric (default: the newest)"
    add("--best", action="store_true", help=best)
    add(
        "--tokenizer",
        metavar="NAME",
        help="use this tokenizer: a Hub name or folder (default: the checkpoint's)",
    )
    add_preset(parser, "set the sizes, for a file without them")
    of_model = f"compute in this precision (default: {precision})"
    add(
        "--precision",
        choices=tuple(DTYPES),
        default=precision if precision in DTYPES else None,
        help=of_model,
    )


def add_audio_inputs(
    parser: argparse.ArgumentParser, kinds: str = INPUTS, pooling: Sequence[str] = tuple(POOLING)
) -> None:
    """Add the checkpoint, its audio inputs and how to process them."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or file of weights, or a Hub name")
    add("inputs", nargs="+", metavar="INPUT", help=kinds)
    choices = "; ".join(f"{name}: {POOLING[name]}" for name in pooling)
    add(
        "--pooling",
        choices=pooling,
        default="mean",
        help=f"reduce files longer than a window ({choices})",
    )
    overlap = "let consecutive windows overlap by this fraction of a window"
    add("--overlap", type=number(0, 0.95), default=0.0, metavar="FRACTION", help=overlap)
    add(
        "--batch_size",
        type=whole_number(),
        default=32,
        metavar="N",
        help="set windows per forward pass",
    )
    add(
        "--num_workers",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="set decoding processes; 0: none",
    )


def find_sources(inputs: Sequence[str]) -> dict[str, Found]:
    """Find audio files and clips in folders (recursively), lists and tars (paths, patterns, URLs),
    in order, each once, by path or `tar: key`. Raises UserError or ValueError for a missing or
    empty argument."""
    found: dict[str, Found] = {}
    for argument in inputs:
        for source in _sources_in(argument):
            found.setdefault(text_of(source if isinstance(source, Path) else source.name), source)
    return found


def _sources_in(argument: str) -> Iterable[Found]:
    path = Path(argument)
    suffix = Path(argument).suffix.lower()
    if path.is_dir():
        return audio_files_in(path)
    if suffix == ".tar" or "://" in argument:
        from clap_ds.data.shard_manifest import expand_shards
        from clap_ds.evaluation.clips import list_clips

        clips, broken = list_clips(expand_shards(argument))
        return [*clips, *broken]
    if suffix in (*LIST_SUFFIXES, ".txt"):
        return read_paths(path)
    if suffix in AUDIO_SUFFIXES and path.exists():
        return [path]
    kinds = f"a folder, audio ({', '.join(AUDIO_SUFFIXES)}), a list (.txt, {', '.join(LIST_SUFFIXES)}) or .tar"
    raise UserError(f"{argument}: expected {kinds} that exists")


def embedded(
    clap: Clap, sources: Mapping[Any, Found], arguments: argparse.Namespace
) -> Iterator[EmbeddingRow]:
    given = {
        name: getattr(arguments, name)
        for name in ("pooling", "overlap", "batch_size", "num_workers")
    }
    return clap.iter_windows(sources.values(), **given)


def load_model(source: str, arguments: argparse.Namespace) -> Clap:
    """Load the model by its options. Raises ValueError."""
    from clap_ds.distributed.init import keep_freed_memory
    from clap_ds.inference.model import load

    keep_freed_memory()
    given = {name: getattr(arguments, name) for name in ("best", "tokenizer", "preset")}
    return load(source, dtype=DTYPES[arguments.precision], **given)


def check_made_by(table: Path, about: About, clap: Clap) -> None:
    if (about.fingerprint, about.dim) != (clap.fingerprint, clap.dim):
        raise UserError(
            f"{table} is from another model, {about.model}; {clap.source} has different weights"
        )


def left_out(num_files: int, reasons: Sequence[tuple[str, str]]) -> int:
    """Print the number of unusable files. Return the exit code: 1 if they exceed 1%."""
    if reasons:
        examples = "; ".join(printable(f"{name}: {reason}") for name, reason in reasons[:3])
        print(
            f"skipped {len(reasons)} of {num_files} files; the first: {examples}", file=sys.stderr
        )
    return int(100 * len(reasons) > num_files)


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raise UserError for a file that can't be written."""
    if path in (None, Path("-")):
        return
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: expected a file in a writable folder")
