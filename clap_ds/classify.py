"""Write the most likely of given labels for each audio file, with probabilities, as CSV.

Examples:
    clap-ds classify CHECKPOINT sounds/ --labels dog,rain,siren --output labels.csv
    clap-ds classify CHECKPOINT sounds/ --labels_file labels.txt --template 'the sound of {}'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.inference import options
from clap_ds.inference.vectors import text_of
from clap_ds.utils.csv_text import write_csv
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import read_bytes


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    file = arguments.labels_file
    told = (
        read_bytes(file).decode("utf-8-sig").splitlines() if file else arguments.labels.split(",")
    )
    labels = [name for each in told if (name := each.strip())]
    if len(labels) < 2:
        raise UserError(
            f"{file or '--labels'}: expected at least two labels, found {', '.join(labels)}"
        )
    options.check_output(arguments.output)
    sources = options.find_sources(arguments.inputs)
    clap = options.load_model(arguments.checkpoint, arguments)  # imports torch
    templates = {"templates": arguments.template} if arguments.template else {}
    classes = clap.class_embeddings(labels, **templates)
    top = min(arguments.top, len(labels))
    columns = (f"{what}_{n}" for n in range(1, top + 1) for what in ("label", "probability"))
    rows: list[list[Any]] = [["file", "start_s", "end_s", "error", *columns]]
    reasons = []
    for row in options.embedded(clap, sources, arguments):
        cells: list[str | float] = []
        if row.vector is None:
            reasons.append((row.source, row.error))
            cells = [""] * 2 * top
        else:
            (likely,) = clap.probabilities(row.vector[None], classes)
            for n in np.argsort(-likely, kind="stable")[:top]:
                cells += [labels[n], round(float(likely[n]), 6)]
        rows.append(
            [
                text_of(row.source),
                round(row.start_s, 3),
                round(row.end_s, 3),
                text_of(row.error),
                *cells,
            ]
        )
    write_csv(arguments.output, rows)
    return options.left_out(len(sources), reasons)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    options.add_audio_inputs(parser)
    add = parser.add_argument
    labels = parser.add_mutually_exclusive_group(required=True)
    labels.add_argument("--labels", metavar="A,B,…", help="choose from these labels")
    labels.add_argument(
        "--labels_file", type=Path, metavar="FILE", help="read labels from this file, one per line"
    )
    template_help = (
        "add a caption with {} for the label; repeatable (default: evaluation's templates)"
    )
    add("--template", action="append", metavar="TEXT", help=template_help)
    add("--top", type=whole_number(), default=3, metavar="N", help="write N labels per row")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the CSV to this file (default: standard output)",
    )
    options.add_model_options(parser)
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    run_alone(main)
