"""Score how well audio matches its captions, such as generated audio its prompts: cosines, and
their mean, the CLAP score.

Examples:
    clap-ds score CHECKPOINT generated.csv --output scores.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from clap_ds.config.arguments import make_parser
from clap_ds.data.build_shards.caption_lists import add_columns, read_entries
from clap_ds.inference import options
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.utils.csv_text import write_csv
from clap_ds.utils.errors import UserError, run_alone


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    options.check_output(arguments.output)
    entries = [
        entry for source in arguments.inputs for entry in read_entries(Path(source), arguments)
    ]
    captions = list(dict.fromkeys(caption for entry in entries for caption in entry.captions))
    clap = options.load_model(arguments.checkpoint, arguments)  # imports torch
    vectors = dict(zip(captions, clap.embed_text(captions), strict=True))
    usable = {number: entry.path for number, entry in enumerate(entries) if not entry.problem}
    left_out = [(str(entry.path), entry.problem) for entry in entries if entry.problem]
    rows: list[list[str | float]] = [["file", "caption", "score"]]
    of_files = []
    for number, row in zip(usable, options.embedded(clap, usable, arguments), strict=True):
        if row.vector is None:
            left_out.append((row.source, row.error))
            continue
        scores = [float(vectors[caption] @ row.vector) for caption in entries[number].captions]
        pairs = zip(entries[number].captions, scores, strict=True)
        rows += [[row.source, caption, round(score, 6)] for caption, score in pairs]
        of_files.append(fmean(scores))
    if len(of_files) < 2:
        raise UserError(
            f"expected at least two usable files with captions, found {len(of_files)} of {len(entries)}"
        )
    if arguments.output:
        write_csv(arguments.output, rows)
    spread = student_t(COVERAGE, len(of_files) - 1) * stdev(of_files) / len(of_files) ** 0.5
    print(
        f"CLAP score: {fmean(of_files):.4f} ± {spread:.4f} (95% interval of the mean over {len(of_files):,} files)"
    )
    return options.left_out(len(entries), left_out)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    kinds = (
        "CSV or JSONL of audio files and captions, or a folder of both, as for clap-ds shards build"
    )
    options.add_audio_inputs(parser, kinds, pooling=("mean", "center"))
    add_columns(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the pairs' scores to this CSV"
    )
    options.add_model_options(parser)
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    run_alone(main)
