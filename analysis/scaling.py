"""Compute the scaling table of runs: one row per model and scale, with efficiency, MFU, uncertainty and causes of loss.

    python analysis/scaling.py RUN_OR_LOG… [--rate engine] [--csv table.csv]

Scaling efficiency is samples/s/GPU relative to the smallest measured scale (nodes, then GPUs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from clap_ds.analysis.aggregate import combine_repeats, outlying_repeat, run_spreads
from clap_ds.analysis.group_runs import split_series
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Row, Run, Scale, by_series, markdown_table, noted, relative_to, write_csv
from clap_ds.config.arguments import positive
from clap_ds.config.errors import run_alone

BELOW = " ▼"
_COLUMNS = {
    "nodes": "nodes", "GPUs": "gpus", "runs": "repeats", "samples/s/GPU ±": "samples_per_s_per_gpu",
    "samples/s": "samples_per_s", "efficiency % ±": "scaling_efficiency_percent", "speed-up": "speedup",
    "engine's": "engine_samples_per_s_per_gpu", "engine's %": "engine_efficiency_percent",
    "micro-batch": "micro_batch", "TFLOPS/GPU": "achieved_tflops", "MFU % published": "mfu_percent",
    "MFU % model": "mfu_model_percent", "slowest rank s": "slowest_rank_step_time_s",
    "exposed comm. %": "exposed_communication_percent", "data wait %": "data_wait_percent",
    "memory GiB": "memory_peak_gib", "state": "state",
}  # fmt: skip
_SPREADS = {
    "samples_per_s_per_gpu": "samples_per_s_per_gpu_2sigma",
    "scaling_efficiency_percent": "scaling_efficiency_2sigma_percent",
}


def scaling_table(runs: Sequence[Run]) -> list[Scale]:
    """Return one row per series (`series.py`) and scale, in ascending order of scale."""
    series = []
    for members in by_series(split_series(runs)):
        scales = sorted({(run.nodes, run.gpus) for run in members})
        series.append([[run for run in members if (run.nodes, run.gpus) == scale] for scale in scales])
    every = [scale for scales in series for scale in scales]
    rows = [
        noted(combine_repeats(runs, spread), outlying_repeat(runs, every))
        for runs, spread in zip(every, run_spreads(every), strict=True)
    ]
    return [row for members in by_series(rows) for row in _with_efficiencies(members)]


def _with_efficiencies(rows: list[Scale]) -> list[Scale]:
    baseline = next((row for row in rows if row.rate), None)
    engines = next((row.engine_samples_per_s_per_gpu for row in rows if row.engine_samples_per_s_per_gpu), None)
    rows = [_with_efficiency(row, baseline, engines) for row in rows]
    return [noted(row, "not repeated") if row.repeats == 1 else row for row in rows]


def _with_efficiency(row: Scale, baseline: Scale | None, engines: float | None) -> Scale:
    """Fill in efficiencies by both rates, each relative to its own smallest scale."""
    if engines and row.engine_samples_per_s_per_gpu:
        row = replace(row, engine_efficiency_percent=100 * row.engine_samples_per_s_per_gpu / engines)
    if not (baseline and baseline.rate and baseline.samples_per_s and row.rate and row.samples_per_s):
        return row
    percent, halves = 100 * row.rate / baseline.rate, [row.relative_half, baseline.relative_half]
    error = None if None in halves else percent * math.hypot(*filter(None, halves))
    is_repeated = min(row.repeats, baseline.repeats) > 1
    is_baseline = (row.nodes, row.gpus) == (baseline.nodes, baseline.gpus)
    found = replace(
        row, scaling_efficiency_percent=percent, speedup=row.samples_per_s / baseline.samples_per_s,
        scaling_efficiency_2sigma_percent=error and error * (not is_baseline) if is_repeated else None,
        baseline_nodes=baseline.nodes,
    )  # fmt: skip
    # Without a ±, up to two points are attributed to chance.
    if row.gpus > baseline.gpus and percent - 100 > (error or 2.0):
        return noted(found, "efficiency above 100% by more than its ±: the baseline's rate is doubtful")
    return found


def render(rows: Sequence[Row], target: float | None = None) -> str:
    """Render the table as Markdown, one part per series with numbered notes; mark efficiencies below the target."""
    return "\n\n".join(block for members in by_series(rows) for block in _blocks(members, target)) + "\n"


def _blocks(rows: Sequence[Row], target: float | None) -> Iterator[str]:
    notes: dict[str, int] = {}
    body = []
    below = [row for row in rows if target and (row.scaling_efficiency_percent or target) < target]
    for row in rows:
        numbers = [notes.setdefault(note, len(notes) + 1) for note in filter(None, row.notes.split("; "))]
        cells = {name: row.cell(column, _SPREADS.get(column, "")) for name, column in _COLUMNS.items()}
        cells["efficiency % ±"] += BELOW if row in below else ""
        cells["state"] += "".join(f" [{number}]" for number in numbers)
        body.append(cells)
    told = [name for name in _COLUMNS if any(cells[name] for cells in body)]
    yield f"### {rows[0].title}"
    header = [name.replace("GPU", rows[0].unit.removesuffix("s")) for name in told]
    yield markdown_table(header, [[cells[name] for name in told] for cells in body])
    if relative := relative_to(rows):
        yield f"Efficiency and speed-up are {relative}."
    if spread := ", ".join(dict.fromkeys(row.uncertainty_from for row in rows if row.uncertainty_from)):
        yield f"± from: {spread}."
    if target:
        found = (
            f"below it ({BELOW.strip()}): {'; '.join(row.scale for row in below)}" if below else "no scale is below it"
        )
        yield f"Target of {target:g}% efficiency: {found}."
    yield from (f"[{number}] {note}" for note, number in notes.items())


def main() -> None:
    parser = input_parser("Compute scaling efficiency and MFU of runs, logs or tables.")
    parser.add_argument("--target", type=positive, metavar="PERCENT", help="mark scales of lower efficiency")
    parser.add_argument("--csv", type=Path, help="CSV file to write the table to")
    options = parser.parse_args()
    rows = scaling_table(read_runs(options.inputs, options))
    print(render(rows, options.target), end="")
    if options.csv:
        write_csv(options.csv, rows)


command = partial(run_alone, main)

if __name__ == "__main__":
    command()
