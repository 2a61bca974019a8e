"""Command: training runs as curves: loss, evaluation, learning rate, logit scale, gradient norm and speed.

    python analysis/plot_training.py RUN_DIRECTORY [RUN_DIRECTORY …] --output curves.png

Several runs, such as one and its continuations or one and its control, share the axes. Throughput is the matter of
`clap_ds.analysis.plot_run` and `clap_ds.analysis.plot_scaling`. matplotlib is imported only when a figure is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.figure import SERIES_STYLES
from clap_ds.analysis.runs import InputError, non_negative, run_command

PANELS = (
    ("loss", "loss", False),
    ("lr", "learning rate", False),
    ("logit_scale", "logit scale", False),
    ("gradient_norm", "gradient norm", True),
)
"""Field of a step's line, name of its axis, whether the axis is logarithmic."""
SMOOTHED = 50
"""Steps in the moving mean that is drawn over noisy curves; at most a tenth of the run."""


@dataclass(frozen=True)
class Training:
    """What a training run left behind.

    Attributes:
        name: of the run directory.
        summary: `summary.json`.
        steps: lines of `metrics.jsonl` of steps.
        evaluations: lines of evaluations.
    """

    name: str
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def metrics(self) -> list[str]:
        """Names of what was evaluated."""
        names = dict.fromkeys(name for line in self.evaluations for name in line)
        return [name for name in names if name.startswith(("retrieval_", "zero_shot_"))]


def read_training(directory: Path) -> Training:
    """Read a training run, whatever state it is in; a cut last line is left out.

    Raises:
        InputError: no run directory, or no training run.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        text = (directory / "metrics.jsonl").read_text(errors="replace")
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{directory}: not a readable run directory: {error}") from None
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    steps = [line for line in lines if line.get("phase") == "train"]
    if not steps:
        raise InputError(f"{directory}: no step of training; the run's state is {summary.get('state')!r}")
    return Training(directory.name, summary, steps, [line for line in lines if line.get("phase") == "evaluation"])


def draw(runs: Sequence[Training], output: Path) -> None:
    """Draw the curves and write them to `output`, whose ending chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(runs), fontsize=10, fontweight="bold")
    axes = figure.subplots(2, 3).flatten()
    for axis, (field, label, logarithmic) in zip(axes, PANELS, strict=False):
        for run, style in zip(runs, _cycle(len(runs)), strict=True):
            _draw_steps(axis, run, field, style.color)
        axis.set(xlabel="step", ylabel=label, yscale="log" if logarithmic else "linear")
    _draw_evaluations(axes[4], runs)
    _draw_rate(axes[5], runs)
    if len(runs) > 1:
        handles = [axes[0].plot([], [], color=style.color)[0] for style in _cycle(len(runs))]
        figure.legend(
            handles, [run.name for run in runs], loc="outside lower center", fontsize=7, ncols=2, frameon=False
        )
    for axis in axes:
        axis.grid(color="0.9", linewidth=0.4)
        axis.tick_params(labelsize=7, which="both")
    figure.savefig(output, dpi=120)


def _cycle(number: int) -> list[Any]:
    return [SERIES_STYLES[index % len(SERIES_STYLES)] for index in range(number)]


def _title(runs: Sequence[Training]) -> str:
    summary = runs[0].summary
    last = runs[-1].summary
    told = f"{summary.get('preset')} on {summary.get('world_size')} × {summary.get('device_name')}, {summary.get('precision')}"
    told += f", global batch {summary.get('global_batch')}: {last.get('samples', 0):,} samples"
    if last.get("state") not in ("completed", "running"):  # it draws itself before it is over
        told += f", {last.get('state')}"
    seconds = non_negative(last.get("time_to_target_s"))
    return told + (f", target reached after {seconds:.0f} s" if seconds else "")


def _draw_steps(axis: Any, run: Training, field: str, color: str) -> None:
    found = [(line["step"], value) for line in run.steps if (value := non_negative(line.get(field))) is not None]
    if not found:
        return
    steps, values = zip(*found, strict=True)
    width = max(1, min(SMOOTHED, len(values) // 10))
    noisy = width > 1 and field in ("loss", "gradient_norm")
    axis.plot(steps, values, color=color, linewidth=0.6 if noisy else 1.2, alpha=0.3 if noisy else 1.0)
    if noisy:
        axis.plot(steps[width - 1 :], _moving_mean(values, width), color=color, linewidth=1.2)


def _moving_mean(values: Sequence[float], width: int) -> list[float]:
    total, means = sum(values[:width]), []
    for index in range(width, len(values) + 1):
        means.append(total / width)
        if index < len(values):
            total += values[index] - values[index - width]
    return means


def _draw_evaluations(axis: Any, runs: Sequence[Training]) -> None:
    chosen = [name for name in runs[0].metrics if name.endswith(("_r1", "_top1", "_map"))][:4]
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        for name, style in zip(chosen, SERIES_STYLES, strict=False):
            points = [(line["step"], line[name]) for line in run.evaluations if name in line]
            if points:
                shade = color.color if len(runs) > 1 else style.color
                axis.plot(*zip(*points, strict=True), color=shade, marker=style.marker, markersize=3, label=name)
    axis.set(xlabel="step", ylabel="evaluation", ylim=(0, 1.02))
    if chosen and len(runs) == 1:
        axis.legend(fontsize=7, frameon=False)
    if not chosen:
        axis.text(0.5, 0.5, "nothing evaluated", ha="center", color="0.5", transform=axis.transAxes)


def _draw_rate(axis: Any, runs: Sequence[Training]) -> None:
    for run, style in zip(runs, _cycle(len(runs)), strict=True):
        found, before = [], None
        for line in run.steps:
            seconds = non_negative(line.get("time_s"))
            if before is not None and seconds:
                found.append((line["step"], (line["samples"] - before) / seconds))
            before = line["samples"]
        if found:
            axis.plot(*zip(*found, strict=True), ".", color=style.color, markersize=2)
    axis.set(xlabel="step", ylabel="samples/s, each step", ylim=(0, None))


def main() -> None:
    parser = argparse.ArgumentParser(prog="analysis/plot_training.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIRECTORY")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="picture to write: .png, .svg or .pdf"
    )
    arguments = parser.parse_args()
    draw([read_training(directory) for directory in arguments.runs], arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    run_command(main)
