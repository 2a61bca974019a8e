"""Compute what training runs need until an evaluation reaches a target, by scale and global batch.

`clap-ds scaling RUN… --time_to zero_shot_top1=0.9` prints it. Times are of training over all
starts. ± is half the 95% interval of repeats by Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from clap_ds.analysis.aggregate import global_batch, split_settings
from clap_ds.analysis.read_run import read_json, read_steps
from clap_ds.analysis.table import Run, markdown_table, significant
from clap_ds.config.arguments import positive
from clap_ds.config.schema import to_higher_is_better
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.utils.errors import UserError

# Columns that identify a row.
KEYS = ["model", "device", "nodes", "GPUs", "global batch", "settings"]
# Columns of an evaluation, and their headings.
NEEDED = {"train_s": "time s ±", "step": "steps ±", "samples": "samples ±", "energy_kwh": "kWh ±"}


def parse_target(text: str) -> tuple[str, float]:
    """Parse `METRIC=VALUE`."""
    name, _, value = text.partition("=")
    return name, positive(value)


def find_evaluation(run: Run, metric: str, target: float) -> dict[str, Any]:
    """Return the line of a run's first evaluation that reached the target; empty if none did."""
    summary = read_json(Path(run.source), "summary")
    history = summary.get("history") if summary.get("resumed_at_step") else None
    # A loss improves as it falls, other metrics as they rise.
    target_score = to_higher_is_better(metric, target)
    for line in read_steps(Path(run.source), "evaluation", history=history):
        if metric in line and to_higher_is_better(metric, line[metric]) >= target_score:
            # After a resumption, energy is that of the last start alone.
            return {**line, "energy_kwh": None} if history else line
    return {}


def render(runs: Sequence[Run], metric: str, target: float) -> str:
    """Render a row per model, device, scale, global batch and settings.

    Speed-up is in time, relative to a model's and device's first row that reached the target.
    UserError without run directories.
    """
    records = [run for run in runs if run.kind == "record"]
    if not records:
        raise UserError("--time_to needs run directories of training")
    lines = []
    for settings, members in split_settings(records):
        for run in members:
            evaluation = find_evaluation(run, metric, target)
            scale = [run.model, run.device, run.nodes, run.gpus, global_batch(run) or 0, settings]
            lines.append([*scale, *map(evaluation.get, NEEDED)])
    # A run that never reached the target has empty cells.
    table = pd.DataFrame(lines, columns=[*KEYS, *NEEDED])
    groups = table.astype(dict.fromkeys(NEEDED, float)).groupby(KEYS)
    sizes = groups.size()
    rows = []
    # Seconds of each model and device at its smallest scale.
    baseline_s = dict[Any, float]()
    for key, statistics in groups[[*NEEDED]].agg(["mean", "sem", "count"]).iterrows():
        time_s, _, reached = statistics["train_s"]
        speedup = ""
        if reached:
            speedup = f"{baseline_s.setdefault(key[:2], time_s) / time_s:.2f}"
        cells = [_format_cell(*statistics[column]) for column in NEEDED]
        rows.append([*map(str, key), str(sizes[key]), f"{reached:.0f}", *cells, speedup])
    header = (*KEYS, "runs", "reached", *NEEDED.values(), "speed-up")
    return f"### Until {metric} reaches {target:g}\n\n{markdown_table(header, rows)}\n"


def _format_cell(mean: float, error: float, count: float) -> str:
    """Format a mean with its ±. `error`: standard error of the mean."""
    if not count:
        return ""
    text = significant(mean)
    if count == 1:
        return text
    decimals = len(text.partition(".")[2])
    half_width = error * student_t(COVERAGE, int(count) - 1)
    return f"{text} ± {half_width:.{decimals}f}"
