"""Sections of the report: headline, comparison to published, steps, projection, gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clap_ds.analysis import project
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.projection import Measured, Setting, measured_of
from clap_ds.analysis.published import FORWARD_GFLOPS, PUBLISHED_DIR, PUBLISHED_TABLES, PublishedTable
from clap_ds.analysis.runs import BREAKDOWN_PARTS, InputError, Run
from clap_ds.analysis.step_model import Machine, Method
from clap_ds.analysis.table import Row, format_cell, markdown_table, read_table_runs, series_title, significant

FEWEST_SCALES = 2
GH200_NAME = PublishedTable.device_name


def by_series(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of each series, in order."""
    return [[row for row in rows if row.series == series] for series in dict.fromkeys(row.series for row in rows)]


def headline(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """What was measured, in a sentence for each series."""
    lines = []
    for members in by_series(rows):
        measured = [row for row in members if row.samples_per_s_per_gpu]
        title = f"**{series_title(members[0])}**"
        if not measured:
            lines.append(f"- {title}: no rate was measured ({members[0].state}).")
            continue
        last = max(measured, key=lambda row: row.gpus)
        rate = significant(last.samples_per_s_per_gpu or 0, 1)
        text = f"- {title}: {rate} samples/s/GPU on {_count(last.gpus, 'GPU')} ({_count(last.nodes, 'node')})"
        if len(measured) > 1 and last.scaling_efficiency_percent is not None:
            base = min(measured, key=lambda row: (row.nodes, row.gpus))
            spread = last.scaling_efficiency_2sigma_percent
            between = f" ± {spread:.1f}" if spread is not None else ""
            text += (
                f", {last.scaling_efficiency_percent:.1f}{between} % of the rate per GPU on {_count(base.gpus, 'GPU')}"
            )
        lines.append(f"{text}.")
    num_rows = sum(run.kind == "table" for run in runs)
    read = [_count(len(runs) - num_rows, "run")] if len(runs) > num_rows else []
    read += [_count(num_rows, "table row")] if num_rows else []
    scales = _count(len({(row.nodes, row.gpus) for row in rows}), "scale")
    return f"From {' and '.join(read)}, at {scales}.\n\n" + "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def published_comparison(rows: Sequence[Row]) -> str:
    """Ours beside LAION's at the same scale, or beside its one node where it has no such scale."""
    lines = []
    for stem, facts in PUBLISHED_TABLES.items():
        ours = [row for row in rows if row.model == facts.model and row.samples_per_s_per_gpu]
        ours = [row for row in ours if row.state != "published"]
        if not ours:
            continue
        published = scaling_table(read_table_runs(PUBLISHED_DIR / f"{stem}.csv"))
        body = [_published_cells(row, published) for row in ours]
        header = ("nodes", "GPUs", "device", "samples/s/GPU", "published", "on GPUs", "ratio", "efficiency %",
                  "published %", "MFU % (published)", "published %")  # fmt: skip
        lines += [f"### {facts.model.replace('_', '-')}", "", markdown_table(header, body), ""]
        devices = {row.device for row in ours} - {facts.device_name}
        if devices:
            lines += [f"Published on {facts.device_name}, here on {', '.join(sorted(devices))}: the ratio compares "
                      "machines as much as programs.", ""]  # fmt: skip
    if any(row.state == "published" for row in rows):
        lines += ["The published tables are among the inputs themselves.", ""]
    return "\n".join(lines) or f"Published are {', '.join(FORWARD_GFLOPS)}; none of these was measured here."


def _published_cells(row: Row, published: Sequence[Row]) -> list[str]:
    same = next((other for other in published if other.gpus == row.gpus), None)
    other = same or published[0]
    assert row.samples_per_s_per_gpu
    assert other.samples_per_s_per_gpu
    cells = [format_cell(name, getattr(row, name)) for name in ("nodes", "gpus", "device", "samples_per_s_per_gpu")]
    cells += [format_cell("samples_per_s_per_gpu", other.samples_per_s_per_gpu), str(other.gpus)]
    cells.append(significant(row.samples_per_s_per_gpu / other.samples_per_s_per_gpu))
    for name in ("scaling_efficiency_percent", "mfu_percent"):
        theirs = other if same or name == "mfu_percent" else None
        cells += [format_cell(name, getattr(item, name)) if item else "" for item in (row, theirs)]
    return cells


def step_table(rows: Sequence[Row]) -> str:
    """Batch, step time and the parts of a step at every scale of one series."""
    names = ("nodes", "gpus", "batch_per_gpu", "global_batch", "repeats")
    header = ["nodes", "GPUs", "batch per GPU", "global batch", "runs", "step ms", "slowest rank ms"]
    parts = [part for part in BREAKDOWN_PARTS if any(part in row.breakdown_s for row in rows)]
    header += [f"{part.replace('_', ' ')} ms" for part in parts]
    body = []
    for row in rows:
        step_s = row.step_time_s
        if step_s is None and row.batch_per_gpu and row.samples_per_s_per_gpu:
            step_s = row.batch_per_gpu / row.samples_per_s_per_gpu
        seconds = [step_s, row.slowest_rank_step_time_s, *(row.breakdown_s.get(part) for part in parts)]
        milliseconds = ["" if value is None else f"{1000 * value:.1f}" for value in seconds]
        body.append([format_cell(name, getattr(row, name)) for name in names] + milliseconds)
    text = f"### {series_title(rows[0])}\n\n{markdown_table(header, body)}\n"
    if not parts:
        text += "\nNo breakdown was recorded.\n"
    return text


def changes_with_scale(rows: Sequence[Row]) -> str:
    """Which part of the step grew most from the smallest scale to the largest; empty where that isn't known."""
    known = [row for row in rows if row.breakdown_s and row.samples_per_s_per_gpu]
    if len({row.gpus for row in known}) < FEWEST_SCALES:
        return ""
    first, last = min(known, key=lambda row: row.gpus), max(known, key=lambda row: row.gpus)
    grown = {part: last.breakdown_s.get(part, 0.0) - first.breakdown_s.get(part, 0.0) for part in first.breakdown_s}
    part = max(grown, key=lambda name: grown[name])
    if grown[part] <= 0:
        return f"No part of the step grew from {first.gpus} to {last.gpus} GPUs."
    return f"From {first.gpus} to {last.gpus} GPUs, {part.replace('_', ' ')} grew most: {1000 * grown[part]:+.1f} ms a step."


@dataclass(frozen=True)
class Projected:
    """One series' projection, ready to print and to draw."""

    measured: Measured
    setting: Setting
    gpus: tuple[int, ...]

    def render(self) -> str:
        text = project.render(self.measured, [], self.setting, gpus=self.gpus)
        if self.setting.machine == Machine() and GH200_NAME not in self.measured.title:
            text += (
                f"\nLinks, latency and peak assumed are those of a {GH200_NAME} node, which this was not measured on: "
                "give this machine's (`--node_gbytes_per_s` and so on).\n"
            )
        return text


def projected(rows: Sequence[Row], runs: Sequence[Run], machine: Machine) -> Projected:
    """A series' projection up to eight times the GPUs measured.

    Raises:
        InputError: it can't be projected; says why.
    """
    if rows[0].scaling == "strong":
        raise InputError("Not for strong scaling: the model is one of a constant batch per GPU")
    measured = measured_of("This series", rows)
    own = rows[0].model, rows[0].device, rows[0].precision, rows[0].text_tokens
    configs = [
        run.config
        for run in runs
        if run.config and (run.model or "", run.device_name or "", run.precision or "", run.text_tokens) == own
    ]
    largest = max(nodes for nodes, _ in measured.rates) * measured.workload.gpus_per_node
    gpus = tuple(largest * factor // 2 for factor in (1, 2, 4, 8, 16))
    return Projected(measured, Setting(machine, method_of(configs)), gpus)


def method_of(configs: Sequence[Mapping[str, Any]]) -> Method:
    """How runs were trained, from their configuration; without one, as the published runs were."""
    if not configs:
        return Method()
    config = configs[0]
    clap = config.get("clap", {})
    is_bf16 = bool(config.get("bf16", {}).get("enabled"))
    features = clap.get("loss", {}).get("features") or ("bf16" if is_bf16 else "fp32")
    return Method(
        overlap=clap.get("gradient_sync", "overlapped") == "overlapped",
        gradient_bytes=2 if is_bf16 or config.get("communication_data_type") in ("bf16", "fp16") else 4,
        feature_bytes=2 if features == "bf16" else 4,
        loss="exact_local",
        bucket_bytes=1e6 * clap.get("gradient_bucket_mb", 25.0),
        early_gather=True,
    )


def gaps(rows: Sequence[Row], runs: Sequence[Run]) -> list[str]:
    """What a reader would look for and not find, and what should make them doubt."""
    found = []
    for members in by_series(rows):
        title = series_title(members[0])
        measured = [row for row in members if row.samples_per_s_per_gpu]
        if len({row.gpus for row in measured}) < FEWEST_SCALES:
            found.append(f"{title}: {_count(len(measured), 'scale')} with a rate, so no scaling efficiency")
        without = [str(row.gpus) for row in measured if row.samples_per_s_per_gpu_2sigma is None]
        if without:
            found.append(f"{title}: no spread known at {', '.join(without)} GPUs")
        single = [str(row.gpus) for row in measured if row.repeats == 1 and row.state != "published"]
        if single:
            found.append(f"{title}: one run only at {', '.join(single)} GPUs, so its spread over repeats is not known")
        if not any(row.mfu_percent or row.mfu_model_percent for row in measured) and measured:
            found.append(f"{title}: no MFU; the device's peak or the model's FLOPs are not known")
        unbroken = [str(row.gpus) for row in measured if not row.breakdown_s]
        if unbroken:
            found.append(f"{title}: no breakdown of the step at {', '.join(unbroken)} GPUs")
    for run in runs:
        if run.state not in ("completed", "published"):
            reason = f": {' '.join(run.error.split())[:160]}" if run.error else ""
            found.append(f"{run.source.rpartition('/')[2]}: state {run.state}{reason}")
    return found
