"""Compute what training runs need until an evaluation reaches a target, by scale and global batch.

`clap-ds scaling RUN… --time_to zero_shot_top1=0.9` prints it. Times are of training over all
starts. ± is half the 95% interval of repeats by Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.aggregate import global_batch, split_settings
from clap_ds.analysis.read_run import read_json, read_steps
from clap_ds.analysis.table import Run, markdown_table, significant
from clap_ds.config.arguments import positive
from clap_ds.config.schema import score
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.utils.errors import UserError

KEYS = ["model", "device", "nodes", "GPUs", "global batch", "settings"]
NEEDED = {"train_s": "time s ±", "step": "steps ±", "samples": "samples ±", "energy_kwh": "kWh ±"}


def target_argument(text: str) -> tuple[str, float]:
    """Parse `METRIC=VALUE`."""
    name, _, value = text.partition("=")
    return name, positive(value)


def at_target(run: Run, metric: str, target: float) -> dict[str, Any]:
    """Return the line of a run's first evaluation that reached the target; empty if none did."""
    summary = read_json(Path(run.source), "summary")
    history = summary.get("history") if summary.get("resumed_at_step") else None
    lines = read_steps(Path(run.source), "evaluation", history=history)
    if history:  # energy is that of each start
        lines = [{**line, "energy_kwh": None} for line in lines]
    reached = (
        line
        for line in lines
        if metric in line and score(metric, line[metric]) >= score(metric, target)
    )
    return next(reached, {})


def render(runs: Sequence[Run], metric: str, target: float) -> str:
    """Render a row per model, device, scale, global batch and settings. Speed-up is in time,
    relative to a model's and device's first row that reached the target. UserError without run
    directories."""
    import pandas as pd

    records = [run for run in runs if run.kind == "record"]
    if not records:
        raise UserError("--time_to needs run directories of training")
    table = pd.DataFrame([
        [run.model, run.device, run.nodes, run.gpus, global_batch(run) or 0, settings]
        + [at_target(run, metric, target).get(column) for column in NEEDED]
        for settings, alike in split_settings(records) for run in alike
    ], columns=[*KEYS, *NEEDED]).astype(dict.fromkeys(NEEDED, float))  # fmt: skip
    groups = table.groupby(KEYS)
    rows = []
    first_s = dict[Any, float]()
    for key, found in groups[[*NEEDED]].agg(["mean", "sem", "count"]).iterrows():
        time_s, _, reached = found["train_s"]
        speedup = f"{first_s.setdefault(key[:2], time_s) / time_s:.2f}" if reached else ""
        cells = [_cell(*found[column]) for column in NEEDED]
        rows.append([*map(str, key), str(groups.size()[key]), f"{reached:.0f}", *cells, speedup])
    header = (*KEYS, "runs", "reached", *NEEDED.values(), "speed-up")
    return f"### Until {metric} reaches {target:g}\n\n{markdown_table(header, rows)}\n"


def _cell(mean: float, error: float, count: float) -> str:
    text = significant(mean) if count else ""
    if count < 2:
        return text
    return f"{text} ± {error * student_t(COVERAGE, int(count) - 1):.{len(text.partition('.')[2])}f}"
