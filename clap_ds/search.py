"""Find the rows of an embedding table nearest to a text or an audio file.

Examples:
    clap-ds search vectors.parquet "a dog barks far away"
    clap-ds search vectors.parquet --sound bark.wav --top 20 --output found.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.inference import options
from clap_ds.inference.vectors import nearest, read_table
from clap_ds.utils.csv_text import write_csv
from clap_ds.utils.errors import UserError, run_alone


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if bool((arguments.query or "").strip()) == bool(arguments.sound):
        raise UserError("expected either TEXT or --sound FILE")
    options.check_output(arguments.output)
    about, batches = read_table(arguments.table)
    from clap_ds.weights.hub import check_recorded  # imports torch

    for name in ("tokenizer", "preset", "model"):
        recorded = getattr(about, name)
        if recorded and not getattr(arguments, name):
            if name != "model" or not Path(recorded).exists():
                check_recorded(recorded, arguments.table, f"--{name}")
            setattr(arguments, name, recorded)
    clap = options.load_model(arguments.model, arguments)
    options.check_made_by(arguments.table, about, clap)
    pooling: Any = "center" if about.pooling == "center" else "mean"
    sound = arguments.sound
    query = clap.embed_audio(sound, pooling=pooling) if sound else clap.embed_text(arguments.query)
    rows: list[Any] = [["file", "start_s", "end_s", "score"]]
    for row in nearest(batches, query[0], arguments.top):
        rows.append(
            [row["file"], round(row["start_s"], 3), round(row["end_s"], 3), round(row["score"], 6)]
        )
    write_csv(arguments.output, rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("table", type=Path, metavar="TABLE", help="embedding table that `clap-ds embed` wrote")
    add("query", nargs="?", metavar="TEXT", help="text to search for")
    add("--sound", metavar="FILE", help="search for this audio file instead of a text")
    add("--top", type=whole_number(1, 10**6), default=10, metavar="N", help="write N rows")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the CSV to this file (default: standard output)",
    )
    add(
        "--model",
        metavar="CHECKPOINT",
        help="embed the query with this model (default: the one recorded in the table)",
    )
    options.add_model_options(parser)
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    run_alone(main)
