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
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import COLORS, SERIES_STYLES, Picture, log_axis, styled
from clap_ds.analysis.read_run import read_json, read_record, read_steps
from clap_ds.analysis.table import Row
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SMOOTHED = 50
"""Steps in the moving mean of noisy curves; at most a tenth of the run."""
CURVES = {
    "loss": "loss", "lr": "learning rate", "logit_scale": "logit scale", "gradient_norm": "gradient norm",
    "speed": "samples/s per step",
}  # fmt: skip
NOISY = ("loss", "gradient_norm", "speed")
PART_COLORS = dict(zip(STEP_PHASES, [COLORS[index] for index in (4, 0, 3, 5, 1, 2)], strict=True))
EVALUATED = 4


def draw_runs(directories: Sequence[Path], output: Path) -> None:
    """Draw one benchmark run, or any number of training runs, in the format of `output`'s suffix.
    UserError if these aren't run directories with timed steps."""
    is_training = (
        len(directories) > 1 or read_json(directories[0], "summary").get("command") == "train"
    )
    (draw_training(directories) if is_training else draw_benchmark(directories[0])).save(output)


@styled()
def draw_benchmark(directory: Path) -> Picture:
    run = read_record(directory)
    if not (run.rate and run.step_time_s):
        raise UserError(f"{directory}: no timed windows in this run (state {run.state!r})")
    # A run that was ended before its instrumented steps has no breakdown.
    picture = Picture((1.6, 0.6) if run.breakdown_s else (1.6,))
    times = picture.panels[0]
    rate = f"{run.rate:,.2f} samples/s/{run.unit}"
    if len(run.windows) > 1:
        rate += f" (windows: {min(run.windows):,.2f} – {max(run.windows):,.2f})"
    told = f"{run.precision}, batch per rank {run.batch_per_gpu}, {run.context_length} text tokens"
    if run.state != "completed":
        rate += f", {run.state}"
    picture.title(f"{rate}\n{run.model_name} on {run.gpus} × {run.device}, {told}")
    for phase, look, label in (("warmup", "s", "warm-up"), ("timed", "o", "timed")):
        step_ms = 1000 * _columns(read_steps(directory, phase), "time_s")["time_s"]
        times.plot(step_ms, look, color=COLORS[2 * (phase == "warmup")], markersize=3, label=label)
    median_ms = 1000 * run.step_time_s
    times.axhline(
        median_ms, color="black", linewidth=0.8, linestyle="--", label=f"median {median_ms:,.0f} ms"
    )
    times.set(xlabel="step", ylabel="step time (ms)", ylim=(0, 1.1 * times.dataLim.ymax))
    times.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    if run.breakdown_s:
        _draw_parts(picture, picture.panels[1], [run])
    return picture


@styled()
def draw_breakdown(rows: Sequence[Row]) -> Picture:
    known = [row for row in rows if row.breakdown_s]
    picture = Picture((0.35 + 0.25 * len(known),))
    _draw_parts(picture, picture.panels[0], known)
    return picture


def _draw_parts(picture: Picture, axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a horizontal bar per scale in ms; the legend shows the last scale's shares."""
    import pandas as pd

    parts = 1000 * pd.DataFrame(
        [row.breakdown_s for row in rows], [str(row.gpus) for row in rows]
    ).fillna(0.0)
    colors = [PART_COLORS[part] for part in parts]
    shares = 100 * parts.iloc[-1] / parts.iloc[-1].sum()
    parts.columns = [f"{part.replace('_', ' ')} {share:.1f}%" for part, share in shares.items()]
    parts.plot.barh(
        ax=axes,
        stacked=True,
        width=0.8,
        color=colors,
        edgecolor="white",
        linewidth=0.4,
        legend=False,
    )
    axes.invert_yaxis()
    axes.set(ylabel=f"{rows[0].unit}s", xlabel="ms per step")
    picture.name_below(axes, columns=4)


@styled()
def draw_training(directories: Sequence[Path]) -> Picture:
    picture = Picture((1.6,) * 3, columns=2)
    *curves, evaluation = picture.panels
    titles = []
    for directory, color in zip(directories, cycle(COLORS), strict=False):
        summary = read_json(directory, "summary")
        history = summary.get("history") if summary.get("resumed_at_step") else None
        steps = _columns(
            read_steps(directory, "train", history=history), *CURVES, "samples", "time_s"
        )
        if steps.empty:
            raise UserError(
                f"{directory}: no training steps in this run (state {summary.get('state')!r})"
            )
        steps["speed"] = steps["samples"].diff() / steps["time_s"]
        means = steps.rolling(min(SMOOTHED, max(len(steps) // 10, 1))).mean()
        for axes, name in zip(curves, CURVES, strict=True):
            axes.plot((means if name in NOISY else steps)[name], color=color, label=directory.name)
        lines = read_steps(directory, "evaluation", history=history)
        _draw_evaluations(evaluation, lines, {"color": color} if len(directories) > 1 else {})
        names = ("preset", "world_size", "device_name", "precision", "global_batch", "state")
        preset, ranks, device, precision, batch, state = (
            summary.get(name) or "?" for name in names
        )
        title = f"{directory.name}: {preset} on {ranks} × {device}, {precision}, global batch {batch}, {state}"
        titles.append(f"{title}: {steps['samples'].max():,.0f} samples")
    picture.title("\n".join(titles))
    for axes, label in zip(picture.panels, [*CURVES.values(), "evaluation, 0 to 1"], strict=True):
        axes.set(xlabel="step", ylabel=label)
    log_axis(curves[3])
    if evaluation.lines:
        picture.name_below(evaluation, columns=2)
    if len(directories) > 1:
        curves[0].legend()
    return picture


def _columns(lines: Sequence[Mapping[str, Any]], *columns: str) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(lines, columns=["step", *columns]).set_index("step").astype(float)


def _draw_evaluations(
    axes: Axes, lines: Sequence[Mapping[str, Any]], color: Mapping[str, str]
) -> None:
    """Draw up to `EVALUATED` metrics, in their own colors unless the run has one, and chance levels
    as dotted lines."""
    names = dict.fromkeys(
        name for line in lines for name in line if name.endswith(("_r1", "_top1", "_map"))
    )
    for name, style in zip([*names][:EVALUATED], SERIES_STYLES, strict=False):
        look: dict[str, Any] = {**style, "markersize": 3, "linestyle": "-", **color}
        axes.plot(_columns(lines, name)[name].dropna(), label=name.replace("_", " "), **look)
        if (chance := lines[-1].get("chance", {}).get(name)) is not None:
            axes.axhline(chance, color=look["color"], linewidth=0.8, linestyle=":")
