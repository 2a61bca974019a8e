"""Compute what training runs need until an evaluation reaches a target, by scale and global batch.

`clap-scaling RUN… --time_to zero_shot_top1=0.9` prints it. Times are those of training over all starts. ± is half the 95% interval
of repeats by Student's t.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.group_runs import global_batch, split_settings
from clap_ds.analysis.read_run import read_json, read_steps
from clap_ds.analysis.table import Run, markdown_table
from clap_ds.config.errors import UserError
from clap_ds.config.metrics import score
from clap_ds.run_records.intervals import COVERAGE, student_t

MEANS = ("train_s", "step", "samples", "energy_kwh")
KEYS = ["model", "device", "nodes", "GPUs", "global batch", "settings"]
HEADER = (*KEYS, "runs", "reached", "time s ±", "steps ±", "samples ±", "kWh ±", "speed-up")


def target_argument(text: str) -> tuple[str, float]:
    """Parse `METRIC=VALUE`."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected METRIC=VALUE, such as zero_shot_top1=0.9; found {text!r}") from None


def at_target(run: Run, metric: str, target: float) -> dict[str, Any]:
    """Return the line of a run's first evaluation that reached the target; empty if none did."""
    summary = read_json(Path(run.source), "summary")
    history = summary.get("history") if summary.get("resumed_at_step") else None
    lines = read_steps(Path(run.source), "evaluation", history=history)
    reached = (line for line in lines if metric in line and score(metric, line[metric]) >= score(metric, target))
    return next(reached, {})


def render(runs: Sequence[Run], metric: str, target: float) -> str:
    """Render a table with a row per model, device, scale, global batch and settings. Speed-up is in time, relative to the first
    row of a model and device that reached the target. UserError without training runs."""
    import pandas as pd

    records = [
        run for run in runs if run.kind == "record" and read_json(Path(run.source), "summary").get("command") == "train"
    ]
    if not records:
        raise UserError("--time_to needs run directories of training")
    found = pd.DataFrame([
        {**dict(zip(KEYS, (run.model, run.device, run.nodes, run.gpus, global_batch(run), settings), strict=True)),
         **dict.fromkeys(MEANS), **at_target(run, metric, target)}
        for settings, alike in split_settings(records) for run in alike
    ])  # fmt: skip
    rows, first_s = [], dict[Any, float]()
    for key, group in found.groupby(KEYS, dropna=False):
        reached = group[[*MEANS]].astype(float).dropna(subset="train_s")
        means, halves = reached.mean(), reached.sem() * student_t(COVERAGE, max(len(reached) - 1, 1))
        base = first_s.setdefault(key[:2], means["train_s"]) if len(reached) else math.nan
        cells = [_cell(means[name], halves[name]) for name in MEANS]
        speedup = f"{base / means['train_s']:.2f}" if len(reached) else ""
        rows.append([*map(str, key), str(len(group)), str(len(reached)), *cells, speedup])
    return f"### Until {metric} reaches {target:g}\n\n{markdown_table(HEADER, rows)}\n"


def _cell(mean: float, half: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:,.5g}" + ("" if math.isnan(half) else f" ± {half:,.2g}")
