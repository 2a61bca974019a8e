"""Command: vectors of audio files, one for each file or window, as a table.

    clap-embed CHECKPOINT sounds/ list.csv 'shards/*.tar' --output vectors.parquet
    torchrun --nproc_per_node 4 -m clap_ds.embed CHECKPOINT sounds/ --output vectors.parquet

CHECKPOINT is whatever `clap_ds.load` takes. Ranks take turns over the files, and write finished parts into
`vectors.parquet.parts/`; the same command goes on after it was stopped, on however many ranks. A file that can't be used is a
row without a vector, with the reason. Runs under deepspeed, torchrun and, as a single rank, under plain python.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # A launcher starts this file by its path, which puts the package's folder, not its parent, on the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.errors import INTERRUPTED, UserError
from clap_ds.config.places import VERSION
from clap_ds.inference import options
from clap_ds.inference.files import Found, find_sources
from clap_ds.inference.vectors import About, check_suffix, read_table
from clap_ds.ranks.distributed import (
    Ranks,
    add_rank_options,
    check_hostfile,
    choose_accelerator,
    initialize,
    leave,
    run_command,
)

if TYPE_CHECKING:
    from clap_ds.inference.model import Clap
    from clap_ds.inference.parts import Marks, Parts

LONGEST_WAIT_S = 7 * 86400.0
"""Of the first rank that is done for the last."""
AGAIN = "the same command goes on from here"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="clap-embed", description=description, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file of weights, or a name on the hub")
    kinds = "folders, audio files, lists of them (.csv, .tsv, .txt, .jsonl), tars and patterns of tars"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=kinds)
    told = "the table: .parquet, or .npz, which is put together in memory"
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=told)
    options.add_audio_options(parser)
    options.add_model_options(parser)
    add_rank_options(parser)
    return parser.parse_intermixed_args(argv)


def main(ranks: Ranks) -> None:
    arguments = parse_arguments()
    check_suffix(arguments.output, "--output")
    options.check_output(arguments.output)
    sources = find_sources(arguments.inputs)
    if arguments.hostfile:
        ranks = check_hostfile(arguments.hostfile, ranks)
    try:
        choose_accelerator()  # which loads torch
        leave(embed(arguments, sources, ranks))
    except ValueError as error:  # on all ranks alike
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        print(f"error: interrupted; {AGAIN}", file=sys.stderr)
        leave(INTERRUPTED)


def embed(arguments: argparse.Namespace, sources: dict[str, Found], ranks: Ranks) -> int:
    """Embed what isn't yet, and join all parts; the exit code. A collective: a ValueError or UserError on any rank is one on
    all."""
    # Loading torch takes seconds: only for what can start.
    from tqdm import tqdm

    from clap_ds.inference.parts import Parts
    from clap_ds.ranks.agreement import agreed, on_first, together

    device = initialize(ranks, compile_cpu_collective=False, collective_timeout_s=LONGEST_WAIT_S)
    clap = together(lambda: options.load_model(arguments.checkpoint, arguments, device=device))
    parts = Parts(arguments.output, about_of(clap, arguments))
    try:
        sources, work = on_first(lambda: (sources, parts.begin(sources)))
        if work is None:
            return on_first(lambda: repeat(arguments, len(sources)))
        marks, todo = work
        if ranks.is_first and len(todo) < len(marks):
            print(f"{len(marks) - len(todo)} of {len(marks)} files are embedded already", flush=True)
        own = {name: sources[name] for name in [*todo][ranks.rank :: ranks.world_size]}
        with agreed(), tqdm(total=len(own), unit="file", disable=None if ranks.is_first else True) as progress:
            try:
                for _ in parts.write(options.embedded(clap, own, arguments), marks):
                    progress.update()
            except OSError as error:
                raise ValueError(f"{parts.folder} can't be written: {error.strerror or error}; {AGAIN}") from None
        return on_first(lambda: finish(parts, marks, arguments))
    finally:
        parts.close()


def finish(parts: Parts, marks: Marks, arguments: argparse.Namespace) -> int:
    """Join the parts and say what there is; the exit code."""
    num_rows, reasons = parts.join(marks)
    print(f"{arguments.output}: {num_rows:,} rows of {len(marks):,} files")
    return options.left_out(len(marks), reasons, arguments.max_left_out)


def repeat(arguments: argparse.Namespace, num_files: int) -> int:
    """Say that the table is there, and of its files what was said when it was made; the exit code."""
    reasons = [each for block in read_table(arguments.output)[2] for each in block.left_out]
    print(f"{arguments.output} is there already, of these files by this model")
    return options.left_out(num_files, reasons, arguments.max_left_out)


def about_of(clap: Clap, arguments: argparse.Namespace) -> About:
    source = str(Path(clap.source).resolve()) if Path(clap.source).exists() else clap.source
    given = {name: getattr(arguments, name) for name in ("windows", "overlap", "precision", "tokenizer", "preset")}
    return About(source, clap.fingerprint, clap.dim, **given, version=VERSION)


command = partial(run_command, main)

if __name__ == "__main__":
    command()
