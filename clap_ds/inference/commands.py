"""The commands on a trained model: `clap-ds embed`, `classify`, `search` and `score`.

A command's docstring is its help. Files that can't be used are skipped and reported, and the exit
code is 1 if they exceed 1% of the files.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from tqdm import tqdm

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.data.build_shards.caption_lists import add_columns, read_entries
from clap_ds.inference.options import (
    add_audio_inputs,
    embed_sources,
    find_sources,
    load_model,
    parse_with_model_options,
    report_skipped,
)
from clap_ds.inference.vectors import (
    TableMetadata,
    check_suffix,
    find_nearest,
    read_table,
    to_utf8,
    write_table,
)
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.utils.csv_text import write_csv
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import open_atomically, read_bytes
from clap_ds.utils.paths import VERSION

OUTPUT_HELP = "write the CSV to this file (default: standard output)"


def embed(argv: Sequence[str] | None = None) -> int:
    """Embed audio files, one vector per file or window, into a Parquet table written atomically.

    Examples:
        clap-ds embed CHECKPOINT sounds/ list.csv 'shards/*.tar' --output vectors.parquet
    """
    parser = make_parser(embed.__doc__)
    add_audio_inputs(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="write this .parquet file")
    arguments = parse_with_model_options(parser, argv)
    check_suffix(arguments.output)

    sources = find_sources(arguments.inputs)
    clap = load_model(arguments.checkpoint, arguments)
    # No progress bar in a log file.
    rows = tqdm(embed_sources(clap, sources.values(), arguments), unit="row", disable=None)
    # `clap-ds search` finds a local model again from any folder.
    model = str(Path(clap.source).resolve()) if Path(clap.source).exists() else clap.source
    metadata = TableMetadata(
        model,
        clap.fingerprint,
        clap.dim,
        pooling=arguments.pooling,
        overlap=arguments.overlap,
        precision=arguments.precision,
        tokenizer=arguments.tokenizer,
        preset=arguments.preset,
        version=VERSION,
    )
    with open_atomically(arguments.output) as file:
        num_rows, skipped = write_table(file, metadata, rows)
    print(f"{arguments.output}: {num_rows:,} rows from {len(sources):,} files")
    return report_skipped(len(sources), skipped)


def classify(argv: Sequence[str] | None = None) -> int:
    """Write the most likely of given labels for each audio file, with probabilities, as CSV.

    Examples:
        clap-ds classify CHECKPOINT sounds/ --labels dog,rain,siren --output labels.csv
        clap-ds classify CHECKPOINT sounds/ --labels_file labels.txt --template 'the sound of {}'
    """
    arguments = _parse_classify(argv)
    labels = _read_labels(arguments)
    sources = find_sources(arguments.inputs)
    clap = load_model(arguments.checkpoint, arguments)
    # Without templates, those of zero-shot evaluation.
    templates = {"templates": arguments.template} if arguments.template else {}
    classes = clap.class_embeddings(labels, **templates)

    num_labels = min(arguments.top, len(labels))
    header = ["file", "start_s", "end_s", "error"]
    for rank in range(1, num_labels + 1):
        header += [f"label_{rank}", f"probability_{rank}"]
    rows: list[list[Any]] = [header]
    skipped = []
    for row in embed_sources(clap, sources.values(), arguments):
        place = [to_utf8(row.source), round(row.start_s, 3), round(row.end_s, 3)]
        cells: list[str | float] = []
        if row.vector is None:
            skipped.append((row.source, row.error))
            # An empty label and probability each.
            cells = [""] * (2 * num_labels)
        else:
            # One row of len(labels).
            (probabilities,) = clap.probabilities(row.vector[None], classes)
            # Of equal probabilities, the label that comes first is printed first.
            for label in np.argsort(-probabilities, kind="stable")[:num_labels]:
                cells += [labels[label], round(float(probabilities[label]), 6)]
        rows.append([*place, to_utf8(row.error), *cells])
    write_csv(arguments.output, rows)
    return report_skipped(len(sources), skipped)


def _parse_classify(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(classify.__doc__)
    add_audio_inputs(parser)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--labels", metavar="A,B,…", help="choose from these labels")
    group.add_argument(
        "--labels_file", type=Path, metavar="FILE", help="read labels from this file, one per line"
    )
    add = parser.add_argument
    add(
        "--template",
        action="append",
        metavar="TEXT",
        help="add a caption with {} for the label; repeatable (default: evaluation's templates)",
    )
    add("--top", type=whole_number(), default=3, metavar="N", help="write N labels per row")
    add("--output", type=Path, metavar="FILE", help=OUTPUT_HELP)
    return parse_with_model_options(parser, argv)


def _read_labels(arguments: argparse.Namespace) -> list[str]:
    """Return the labels without blank ones. Raises UserError for fewer than two."""
    if arguments.labels_file:
        # Windows' editors write a byte order mark.
        lines = read_bytes(arguments.labels_file).decode("utf-8-sig").splitlines()
    else:
        lines = arguments.labels.split(",")
    labels = [line.strip() for line in lines if line.strip()]
    if len(labels) < 2:
        option = arguments.labels_file or "--labels"
        raise UserError(f"{option}: expected at least two labels, found {', '.join(labels)}")
    return labels


def search(argv: Sequence[str] | None = None) -> None:
    """Find the rows of an embedding table nearest to a text or an audio file.

    Examples:
        clap-ds search vectors.parquet "a dog barks far away"
        clap-ds search vectors.parquet --sound bark.wav --top 20 --output found.csv
    """
    arguments = _parse_search(argv)
    metadata, batches = read_table(arguments.table)
    _use_recorded_model(arguments, metadata)
    clap = load_model(arguments.model, arguments)
    # Cosines between embeddings of different models mean nothing.
    if (metadata.fingerprint, metadata.dim) != (clap.fingerprint, clap.dim):
        raise UserError(
            f"{arguments.table} is from another model, {metadata.model}; {clap.source} has different weights"
        )

    if arguments.sound:
        # A query is one vector, also if the table has a row per window.
        pooling: Any = "center" if metadata.pooling == "center" else "mean"
        (query,) = clap.embed_audio(arguments.sound, pooling=pooling)
    else:
        (query,) = clap.embed_text(arguments.query)

    rows: list[list[Any]] = [["file", "start_s", "end_s", "score"]]
    for row in find_nearest(batches, query, arguments.top):
        times = [round(row["start_s"], 3), round(row["end_s"], 3)]
        rows.append([row["file"], *times, round(row["score"], 6)])
    write_csv(arguments.output, rows)


def _parse_search(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of `search`. Raises UserError unless there is one query."""
    parser = make_parser(search.__doc__)
    add = parser.add_argument
    add("table", type=Path, metavar="TABLE", help="embedding table that `clap-ds embed` wrote")
    add("query", nargs="?", default="", metavar="TEXT", help="text to search for")
    add("--sound", metavar="FILE", help="search for this audio file instead of a text")
    add("--top", type=whole_number(1, 10**6), default=10, metavar="N", help="write N rows")
    add("--output", type=Path, metavar="FILE", help=OUTPUT_HELP)
    add(
        "--model",
        metavar="CHECKPOINT",
        help="embed the query with this model (default: the one recorded in the table)",
    )
    arguments = parse_with_model_options(parser, argv)
    has_text = bool(arguments.query.strip())
    has_sound = bool(arguments.sound)
    if has_text == has_sound:
        raise UserError("expected either TEXT or --sound FILE")
    return arguments


def _use_recorded_model(arguments: argparse.Namespace, metadata: TableMetadata) -> None:
    """Set options that the user didn't set as the table records them.

    Raises ValueError for a recorded name that only users may choose, as it could be any place.
    """
    from clap_ds.weights.hub import check_recorded  # imports torch

    for option in ("tokenizer", "preset", "model"):
        recorded = getattr(metadata, option)
        if not recorded or getattr(arguments, option):
            continue
        is_local_model = option == "model" and Path(recorded).exists()
        if not is_local_model:
            check_recorded(recorded, arguments.table, f"--{option}")
        setattr(arguments, option, recorded)


def score(argv: Sequence[str] | None = None) -> int:
    """Score how well audio matches its captions, such as generated audio its prompts: cosines, and
    their mean, the CLAP score.

    Examples:
        clap-ds score CHECKPOINT generated.csv --output scores.csv
    """
    parser = make_parser(score.__doc__)
    add_audio_inputs(
        parser,
        (
            "CSV or JSONL of audio files and captions, or a folder of both, as for "
            "clap-ds shards build"
        ),
        pooling=("mean", "center"),
    )
    add_columns(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the pairs' scores to this CSV"
    )
    arguments = parse_with_model_options(parser, argv)

    entries = []
    # Each caption is embedded once. A dict has the order of first use.
    captions: dict[str, None] = {}
    for source in arguments.inputs:
        for entry in read_entries(Path(source), arguments):
            entries.append(entry)
            captions |= dict.fromkeys(entry.captions)
    clap = load_model(arguments.checkpoint, arguments)
    vectors = dict(zip(captions, clap.embed_text([*captions]), strict=True))
    skipped = [(str(entry.path), entry.problem) for entry in entries if entry.problem]
    usable = [entry for entry in entries if not entry.problem]
    paths = [entry.path for entry in usable]

    rows: list[list[str | float]] = [["file", "caption", "score"]]
    file_scores = []
    for entry, row in zip(usable, embed_sources(clap, paths, arguments), strict=True):
        if row.vector is None:
            skipped.append((row.source, row.error))
            continue
        # Both have length 1.
        cosines = [float(vectors[caption] @ row.vector) for caption in entry.captions]
        for caption, cosine in zip(entry.captions, cosines, strict=True):
            rows.append([row.source, caption, round(cosine, 6)])
        # Files count equally, however many captions they have.
        file_scores.append(fmean(cosines))
    num_scores = len(file_scores)
    if num_scores < 2:
        raise UserError(
            f"expected at least two usable files with captions, found {num_scores} of {len(entries)}"
        )
    if arguments.output:
        write_csv(arguments.output, rows)
    # Student's t times the standard error of the mean.
    half_width = student_t(COVERAGE, num_scores - 1) * stdev(file_scores) / num_scores**0.5
    print(
        f"CLAP score: {fmean(file_scores):.4f} ± {half_width:.4f} (95% interval of the "
        f"mean over {num_scores:,} files)"
    )
    return report_skipped(len(entries), skipped)
