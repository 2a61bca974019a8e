"""Embed audio files, one vector per file or window, into a Parquet table written atomically.

Examples:
    clap-ds embed CHECKPOINT sounds/ list.csv 'shards/*.tar' --output vectors.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from clap_ds.config.arguments import make_parser
from clap_ds.inference import options
from clap_ds.inference.vectors import About, check_suffix, write_table
from clap_ds.utils.errors import run_alone
from clap_ds.utils.files import replacing
from clap_ds.utils.paths import VERSION


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    options.add_audio_inputs(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="write this .parquet file"
    )
    options.add_model_options(parser)
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    check_suffix(arguments.output)
    options.check_output(arguments.output)
    sources = options.find_sources(arguments.inputs)
    clap = options.load_model(arguments.checkpoint, arguments)  # imports torch
    rows = tqdm(options.embedded(clap, sources, arguments), unit="row", disable=None)
    source = str(Path(clap.source).resolve()) if Path(clap.source).exists() else clap.source
    given = {
        name: getattr(arguments, name)
        for name in ("pooling", "overlap", "precision", "tokenizer", "preset")
    }
    about = About(source, clap.fingerprint, clap.dim, **given, version=VERSION)
    with replacing(arguments.output) as file:
        num_rows, left_out = write_table(file, about, rows)
    print(f"{arguments.output}: {num_rows:,} rows from {len(sources):,} files")
    return options.left_out(len(sources), left_out)


if __name__ == "__main__":
    run_alone(main)
