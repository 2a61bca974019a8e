"""Runs as a picture, of the benchmark or of training.

    python analysis/plot_run.py RUN_DIRECTORY… --output run.png|svg|pdf

Of a benchmark: its rate, every step's time, and where a step's time goes. Of training: loss, learning rate, logit
scale, gradient norm, evaluation and speed, from the run's first step where it was resumed; several training runs, such as one
and its control, share the axes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import COLORS, SERIES_STYLES, Picture, log_axis, styled
from clap_ds.analysis.record import non_negative, read_json, read_record, read_steps, section
from clap_ds.analysis.table import Row
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.schema import STEP_PHASES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SMOOTHED = 50
"""Steps in the moving mean that is drawn over noisy curves; at most a tenth of the run."""
CURVES = {
    "loss": "loss", "lr": "learning rate", "logit_scale": "logit scale", "gradient_norm": "gradient norm",
    "speed": "samples/s, each step",
}  # fmt: skip
NOISY = ("loss", "gradient_norm", "speed")
EVALUATED = 4
"""Metrics of evaluation that are drawn, at most."""


def draw_runs(directories: Sequence[Path], output: Path) -> None:
    """Draw one run of the benchmark, or any number of training runs, whatever state they are in.

    The ending of `output` chooses the format: .png, .svg or .pdf. Raises UserError for what are no run directories,
    runs that can't be drawn together or have no timed step, and where matplotlib is missing.
    """
    notes: list[str] = []
    summaries = {directory: read_json(directory, "summary", notes) for directory in directories}
    of_training = []
    for directory, summary in summaries.items():
        if not summary and not read_steps(directory, "window", "train"):
            raise UserError(f"{directory}: not a readable run directory: {', '.join(notes) or 'no summary.json in it'}")
        of_training.append(summary.get("command") == "train" or bool(read_steps(directory, "train")))
    if all(of_training):
        picture = draw_training(summaries)
    elif len(directories) == 1:
        picture = draw_benchmark(directories[0])
    else:
        raise UserError("several runs share a picture only where all are of training; plot_scaling.py draws the others")
    picture.save(output)


@styled()
def draw_benchmark(directory: Path) -> Picture:
    """Draw a run of the benchmark; UserError where it has no timed step."""
    run = read_record(directory)
    steps: dict[str, list[tuple[float, float]]] = {"warmup": [], "window": []}
    for line in read_steps(directory, *steps):
        if (time_s := non_negative(line.get("time_s"))) is not None:
            steps[line["phase"]].append((line["step"], time_s))
    if not (run.rate and run.step_time_s and steps["window"]):
        raise UserError(f"{directory}: no timed windows; the run's state is {run.state!r}")
    picture = Picture((1.6, 0.6))
    times, parts = picture.panels
    per = f"samples/s/{run.unit.removesuffix('s')}"
    label = run.uncertainty_from.partition(" of ")[0]
    between = " ({}: {:,.2f} – {:,.2f})".format(label, *run.interval) if run.interval else ""
    told = [run.precision, f"batch per rank {run.batch_per_gpu or 'unknown'}"]
    told += [f"{run.text_tokens} text tokens"] * bool(run.text_tokens)
    picture.title(
        f"{run.model_name} on {run.gpus} × {run.device}, {', '.join(told)}: {run.rate:,.2f} {per}{between}, "
        f"median step {1000 * run.step_time_s:,.0f} ms"
    )
    for phase, color, marker, label in (("warmup", COLORS[2], "s", "warm-up"), ("window", COLORS[0], "o", "timed")):
        times.plot(
            [at for at, _ in steps[phase]], [s for _, s in steps[phase]], marker, color=color, markersize=3, label=label
        )
    times.axhline(run.step_time_s, color="black", linewidth=0.8, linestyle="--", label="median")
    top = 1.1 * max(time_s for points in steps.values() for _, time_s in points)
    times.set(xlabel="step", ylabel="step time (s)", ylim=(0, top))
    times.legend(loc="lower right")
    if run.breakdown_s:
        _draw_parts(picture, parts, [run])
    else:
        parts.axis("off")
        parts.text(0, 0.5, "no breakdown of the step was recorded", va="center")
    return picture


@styled()
def draw_breakdown(rows: Sequence[Row]) -> Picture:
    """Draw the parts of a step at every scale of one series, of which at least one has a breakdown."""
    known = [row for row in rows if row.breakdown_s]
    picture = Picture((0.35 + 0.25 * len(known),))
    _draw_parts(picture, picture.panels[0], known)
    return picture


def _draw_parts(picture: Picture, axes: Axes, rows: Sequence[Row]) -> None:
    """A lying bar for each scale, in milliseconds, its parts named with the last scale's shares."""
    last = rows[-1].breakdown_s
    named = {
        f"{part.replace('_', ' ')} {100 * last.get(part, 0.0) / (sum(last.values()) or 1):.1f}\N{NO-BREAK SPACE}%": [
            1000 * row.breakdown_s.get(part, 0.0) for row in rows
        ]
        for part in STEP_PHASES
        if any(part in row.breakdown_s for row in rows)  # at 0 %, too: each part keeps its colour
    }
    picture.stack(axes, named, [str(row.gpus) for row in rows])
    axes.set(ylabel=rows[0].unit, xlabel="ms a step")


@styled()
def draw_training(summaries: Mapping[Path, Mapping[str, Any]]) -> Picture:
    """Draw training runs, by their directories; UserError for one without a step."""
    picture = Picture((1.6,) * 3, columns=2, columns_wide=1.5)
    picture.title(_title(list(summaries.values())))
    *curves, evaluation = picture.panels
    for (directory, summary), color in zip(summaries.items(), cycle(COLORS), strict=False):
        history = summary.get("history") if summary.get("resumed_at_step") else None
        steps = _numbers(read_steps(directory, "train", history=history), *CURVES, "samples", "time_s")
        if steps.empty:
            raise UserError(f"{directory}: no step of training; the run's state is {summary.get('state')!r}")
        steps["speed"] = steps["samples"].dropna().diff() / steps["time_s"].where(steps["time_s"] > 0)
        curves[0].plot([], [], color=color, label=" " + directory.name)
        for axes, name in zip(curves, CURVES, strict=True):
            _draw_curve(axes, steps[name].dropna(), color, name in NOISY)
        lines = read_steps(directory, "evaluation", history=history)
        _draw_evaluations(evaluation, lines, color if len(summaries) > 1 else None)
    for axes, label in zip(picture.panels, [*CURVES.values(), "evaluation, 0 to 1"], strict=True):
        axes.set(xlabel="step", ylabel=label)
    _, rate, _, norm, speed = curves
    log_axis(norm)
    for axes in (rate, speed, evaluation):
        axes.set_ylim(bottom=0)
    if evaluation.lines:
        picture.name_below(evaluation, columns=2)
    if len(summaries) > 1:
        curves[0].legend()
    return picture


def _title(summaries: Sequence[Mapping[str, Any]]) -> str:
    names = ("preset", "world_size", "device_name", "precision", "global_batch")
    preset, ranks, device, precision, batch = (summaries[0].get(name) or "?" for name in names)
    samples, state = non_negative(summaries[-1].get("samples")) or 0, summaries[-1].get("state")
    text = f"{preset} on {ranks} × {device}, {precision}, global batch {batch}: {samples:,.0f} samples"
    return text if state in ("completed", "running") else f"{text}, {state}"  # it draws itself before it is over


def _numbers(lines: Sequence[Mapping[str, Any]], *columns: str) -> pd.DataFrame:
    """Columns of lines by step; without a value where there is no number from zero on."""
    import pandas as pd

    names = ["step", *columns]
    values = [[non_negative(line.get(name)) for name in names] for line in lines]
    return pd.DataFrame(values, columns=names, dtype=float).set_index("step")


def _draw_curve(axes: Axes, values: pd.Series, color: str, is_noisy: bool) -> None:
    """A curve; of a noisy one the moving mean, over the curve in pale."""
    width = min(SMOOTHED, len(values) // 10)
    if width > 1 and is_noisy:
        axes.plot(values, color=color, linewidth=0.6, alpha=0.3)
        values = values.rolling(width).mean().dropna()
    axes.plot(values, color=color)


def _draw_evaluations(axes: Axes, lines: Sequence[Mapping[str, Any]], color: str | None) -> None:
    """Some of what was evaluated, each in a colour of its own where the run has none, and dotted what chance would reach."""
    names = dict.fromkeys(name for line in lines for name in line if name.endswith(("_r1", "_top1", "_map")))
    for name, style in zip([*names][:EVALUATED], SERIES_STYLES, strict=False):
        words = name.removesuffix("_r1").replace("_", " ") + " R@1" * name.endswith("_r1")
        label = f"_{words}" if words in axes.get_legend_handles_labels()[1] else words  # once for all runs
        look: dict[str, Any] = {"color": color or style["color"], "marker": style["marker"], "markersize": 3}
        axes.plot(_numbers(lines, name)[name].dropna(), label=label, **look)
        if (chance := non_negative(section(lines[-1], "chance").get(name))) is not None:
            axes.axhline(chance, color=look["color"], linewidth=0.8, linestyle=":")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a run, or several of training.")
    parser.add_argument("directories", nargs="+", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--output", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    options = parser.parse_args()
    draw_runs(options.directories, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
