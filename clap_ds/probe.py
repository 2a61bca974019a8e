"""Command: how well a linear probe on frozen vectors tells classes, over folds.

clap-embed CHECKPOINT ESC-50-master/audio --output esc50.parquet
clap-probe esc50.parquet --labels ESC-50-master/meta/esc50.csv --label_column category --fold_column fold
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import MISTAKES, UserError, run_alone
from clap_ds.config.files import write_atomically
from clap_ds.inference.options import check_output
from clap_ds.record.csv_text import printable

NUM_SHOWN = 5


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clap-probe", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("vectors", type=Path, metavar="VECTORS", help="what clap-embed wrote: .parquet or .npz")
    more = "CSV or JSONL of files, classes and folds; of several lists each is a fold unless --fold_column says them"
    add("--labels", type=Path, nargs="+", required=True, metavar="LIST", help=more)
    more = "of file names, or how they are made of columns, such as '{fname}.wav' or 'fold{fold}/{slice_file_name}'"
    add("--file_column", metavar="NAME", help=f"{more} (default: found out)")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--label_column", metavar="NAME", help="of each file's class")
    kind.add_argument("--list_column", metavar="NAME", help="of each file's classes between commas, semicolons or bars")
    add("--fold_column", metavar="NAME", help="of folds, each of which is held out once; or of splits")
    add("--test_folds", nargs="+", default=[], metavar="FOLD", help="test on these together, and on no others")
    add("--train_folds", nargs="+", default=[], metavar="FOLD", help="train on these alone (default: all others)")
    add("--folds", type=whole_number(2), default=5, metavar="N", help="where nothing says any, so many (default: 5)")
    add("--encoding", help="of the lists, such as cp1252 (default: UTF-8 or UTF-16)")
    add("--json", type=Path, metavar="FILE", help="write the results there, too, those of each class with them")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Probe each fold and print; a UserError for a table, list or folds that can't be used."""
    options = parse_arguments(argv)
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("clap-probe needs scikit-learn: pip install 'clap-ds[probe]'")
    check_output(options.json, "--json")
    from clap_ds.inference.probing import probe, read_labelled, split

    about, data = read_labelled(options)
    rounds = [probe(data, *each) for each in tqdm(split(data, options), "folds", disable=None, leave=False)]
    values, classes = [each["value"] for each in rounds], {}
    for name in data.classes:
        found = [each["classes"][name] for each in rounds if name in each["classes"]]
        if number := sum(files for files, _ in found):
            classes[name] = sum(files * own for files, own in found) / number
    metric = "mean average precision" if data.is_multi else "accuracy"
    results: dict[str, Any] = {
        "table": str(options.vectors), "model": about.model, "fingerprint": about.fingerprint, "files": len(data.of_class),
        "metric": metric, "mean": mean(values), "standard_deviation": stdev(values) if len(values) > 1 else None,
        "chance": mean(each["chance"] for each in rounds), "folds": rounds, "classes": classes, "left_out": data.left_out,
    }  # fmt: skip
    print(*map(printable, lines_of(results)), sep="\n")
    if options.json is not None:
        write_atomically(options.json, json.dumps(results, indent=1) + "\n")


def lines_of(results: dict[str, Any]) -> Iterator[str]:
    """Each fold's result, their mean, the classes that are told worst, and what was left out."""
    yield "{table}: {files:,} files, vectors of {model}; {metric}".format_map(results)
    for each in results["folds"]:
        yield "  fold {fold}: {value:.2%} of {files:,} files, chance {chance:.2%}, C {C:g}".format_map(each)
    least = sorted(results["classes"].items(), key=lambda each: each[1])[:NUM_SHOWN]
    told = "{mean:.2%}" + " ± {standard_deviation:.2%} over folds" * (results["standard_deviation"] is not None)
    yield f"{told}, chance {{chance:.2%}}".format_map(results)
    yield f"lowest of {len(results['classes']):,} classes: " + ", ".join(f"{name} {own:.2%}" for name, own in least)
    for why, names in results["left_out"].items():
        if names:
            shown = ", ".join(names[:NUM_SHOWN]) + ", …" * (len(names) > NUM_SHOWN)
            yield f"left out: {len(names):,} {why}: {shown}"


command = partial(run_alone, main, MISTAKES)

if __name__ == "__main__":
    command()
