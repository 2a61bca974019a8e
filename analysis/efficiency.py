"""Runs → the scaling table: one row per model and scale, with efficiency, MFU, uncertainty and the reasons for the loss.

    python analysis/efficiency.py RUN_OR_LOG… [--baseline_nodes N] [--csv table.csv] [--markdown table.md]

Plotting, comparing and projecting start from the table written here. Scaling efficiency is samples/s/GPU over that of the
baseline scale: the smallest node count, with all the GPUs used on it. Of the repeats of a scale it is the median of those
that completed (of the others only where none did, and that is said); ± is 2σ over repeats, or half the interval that a
single run's windows give. Outliers are named in the notes and stay in.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median, stdev
from typing import Any

from clap_ds.analysis.published import FORWARD_GFLOPS, published_mfu_percent, wrong_claims
from clap_ds.analysis.runs import INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.series import global_batch, scaled_settings, split_series
from clap_ds.analysis.table import Row, Run, Scale, by_series, markdown_table, significant, write_csv
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.plausible import doubtful_mfu
from clap_ds.record.schema import STEP_PHASES
from clap_ds.record.statistics import median_interval

GOOD_STATES = ("completed", "published", "unknown")
"""A log without a launcher's last line doesn't say how it ended; its rate counts."""
OUTLIER_DEVIATIONS = 3.5
"""Modified z-score beyond which a repeat is pointed out (Iglewicz and Hoaglin, 1993)."""
_COLUMNS = {
    "nodes": "nodes", "GPUs": "gpus", "samples/s/GPU ±": "samples_per_s_per_gpu", "samples/s": "samples_per_s",
    "efficiency % ±": "scaling_efficiency_percent", "speed-up": "speedup", "MFU % published": "mfu_percent",
    "MFU % model": "mfu_model_percent", "slowest rank s": "slowest_rank_step_time_s",
    "exposed comm. %": "exposed_communication_percent", "data wait %": "data_wait_percent",
    "memory GiB": "memory_peak_gib", "state": "state",
}  # fmt: skip
_SPREADS = {
    "samples_per_s_per_gpu": "samples_per_s_per_gpu_2sigma",
    "scaling_efficiency_percent": "scaling_efficiency_2sigma_percent",
}


def scaling_table(runs: Sequence[Run], baseline_nodes: int | None = None) -> list[Scale]:
    """One row per series and scale, series after series, scales in rising order.

    A series is one model on one kind of GPU at one precision and caption length, of the same settings and code, with the
    batch per GPU constant (weak scaling) or the global batch constant (strong). A scale that serves both (the baseline,
    usually) has a row in each. Raises UserError where no series has the `baseline_nodes` given.
    """
    rows = [row for scaling, members in split_series(runs) for row in _series_rows(scaling, members, baseline_nodes)]
    if baseline_nodes is not None and not any(row.rate and row.nodes == baseline_nodes for row in rows):
        counts = sorted({run.nodes for run in runs if run.rate})
        raise UserError(f"--baseline_nodes {baseline_nodes}: no measured run has it; node counts measured: {counts}")
    return rows


def _series_rows(scaling: str, runs: list[Run], baseline_nodes: int | None) -> list[Scale]:
    scales: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in runs:
        scales[run.nodes, run.gpus].append(run)
    rows = [combine_repeats(scaling, members) for _, members in sorted(scales.items())]
    baseline = _baseline(rows, baseline_nodes)
    claims = {(run.nodes, run.gpus): run.claims for run in runs if run.claims}
    rows = [_with_efficiency(row, baseline, claims) for row in rows]
    notes = []
    if len(rows) == 1 and rows[0].speedup:
        notes.append("one scale only: nothing to scale against")
    if not scaling and all(run.batch_per_gpu is None for run in runs) and len(rows) > 1:
        notes.append("batch not stated: weak or strong scaling can't be told")
    if differing := scaled_settings(runs):
        notes.append(f"settings differ between scales: {differing}")
    return [_with_notes(rows[0], notes), *rows[1:]]


def _with_notes(row: Scale, notes: Iterable[str]) -> Scale:
    return replace(row, notes="; ".join(filter(None, [row.notes, *notes])))


def combine_repeats(scaling: str, runs: Sequence[Run]) -> Scale:
    """One row from the runs of one series at one scale. Rates stay empty where none of them measured one."""
    first, with_rate = runs[0], [run for run in runs if run.rate]
    used = [run for run in with_rate if run.state in GOOD_STATES] or with_rate
    rate, total = _median(used, "samples_per_s_per_gpu"), used[0].samples_per_s if len(used) == 1 else None
    peak = next(filter(None, (run.peak_tflops for run in used)), None)
    breakdown = _mean_breakdown(used)
    exposed = breakdown.get("exposed_communication_s")
    targets = [run.time_to_target_s for run in runs if run.time_to_target_s]
    low, high = (median_interval(targets).low, median_interval(targets).high) if len(targets) > 1 else (None, None)
    states = Counter(run.state for run in runs)
    spread, spread_from = _spread(used)
    averaged = ("mfu_model_percent", "step_time_s", "slowest_rank_step_time_s", "data_wait_percent")
    medians: dict[str, Any] = {name: _median(used, name) for name in averaged}
    mfu = published_mfu_percent(first.model, rate, peak) if rate else None
    notes = [*_notes(runs, used), *doubtful_mfu(mfu, medians["mfu_model_percent"])]
    identity = ("nodes", "gpus", "model", "device", "precision", "text_tokens", "batch_per_gpu", "variant")
    medians |= {name: getattr(first, name) for name in identity}
    return Scale(
        runs=tuple(used), **medians, **breakdown, scaling=scaling,
        samples_per_s_per_gpu=rate, samples_per_s=total or (rate * first.gpus if rate else None),
        mfu_percent=mfu, peak_tflops=peak,
        samples_per_s_per_gpu_2sigma=spread, uncertainty_from=spread_from, repeats=len(used),
        global_batch=global_batch(first),
        exposed_communication_percent=100 * exposed / sum(breakdown.values()) if exposed is not None else None,
        memory_peak_gib=max((run.memory_peak_gib for run in runs if run.memory_peak_gib), default=None),
        time_to_target_s=median(targets) if targets else None, time_to_target_low_s=low, time_to_target_high_s=high,
        state=first.state if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.most_common()),
        notes="; ".join(dict.fromkeys(notes)),
    )  # fmt: skip


def _spread(used: Sequence[Run]) -> tuple[float | None, str]:
    """(±, what it is): 2σ of one repeat, not the mean's error; or half the interval of one run's windows."""
    if len(used) > 1:
        return 2 * stdev(run.rate for run in used if run.rate), f"2σ over {len(used)} repeats"
    interval = used[0].interval if used else None
    return ((interval[1] - interval[0]) / 2, used[0].uncertainty_from) if interval else (None, "")


def _median(runs: Sequence[Run], name: str) -> float | None:
    values = [value for run in runs if (value := getattr(run, name)) is not None]
    return median(values) if values else None


def _mean_breakdown(runs: Sequence[Run]) -> dict[str, Any]:
    """Columns of the parts that every run with a breakdown has, averaged over these runs."""
    known = [run.breakdown_s for run in runs if sum(run.breakdown_s.values()) > 0]
    parts = [part for part in STEP_PHASES if known and all(part in breakdown for breakdown in known)]
    return {f"{part}_s": mean(breakdown[part] for breakdown in known) for part in parts}


def _notes(runs: Sequence[Run], used: Sequence[Run]) -> Iterable[str]:
    for run in runs:
        yield from filter(None, run.notes.split("; "))
    if used and used[0].state not in GOOD_STATES:
        yield "rate of a run that did not complete"
    if left_out := sum(1 for run in runs if run.rate) - len(used):
        yield f"{left_out} with a rate but not completed left out of the median"
    rates = [run.rate for run in used if run.rate]
    for index in outliers(rates):
        yield f"outlier kept: {significant(rates[index], 1)} samples/s/GPU in {used[index].name}"
    if targets := [run.time_to_target_s for run in runs if run.time_to_target_s]:
        found = median_interval(targets)
        between = f", {found.low:.0f} to {found.high:.0f} s ({found.label('runs')})" if len(targets) > 1 else ""
        yield f"target reached by {len(targets)} of {len(runs)} runs, after {found.median:.0f} s{between}"
    for run in runs:
        if run.error:
            yield f"{run.state}: {' '.join(run.error.split())[:120].replace(';', ',')}"


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of values far from the median by the median absolute deviation; none among fewer than 4 values."""
    if len(values) < 4:
        return []
    centre = median(values)
    deviations = [abs(value - centre) for value in values]
    scale = 1.4826 * median(deviations) or 1e-6 * abs(centre)
    return [index for index, deviation in enumerate(deviations) if deviation > OUTLIER_DEVIATIONS * scale]


def _baseline(rows: Sequence[Row], baseline_nodes: int | None) -> Row | None:
    """Of the least (or the given) node count, the row with most GPUs; with fewest where all have one node count."""
    measured = [row for row in rows if row.rate and baseline_nodes in (None, row.nodes)]
    fewest = 1 if len({row.nodes for row in measured}) == 1 and baseline_nodes is None else -1
    return min(measured, key=lambda row: (row.nodes, fewest * row.gpus), default=None)


def ratio_uncertainty(top: float, top_error: float | None, bottom: float, bottom_error: float | None) -> float | None:
    """Error of top / bottom for independent errors, to first order (delta method); None where one isn't known."""
    if top_error is None or bottom_error is None:
        return None
    return top / bottom * math.hypot(top_error / top, bottom_error / bottom)


def _with_efficiency(row: Scale, baseline: Row | None, claims: Mapping[tuple[int, int], Mapping[str, str]]) -> Scale:
    """The row with its efficiency, and notes of digits its table states that don't follow from its own samples/s."""
    if baseline is None:
        return _with_notes(row, ["no baseline: efficiency not given"] if row.rate else [])
    if not (row.rate and row.samples_per_s and baseline.rate and baseline.samples_per_s):
        return row
    errors = row.samples_per_s_per_gpu_2sigma, baseline.samples_per_s_per_gpu_2sigma
    uncertainty = ratio_uncertainty(row.rate, errors[0], baseline.rate, errors[1])
    row = replace(
        row, scaling_efficiency_percent=100 * row.rate / baseline.rate,
        scaling_efficiency_2sigma_percent=uncertainty and 100 * uncertainty * (row is not baseline),
        speedup=row.samples_per_s / baseline.samples_per_s,
    )  # fmt: skip
    cells, base = claims.get((row.nodes, row.gpus)), claims.get((baseline.nodes, baseline.gpus))
    wrong = wrong_claims(cells, row.gpus, row.model, row.peak_tflops, base, baseline.gpus) if cells else {}
    unlike = "which does not follow from its samples/s"
    return _with_notes(row, (f"table states {name} {text}, {unlike}: {row.cell(name)}" for name, text in wrong.items()))


def render(rows: Sequence[Row]) -> str:
    """The table as Markdown, one part per series, with numbered notes under it."""
    parts = []
    for members in by_series(rows):
        notes: dict[str, int] = {}
        body = []
        for row in members:
            numbers = [notes.setdefault(note, len(notes) + 1) for note in filter(None, row.notes.split("; "))]
            cells = [row.cell(column, _SPREADS.get(column, "")) for column in _COLUMNS.values()]
            body.append([*cells[:-1], cells[-1] + "".join(f" [{number}]" for number in numbers)])
        header = [name.replace("GPU", members[0].unit.removesuffix("s")) for name in _COLUMNS]
        blocks = [f"### {members[0].title}", markdown_table(header, body)]
        if spread := ", ".join(dict.fromkeys(row.uncertainty_from for row in members if row.uncertainty_from)):
            blocks.append(f"± from: {spread}.")
        if members[0].model in FORWARD_GFLOPS and any(row.mfu_percent for row in members):
            counted = "forward cost at 514 text tokens, as the published tables count"
            blocks.append(f"MFU published: {counted}; MFU model: work done.")
        parts += [*blocks, *(f"[{number}] {note}" for note, number in notes.items())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    names = ("inputs", "--baseline_nodes", "--csv", "--markdown", *INPUT_OPTIONS)
    options = parse_options("Scaling efficiency and MFU of runs, logs or tables.", *names)
    rows = scaling_table(read_runs(options.inputs, options), options.baseline_nodes)
    text = render(rows)
    print(text, end="")
    if options.csv:
        write_csv(options.csv, rows)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_alone(main)
