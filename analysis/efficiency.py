"""Runs → the scaling table: one row per model and scale, with efficiency, MFU, uncertainty and the reasons for the
loss.

    python analysis/efficiency.py RUN_OR_LOG… [--baseline_nodes N] [--csv table.csv] [--markdown table.md]

Reads through `clap_ds.analysis.throughput`; plotting, comparing and projecting start from the table written here. Scaling
efficiency is samples/s/GPU over that of the baseline scale: the smallest node count, with all the GPUs used on it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.combine import combine_repeats, differing_settings
from clap_ds.analysis.intervals import ratio_uncertainty
from clap_ds.analysis.published import FORWARD_GFLOPS, claim_follows, published_mfu_percent, rate_bounds
from clap_ds.analysis.runs import InputError, Run, run_command
from clap_ds.analysis.table import Row, format_cell, markdown_table, series_title, write_csv, write_text
from clap_ds.analysis.throughput import add_input_options, given_of, positive_int, read_all

BATCH_UNKNOWN_NOTE = "batch not stated: weak or strong scaling can't be told"


def scaling_table(runs: Sequence[Run], baseline_nodes: int | None = None) -> list[Row]:
    """One row per series and scale, series after series, scales in rising order.

    A series is one model on one kind of GPU at one precision and caption length, with the batch per GPU constant
    (weak scaling) or the global batch constant (strong). A scale that serves both (the baseline, usually) has a row
    in each.

    Raises:
        InputError: `baseline_nodes` is given and no series has it.
    """
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.model or "", run.device_name or "", run.precision or "", run.text_tokens or 0].append(run)
    rows: list[Row] = []
    baselines_found = 0
    for _, group in sorted(groups.items(), key=lambda item: tuple(map(str, item[0]))):
        for scaling, members in split_scaling(group):
            series, has_baseline = _series_rows(scaling, members, baseline_nodes)
            rows += series
            baselines_found += has_baseline
    if baseline_nodes is not None and not baselines_found:
        counts = sorted({run.num_nodes for run in runs if run.num_nodes and run.rate})
        raise InputError(f"--baseline_nodes {baseline_nodes}: no measured run has it; node counts measured: {counts}")
    return rows


def split_scaling(group: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Tell weak from strong scaling among the runs of one model: [("weak" | "strong" | "", runs), …].

    All of one batch per GPU are weak scaling; all of one global batch at several scales are strong. In a mixture,
    every batch per GPU and every global batch that occurs at two scales or more makes a series, and what fits neither
    stands alone. A failed run that doesn't state its batch goes with the others where there is only one choice.
    """
    per_gpu = {run.batch_per_gpu for run in group if run.batch_per_gpu}
    if not per_gpu:
        return [("", list(group))]
    if len(per_gpu) == 1:
        known = [run if run.batch_per_gpu else replace(run, micro_batch_per_gpu=next(iter(per_gpu))) for run in group]
        return [("weak", known)]
    found: list[tuple[str, list[Run]]] = []
    for name, size_of in (("weak", lambda run: run.batch_per_gpu), ("strong", lambda run: run.global_batch)):
        for size in sorted({size_of(run) for run in group if size_of(run)}):
            members = [run for run in group if size_of(run) == size]
            if len({run.num_gpus for run in members}) > 1:
                found.append((name, members))
    placed = {id(run) for _, members in found for run in members}
    alone: dict[int | None, list[Run]] = defaultdict(list)
    for run in group:
        if id(run) not in placed:
            alone[run.batch_per_gpu].append(run)
    return found + [("", members) for members in alone.values()]


def _series_rows(scaling: str, runs: list[Run], baseline_nodes: int | None) -> tuple[list[Row], bool]:
    """Rows of one series, and whether it has its baseline."""
    scales: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in runs:
        assert run.num_nodes
        assert run.num_gpus
        scales[run.num_nodes, run.num_gpus].append(run)
    rows = [combine_repeats(scaling, members) for _, members in sorted(scales.items())]
    baseline = find_baseline(rows, baseline_nodes)
    rows = [_with_efficiency(row, baseline, len(rows)) for row in rows]
    claims = {(run.num_nodes, run.num_gpus): run for run in runs if run.claims}
    if claims:
        rows = [_check_claims(row, baseline, claims) for row in rows]
    if not scaling and all(run.batch_per_gpu is None for run in runs) and len(rows) > 1:
        rows[0] = _add_note(rows[0], BATCH_UNKNOWN_NOTE)
    differing = differing_settings([run.config for run in runs])
    if differing:
        rows[0] = _add_note(rows[0], f"settings differ between runs: {', '.join(differing)}")
    return rows, baseline is not None


def find_baseline(rows: Sequence[Row], baseline_nodes: int | None) -> Row | None:
    """The row others are divided by: of the least (or the given) node count, the one with most GPUs.

    Where every row has the same node count it is the one with fewest GPUs.
    """
    measured = [row for row in rows if row.samples_per_s_per_gpu]
    if baseline_nodes is not None:
        measured = [row for row in measured if row.nodes == baseline_nodes]
    if not measured:
        return None
    if len({row.nodes for row in measured}) == 1 and baseline_nodes is None:
        return min(measured, key=lambda row: row.gpus)
    least = min(row.nodes for row in measured)
    return max((row for row in measured if row.nodes == least), key=lambda row: row.gpus)


def _with_efficiency(row: Row, baseline: Row | None, num_rows: int) -> Row:
    rate = row.samples_per_s_per_gpu
    if rate is None:
        return row
    if baseline is None:
        return _add_note(row, "no baseline: efficiency not given")
    base = baseline.samples_per_s_per_gpu
    assert base
    assert row.samples_per_s
    assert baseline.samples_per_s
    uncertainty = None
    if row is baseline:
        uncertainty = 0.0 if row.samples_per_s_per_gpu_2sigma is not None else None
    elif row.samples_per_s_per_gpu_2sigma is not None and baseline.samples_per_s_per_gpu_2sigma is not None:
        errors = row.samples_per_s_per_gpu_2sigma, baseline.samples_per_s_per_gpu_2sigma
        uncertainty = 100 * ratio_uncertainty(rate, errors[0], base, errors[1])
    row = replace(
        row,
        scaling_efficiency_percent=100 * rate / base,
        scaling_efficiency_2sigma_percent=uncertainty,
        speedup=row.samples_per_s / baseline.samples_per_s,
    )
    return _add_note(row, "one scale only: nothing to scale against") if num_rows == 1 else row


def _check_claims(row: Row, baseline: Row | None, claims: dict[tuple[int | None, int | None], Run]) -> Row:
    """Mark the digits a table states that don't follow from its own samples/s, however those were rounded."""
    run = claims.get((row.nodes, row.gpus))
    if run is None or row.samples_per_s_per_gpu is None:
        return row
    cells = run.claims
    total = cells.get("samples_per_s", "")
    rate_low, rate_high = rate_bounds(cells["samples_per_s_per_gpu"], total, row.gpus)
    checks = [("samples_per_s", rate_low * row.gpus, rate_high * row.gpus)] if total else []
    mfu_low = published_mfu_percent(row.model, rate_low, run.peak_tflops)
    mfu_high = published_mfu_percent(row.model, rate_high, run.peak_tflops)
    if mfu_low is not None and mfu_high is not None:
        checks.append(("mfu_percent", mfu_low, mfu_high))
    base = claims.get((baseline.nodes, baseline.gpus)) if baseline else None
    if base is not None and float(base.claims.get("scaling_efficiency_percent") or 0) == 100:
        base_low, base_high = rate_bounds(
            base.claims["samples_per_s_per_gpu"], base.claims.get("samples_per_s", ""), base.num_gpus or 1
        )
        checks.append(("scaling_efficiency_percent", 100 * rate_low / base_high, 100 * rate_high / base_low))
    for column, low, high in checks:
        stated = cells.get(column, "")
        if stated and not claim_follows(stated, low, high):
            right = format_cell(column, getattr(row, column))
            row = _add_note(row, f"table states {column} {stated}, which does not follow from its samples/s: {right}")
    return row


def _add_note(row: Row, note: str) -> Row:
    return replace(row, notes=f"{row.notes}; {note}" if row.notes else note)


def render(rows: Sequence[Row]) -> str:
    """The table as Markdown, one part per series, with numbered notes under it."""
    parts = []
    for series in dict.fromkeys(row.series for row in rows):
        members = [row for row in rows if row.series == series]
        notes: dict[str, int] = {}
        body = [_cells(row, notes) for row in members]
        header = (
            "nodes", "GPUs", "samples/s/GPU ±", "samples/s", "efficiency % ±", "speed-up", "MFU % published", "MFU % model",
            "slowest rank s", "exposed comm. %", "data wait %", "memory GiB", "state",
        )  # fmt: skip
        text = f"### {series_title(members[0])}\n\n{markdown_table(header, body)}\n"
        spread = ", ".join(dict.fromkeys(row.uncertainty_from for row in members if row.uncertainty_from))
        if spread:
            text += f"\n± from: {spread}.\n"
        if FORWARD_GFLOPS.get(members[0].model) and any(row.mfu_percent for row in members):
            text += "\nMFU published: forward cost at 514 text tokens, as the published tables count; MFU model: work done.\n"
        for note, number in notes.items():
            text += f"\n[{number}] {note}\n"
        parts.append(text)
    return "\n".join(parts)


def _cells(row: Row, notes: dict[str, int]) -> list[str]:
    def cell(column: str, sigma: str = "") -> str:
        text = format_cell(column, getattr(row, column))
        spread = format_cell(sigma, getattr(row, sigma)) if sigma else ""
        return f"{text} ± {spread}" if text and spread else text

    marks = ""
    for note in filter(None, row.notes.split("; ")):
        marks += f" [{notes.setdefault(note, len(notes) + 1)}]"
    return [
        cell("nodes"), cell("gpus"), cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma"), cell("samples_per_s"),
        cell("scaling_efficiency_percent", "scaling_efficiency_2sigma_percent"), cell("speedup"), cell("mfu_percent"),
        cell("mfu_model_percent"), cell("slowest_rank_step_time_s"), cell("exposed_communication_percent"),
        cell("data_wait_percent"), cell("memory_peak_gib"), row.state + marks,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Scaling efficiency and MFU of runs, logs or tables.")
    parser.add_argument("inputs", nargs="+", type=Path, help="run directories, folders of them, DeepSpeed logs, tables")
    parser.add_argument("--baseline_nodes", type=positive_int, help="node count that is 100 %% (default: the smallest)")
    parser.add_argument("--csv", type=Path, help="write the table here")
    parser.add_argument("--markdown", type=Path, help="write what is printed here")
    add_input_options(parser)
    options = parser.parse_args()
    rows = scaling_table(read_all(options.inputs, given_of(options)), options.baseline_nodes)
    text = render(rows)
    print(text, end="")
    if options.csv:
        write_csv(options.csv, rows)
    if options.markdown:
        write_text(options.markdown, text)


if __name__ == "__main__":
    run_command(main)
