"""Plot a benchmark run, or one or more training runs.

Examples:
    clap-ds plot --curves runs/my_run-… --output run.png
    clap-ds plot --curves runs/first-… runs/second-… --output both.svg

For a benchmark: throughput, step times and their breakdown. For training: curves, which include the
steps before a resume; several runs share the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from clap_ds.analysis.figure import COLORS, SERIES_STYLES, FigureBuilder, set_log_axis, styled
from clap_ds.analysis.read_run import read_json, read_record, read_steps
from clap_ds.analysis.table import Row, Run
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils.errors import UserError

# Steps in the moving mean of noisy curves; at most a tenth of the run.
SMOOTHED = 50
# Columns of a training step, in order of the panels, and their labels.
CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "logit_scale": "logit scale",
    "gradient_norm": "gradient norm",
    "speed": "samples/s per step",
}
# Curves that are drawn as moving means.
NOISY = ("loss", "gradient_norm", "speed")
# One more than a picture's series, for waits for features.
_COLORS = [COLORS[4], COLORS[0], "#b04fa0", *(COLORS[index] for index in (3, 5, 1, 2))]
PHASE_COLORS = dict(zip(STEP_PHASES, _COLORS, strict=True))
# Metrics of the evaluation panel.
MAX_METRICS = 4


def draw_runs(directories: Sequence[Path], output: Path) -> None:
    """Draw one benchmark run, or any number of training runs, in the format of `output`'s suffix.
    UserError if these aren't run directories with timed steps."""
    command = read_json(directories[0], "summary").get("command")
    if len(directories) > 1 or command == "train":
        draw_training(directories).save(output)
    else:
        draw_benchmark(directories[0]).save(output)


@styled()
def draw_benchmark(directory: Path) -> FigureBuilder:
    run = read_record(directory)
    if not (run.rate and run.step_time_s):
        raise UserError(f"{directory}: no timed windows in this run (state {run.state!r})")
    # A run that was ended before its instrumented steps has no breakdown.
    figure = FigureBuilder((1.6, 0.6) if run.breakdown_s else (1.6,))
    figure.add_title(_describe_benchmark(run))
    axes = figure.panels[0]
    _draw_steps(axes, directory, "warmup", "s", color=COLORS[2], label="warm-up")
    _draw_steps(axes, directory, "timed", "o", color=COLORS[0], label="timed")
    median_ms = 1000 * run.step_time_s
    median_style: Any = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
    axes.axhline(median_ms, label=f"median {median_ms:,.0f} ms", **median_style)
    # From 0, so that noise doesn't look large.
    axes.set(xlabel="step", ylabel="step time (ms)", ylim=(0, 1.1 * axes.dataLim.ymax))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    if run.breakdown_s:
        _draw_phases(figure, figure.panels[1], [run])
    return figure


def _describe_benchmark(run: Run) -> str:
    rate = f"{run.rate:,.2f} samples/s/{run.unit}"
    if len(run.windows) > 1:
        rate += f" (windows: {min(run.windows):,.2f} – {max(run.windows):,.2f})"
    if run.state != "completed":
        rate += f", {run.state}"
    settings = (
        f"{run.precision}, batch per rank {run.batch_per_gpu}, {run.context_length} text tokens"
    )
    return f"{rate}\n{run.model_name} on {run.gpus} × {run.device}, {settings}"


def _draw_steps(axes: Axes, directory: Path, phase: str, marker: str, **style: Any) -> None:
    steps = _make_frame(read_steps(directory, phase), "time_s")
    axes.plot(1000 * steps["time_s"], marker, markersize=3, **style)


@styled()
def draw_breakdown(rows: Sequence[Row]) -> FigureBuilder:
    measured = [row for row in rows if row.breakdown_s]
    figure = FigureBuilder((0.35 + 0.25 * len(measured),))
    _draw_phases(figure, figure.panels[0], measured)
    return figure


def _draw_phases(figure: FigureBuilder, axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a horizontal bar per scale in ms; the legend shows the last scale's percentages."""
    labels = [str(row.gpus) for row in rows]
    # Rows are scales, columns parts of a step.
    phases = 1000 * pd.DataFrame([row.breakdown_s for row in rows], labels).fillna(0.0)
    colors = [PHASE_COLORS[phase] for phase in phases]
    # The largest scale.
    last = phases.iloc[-1]
    percents = 100 * last / last.sum()
    phases.columns = [
        f"{phase.replace('_', ' ')} {percent:.1f}%" for phase, percent in percents.items()
    ]
    style: Any = {"width": 0.8, "edgecolor": "white", "linewidth": 0.4}
    phases.plot.barh(ax=axes, stacked=True, color=colors, legend=False, **style)
    axes.invert_yaxis()
    axes.set(ylabel=f"{rows[0].unit}s", xlabel="ms per step")
    figure.add_legend_below(axes, columns=4)


@styled()
def draw_training(directories: Sequence[Path]) -> FigureBuilder:
    figure = FigureBuilder((1.6,) * 3, columns=2)
    *curve_panels, evaluation = figure.panels
    curves = dict(zip(CURVES, curve_panels, strict=True))
    is_compared = len(directories) > 1
    titles = []
    for directory, color in zip(directories, cycle(COLORS), strict=False):
        summary = read_json(directory, "summary")
        # A resumed run's history has the steps before it, too.
        history = summary.get("history") if summary.get("resumed_at_step") else None
        lines = read_steps(directory, "train", history=history)
        steps = _make_frame(lines, *CURVES, "samples", "time_s")
        if steps.empty:
            state = summary.get("state")
            raise UserError(f"{directory}: no training steps in this run (state {state!r})")
        steps["speed"] = steps["samples"].diff() / steps["time_s"]
        # The window has at least one step.
        window = min(SMOOTHED, max(len(steps) // 10, 1))
        # Until a window is full, there is no mean.
        for name in NOISY:
            steps[name] = steps[name].rolling(window).mean()
        for name, axes in curves.items():
            axes.plot(steps[name], color=color, label=directory.name)
        lines = read_steps(directory, "evaluation", history=history)
        _draw_evaluations(evaluation, lines, {"color": color} if is_compared else {})
        titles.append(_describe_training(directory.name, summary, steps["samples"].max()))
    figure.add_title("\n".join(titles))
    for axes, label in zip(figure.panels, [*CURVES.values(), "evaluation, 0 to 1"], strict=True):
        axes.set(xlabel="step", ylabel=label)
    # Its spikes are orders of magnitude above its mean.
    set_log_axis(curves["gradient_norm"])
    if evaluation.lines:
        figure.add_legend_below(evaluation, columns=2)
    if is_compared:
        curves["loss"].legend()
    return figure


def _describe_training(name: str, summary: Mapping[str, Any], samples: float) -> str:
    columns = ("preset", "world_size", "device_name", "precision", "global_batch", "state")
    values = [summary.get(column) or "?" for column in columns]
    preset, ranks, device, precision, batch, state = values
    hardware = f"{preset} on {ranks} × {device}"
    return f"{name}: {hardware}, {precision}, global batch {batch}, {state}: {samples:,.0f} samples"


def _make_frame(lines: Sequence[Mapping[str, Any]], *columns: str) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=["step", *columns]).set_index("step").astype(float)


def _draw_evaluations(
    axes: Axes, lines: Sequence[Mapping[str, Any]], color: Mapping[str, str]
) -> None:
    """Draw up to `MAX_METRICS` metrics, in their own colors unless the run has one, and chance
    levels as dotted lines."""
    names = dict[str, None]()
    for line in lines:
        # All metrics from 0 to 1 that any evaluation has.
        names |= dict.fromkeys(name for name in line if name.endswith(("_r1", "_top1", "_map")))
    for name, series_style in zip([*names][:MAX_METRICS], SERIES_STYLES, strict=False):
        style: dict[str, Any] = {**series_style, "markersize": 3, "linestyle": "-", **color}
        values = _make_frame(lines, name)[name].dropna()
        axes.plot(values, label=name.replace("_", " "), **style)
        chance = lines[-1].get("chance", {}).get(name)
        if chance is not None:
            axes.axhline(chance, color=style["color"], linewidth=0.8, linestyle=":")
