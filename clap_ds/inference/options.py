"""Options and inputs that commands on a trained model share.

Options are checked, and audio is listed, before the model is loaded: importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from clap_ds.config.arguments import add_preset, number, whole_number
from clap_ds.data.build_shards.caption_lists import (
    AUDIO_SUFFIXES,
    LIST_SUFFIXES,
    audio_files_in,
    read_paths,
)
from clap_ds.distributed.init import keep_freed_memory
from clap_ds.inference.vectors import to_utf8
from clap_ds.utils.errors import UserError, printable

if TYPE_CHECKING:
    from clap_ds.data.clip import SkippedSample
    from clap_ds.evaluation.clips import Clip
    from clap_ds.inference.model import Clap, EmbeddingRow

AudioSource: TypeAlias = "Path | Clip | SkippedSample"

# Help of the inputs that `find_sources` accepts.
INPUTS = "folders, audio files, lists of them (.csv, .tsv, .txt, .jsonl, .json), tars and patterns of tars"
# Choices of `--pooling`, and their help.
POOLING = {
    "mean": "the mean of all windows' vectors",
    "center": "the center window",
    "none": "a row per window",
}
# clips or windows in a forward pass
BATCH_SIZE = 32
# DeepSpeed's names → torch's.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_model_options(parser: argparse.ArgumentParser, precision: str = "fp32") -> None:
    """Add the model's options.

    `precision` is a default of `DTYPES`, or text that describes a default chosen later.
    """
    add = parser.add_argument
    add(
        "--best",
        action="store_true",
        help="use a folder's best checkpoint by its run's best_metric (default: the newest)",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="use this tokenizer: a Hub name or folder (default: the checkpoint's)",
    )
    add_preset(parser, "set the sizes, for a file without them")
    default = precision if precision in DTYPES else None
    add(
        "--precision",
        choices=tuple(DTYPES),
        default=default,
        help=f"compute in this precision (default: {precision})",
    )


def add_audio_inputs(
    parser: argparse.ArgumentParser, inputs: str = INPUTS, pooling: Sequence[str] = tuple(POOLING)
) -> None:
    """Add the checkpoint, its audio inputs and how to process them."""
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder or file of weights (path or URL), or a Hub name",
    )
    add("inputs", nargs="+", metavar="INPUT", help=inputs)
    choices = "; ".join(f"{name}: {POOLING[name]}" for name in pooling)
    add(
        "--pooling",
        choices=pooling,
        default="mean",
        help=f"reduce files longer than a window ({choices})",
    )
    add(
        "--overlap",
        type=number(0, 0.95),
        default=0.0,
        metavar="FRACTION",
        help="let consecutive windows overlap by this fraction of a window",
    )
    add(
        "--batch_size",
        type=whole_number(),
        default=BATCH_SIZE,
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


def parse_with_model_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Add the model's options, parse a command line, and check that `--output` can be written."""
    add_model_options(parser)
    # A list of inputs may be interrupted by options.
    arguments = parser.parse_intermixed_args(argv)
    check_output(arguments.output)
    return arguments


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raise UserError for a file that can't be written. None and - are standard output."""
    if path is None or path == Path("-"):
        return
    is_other_kind = path.exists() and not path.is_file()
    if is_other_kind or not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: expected a file in a writable folder")


def find_sources(inputs: Sequence[str]) -> dict[str, AudioSource]:
    """Find audio files and clips in folders (recursively), lists and tars (paths, patterns, URLs).

    Sources are in order, each once, by path or `tar: key`. Raises UserError or ValueError for a
    missing or empty argument.
    """
    sources: dict[str, AudioSource] = {}
    for argument in inputs:
        # A file that is named twice has its first place.
        for source in _sources_in(argument):
            name = source if isinstance(source, Path) else source.name
            sources.setdefault(to_utf8(name), source)
    return sources


def _sources_in(argument: str) -> Iterable[AudioSource]:
    path = Path(argument)
    suffix = path.suffix.lower()
    if path.is_dir():
        return audio_files_in(path)
    if suffix == ".tar" or "://" in argument:
        from clap_ds.inference.audio_windows import clips_in_shards  # imports torch

        return clips_in_shards(argument)
    # Files of a list may be missing: they are reported as skipped.
    if suffix in (*LIST_SUFFIXES, ".txt"):
        return read_paths(path)
    if suffix in AUDIO_SUFFIXES and path.exists():
        return [path]
    raise UserError(
        f"{argument}: expected a folder, audio ({', '.join(AUDIO_SUFFIXES)}), a list "
        f"(.txt, {', '.join(LIST_SUFFIXES)}) or .tar that exists"
    )


def load_model(source: str, arguments: argparse.Namespace) -> Clap:
    """Load the model by its options. Raises ValueError."""
    from clap_ds.inference.model import load  # imports torch

    # glibc would return each batch's memory to the kernel.
    keep_freed_memory()
    return load(
        source,
        best=arguments.best,
        dtype=DTYPES[arguments.precision],
        tokenizer=arguments.tokenizer,
        preset=arguments.preset,
    )


def embed_sources(
    clap: Clap, sources: Iterable[AudioSource], arguments: argparse.Namespace
) -> Iterator[EmbeddingRow]:
    """Embed audio with the options of `add_audio_inputs`."""
    return clap.iter_windows(
        sources,
        pooling=arguments.pooling,
        overlap=arguments.overlap,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
    )


def report_skipped(num_files: int, skipped: Sequence[tuple[str, str]]) -> int:
    """Print the number of unusable files, given with reasons. Return the exit code: 1 if they
    exceed 1%."""
    if skipped:
        examples = "; ".join(printable(f"{name}: {reason}") for name, reason in skipped[:3])
        print(
            f"skipped {len(skipped)} of {num_files} files; the first: {examples}", file=sys.stderr
        )
    # A list with many missing files is probably the wrong one.
    return int(100 * len(skipped) > num_files)
