"""Compute the scaling table of runs: one row per model and scale, with efficiency, MFU, uncertainty
and causes of loss.

Examples:
    clap-ds scaling runs/sweeps/htsat_tiny-… --csv table.csv
    clap-ds scaling n1.log n2.log n4.log --gpus_per_node 4 --rate deepspeed
    clap-ds scaling runs/my_run-… --time_to zero_shot_top1=0.9

Scaling efficiency is samples/s/GPU relative to the smallest measured scale (nodes, then GPUs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from clap_ds.analysis import time_to_target
from clap_ds.analysis.aggregate import choose_spreads, combine_repeats, split_series
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import (
    Row,
    Run,
    Scale,
    add_note,
    describe_baseline,
    group_by_series,
    markdown_table,
    plain_text,
    write_csv,
)
from clap_ds.utils.errors import run_alone

# Headings and columns of the printed table.
_COLUMNS = {
    "nodes": "nodes",
    "GPUs": "gpus",
    "runs": "repeats",
    "samples/s/GPU ±": "samples_per_s_per_gpu",
    "samples/s": "samples_per_s",
    "efficiency % ±": "scaling_efficiency_percent",
    "speed-up": "speedup",
    "DeepSpeed's": "deepspeed_samples_per_s_per_gpu",
    "micro-batch": "micro_batch",
    "TFLOPS/GPU": "achieved_tflops",
    "MFU % published": "mfu_published_percent",
    "MFU % model": "mfu_model_percent",
    "s/step": "step_time_s",
    "slowest rank s": "slowest_rank_step_time_s",
    "exposed comm. %": "exposed_communication_percent",
    "data wait %": "data_wait_percent",
    "memory GiB": "memory_peak_gib",
    "J/sample": "joules_per_sample",
    "kWh": "energy_kwh",
    "state": "state",
}

# Half of an interval, relative to its rate, above which a note doubts that runs are repeats.
DOUBTFUL = 0.5
# Points of efficiency above 100% that may be chance, if there is no ±.
CHANCE_PERCENT = 2.0


def scaling_table(runs: Sequence[Run]) -> list[Scale]:
    """Return one row per series (`split_series`) and scale, in ascending order of scale."""
    # Nodes first: they decide which links are used.
    order = attrgetter("nodes", "gpus")
    scales = []
    for series in group_by_series(split_series(runs)):
        for _, repeats in groupby(sorted(series, key=order), order):
            scales.append([*repeats])
    # The spread is pooled over all series of the table.
    rows = [*map(combine_repeats, scales, choose_spreads(scales))]
    table = list[Scale]()
    for members in group_by_series(rows):
        table += _add_efficiencies(members)
    return table


def _add_efficiencies(rows: Sequence[Scale]) -> Iterator[Scale]:
    """Fill in efficiencies, relative to the smallest scale with a rate."""
    baseline = next((row for row in rows if row.rate), None)
    for row in rows:
        if baseline and row.rate:
            row = _add_efficiency(row, baseline)
        if (row.relative_ci95 or 0.0) > DOUBTFUL:
            row = add_note(row, "its ± is most of its rate: these may not be repeats of one scale")
        yield add_note(row, "not repeated") if row.repeats == 1 else row


def _add_efficiency(row: Scale, baseline: Scale) -> Scale:
    ratio = (row.rate or 0.0) / (baseline.rate or 1.0)
    error = None
    if row.relative_ci95 is not None and baseline.relative_ci95 is not None:
        # Relative errors of a ratio add as squares.
        error = 100 * ratio * math.hypot(row.relative_ci95, baseline.relative_ci95)
        if row.scale == baseline.scale:
            error = 0.0
    # One run has no spread.
    if min(row.repeats, baseline.repeats) == 1:
        error = None
    row = replace(
        row,
        scaling_efficiency_percent=100 * ratio,
        speedup=ratio * row.gpus / baseline.gpus,
        scaling_efficiency_percent_ci95=error,
        baseline_nodes=baseline.nodes,
    )
    if row.gpus > baseline.gpus and 100 * ratio - 100 > (error or CHANCE_PERCENT):
        doubt = "efficiency above 100% by more than its ±: the baseline's rate is doubtful"
        return add_note(row, doubt)
    return row


def render(rows: Sequence[Row]) -> str:
    """Render the table as Markdown, one part per series with numbered notes."""
    blocks = list[str]()
    for members in group_by_series(rows):
        blocks += _render_series(members)
    return "\n\n".join(blocks) + "\n"


def _render_series(rows: Sequence[Row]) -> Iterator[str]:
    # A note that several rows have is printed once, under one number.
    numbers: dict[str, int] = {}
    body = []
    for row in rows:
        cells = {name: row.cell(column) for name, column in _COLUMNS.items()}
        for note in filter(None, row.notes.split("; ")):
            number = numbers.setdefault(note, len(numbers) + 1)
            cells["state"] += f" [{number}]"
        body.append(cells.values())
    yield f"### {rows[0].title}"
    yield markdown_table([name.replace("GPU", rows[0].unit) for name in _COLUMNS], body)
    if baseline := describe_baseline(rows):
        yield f"Efficiency and speed-up are {baseline}."
    if origins := dict.fromkeys(row.uncertainty_from for row in rows if row.uncertainty_from):
        yield f"± from: {plain_text(', '.join(origins))}."
    for note, number in numbers.items():
        yield f"[{number}] {plain_text(note)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="also write the table to this CSV file"
    )
    target_help = (
        "print instead what training runs needed to reach a target, such as zero_shot_top1=0.9"
    )
    parser.add_argument(
        "--time_to", type=time_to_target.parse_target, metavar="METRIC=VALUE", help=target_help
    )
    options = parser.parse_args(argv)
    runs = read_runs(options.inputs, options)
    if options.time_to:
        print(time_to_target.render(runs, *options.time_to), end="")
        return
    rows = scaling_table(runs)
    print(render(rows), end="")
    if options.csv:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    run_alone(main)
