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
from clap_ds.analysis.aggregate import combine_repeats, run_spreads, split_series
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import (
    Row,
    Run,
    Scale,
    by_series,
    markdown_table,
    noted,
    plain_text,
    relative_to,
    write_csv,
)
from clap_ds.analysis.time_to_target import target_argument
from clap_ds.utils.errors import run_alone

_COLUMNS = {
    "nodes": "nodes", "GPUs": "gpus", "runs": "repeats", "samples/s/GPU ±": "samples_per_s_per_gpu",
    "samples/s": "samples_per_s", "efficiency % ±": "scaling_efficiency_percent", "speed-up": "speedup",
    "DeepSpeed's": "deepspeed_samples_per_s_per_gpu",
    "micro-batch": "micro_batch", "TFLOPS/GPU": "achieved_tflops", "MFU % published": "mfu_published_percent",
    "MFU % model": "mfu_model_percent", "s/step": "step_time_s", "slowest rank s": "slowest_rank_step_time_s",
    "exposed comm. %": "exposed_communication_percent", "data wait %": "data_wait_percent",
    "memory GiB": "memory_peak_gib", "J/sample": "joules_per_sample", "kWh": "energy_kwh", "state": "state",
}  # fmt: skip


DOUBTFUL = 0.5


def scaling_table(runs: Sequence[Run]) -> list[Scale]:
    """Return one row per series (`group_runs.py`) and scale, in ascending order of scale."""
    scale = attrgetter("nodes", "gpus")
    series = by_series(split_series(runs))
    scales = [
        [*found] for members in series for _, found in groupby(sorted(members, key=scale), scale)
    ]
    rows = map(combine_repeats, scales, run_spreads(scales))
    return [row for members in by_series([*rows]) for row in _with_efficiencies(members)]


def _with_efficiencies(rows: Sequence[Scale]) -> Iterator[Scale]:
    """Fill in efficiencies, relative to the smallest scale with a rate."""
    baseline = next((row for row in rows if row.rate), None)
    for row in rows:
        if baseline and row.rate:
            row = _with_efficiency(row, baseline, row.rate / (baseline.rate or 1.0))
        if (row.relative_half or 0.0) > DOUBTFUL:
            row = noted(row, "its ± is most of its rate: these may not be repeats of one scale")
        yield noted(row, "not repeated") if row.repeats == 1 else row


def _with_efficiency(row: Scale, baseline: Scale, share: float) -> Scale:
    halves = (row.relative_half, baseline.relative_half)
    error = None
    if None not in halves and min(row.repeats, baseline.repeats) > 1:
        error = 100 * share * math.hypot(*filter(None, halves)) * (row.scale != baseline.scale)
    row = replace(
        row, scaling_efficiency_percent=100 * share, speedup=share * row.gpus / baseline.gpus,
        scaling_efficiency_percent_ci95=error, baseline_nodes=baseline.nodes,
    )  # fmt: skip
    # Without a ±, up to two points are attributed to chance.
    if row.gpus > baseline.gpus and 100 * share - 100 > (error or 2.0):
        return noted(
            row, "efficiency above 100% by more than its ±: the baseline's rate is doubtful"
        )
    return row


def render(rows: Sequence[Row]) -> str:
    """Render the table as Markdown, one part per series with numbered notes."""
    return "\n\n".join(block for members in by_series(rows) for block in _blocks(members)) + "\n"


def _blocks(rows: Sequence[Row]) -> Iterator[str]:
    notes: dict[str, int] = {}
    body = []
    for row in rows:
        numbers = [
            notes.setdefault(note, len(notes) + 1) for note in filter(None, row.notes.split("; "))
        ]
        cells = {name: row.cell(column) for name, column in _COLUMNS.items()}
        cells["state"] += "".join(f" [{number}]" for number in numbers)
        body.append(cells.values())
    yield f"### {rows[0].title}"
    yield markdown_table([name.replace("GPU", rows[0].unit) for name in _COLUMNS], body)
    if relative := relative_to(rows):
        yield f"Efficiency and speed-up are {relative}."
    if spread := ", ".join(
        dict.fromkeys(row.uncertainty_from for row in rows if row.uncertainty_from)
    ):
        yield f"± from: {plain_text(spread)}."
    yield from (f"[{number}] {plain_text(note)}" for note, number in notes.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="also write the table to this CSV file"
    )
    told = "print instead what training runs needed to reach a target, such as zero_shot_top1=0.9"
    parser.add_argument("--time_to", type=target_argument, metavar="METRIC=VALUE", help=told)
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
