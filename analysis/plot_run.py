"""Runs as a picture, of the benchmark or of training.

    python analysis/plot_run.py RUN_DIRECTORY… --output run.png|svg|pdf

Of a benchmark: its final figures, every step's time, and where a step's time goes. Of training: loss, learning rate, logit
scale, gradient norm, evaluation and speed, from the run's first step where it was resumed; several training runs, such as one
and its control, share the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import COLORS, SERIES_STYLES, Picture, log_axis, styled
from clap_ds.analysis.record import non_negative, read_json, read_record, read_steps, section
from clap_ds.analysis.runs import parse_options
from clap_ds.analysis.table import Row, Run
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.schema import STEP_PHASES
from clap_ds.record.statistics import percentile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SMOOTHED = 50
"""Steps in the moving mean that is drawn over noisy curves; at most a tenth of the run."""
CURVES = {"loss": "loss", "lr": "learning rate", "logit_scale": "logit scale", "gradient_norm": "gradient norm"}
NOISY = ("loss", "gradient_norm")
EVALUATED = 4
"""Metrics of evaluation that are drawn, at most."""


def draw_runs(directories: Sequence[Path], output: Path) -> None:
    """Draw one run of the benchmark, or any number of training runs, whatever state they are in.

    The ending of `output` chooses the format: .png, .svg or .pdf. Raises UserError for what are no run directories,
    runs that can't be drawn together or have no timed step, and where matplotlib is missing.
    """
    notes: list[str] = []
    summaries = {directory: read_json(directory, "summary", notes) for directory in directories}
    for directory, summary in summaries.items():
        if not summary and not read_steps(directory, "window", "train"):
            raise UserError(f"{directory}: not a readable run directory: {', '.join(notes) or 'no summary.json in it'}")
    if all((found.get("command") or _trained(folder)) == "train" for folder, found in summaries.items()):
        picture = draw_training(summaries)
    elif len(directories) == 1:
        picture = draw_benchmark(directories[0])
    else:
        raise UserError("several runs share a picture only where all are of training; plot_scaling.py draws the others")
    picture.save(output)


def _trained(directory: Path) -> str:
    """The command of a run whose summary doesn't say, by the steps it left."""
    return "train" if read_steps(directory, "train") else "bench"


@styled()
def draw_benchmark(directory: Path) -> Picture:
    """Draw a run of the benchmark; UserError where it has no timed step."""
    run = read_record(directory)
    steps = [line for line in read_steps(directory, "warmup", "window") if non_negative(line.get("time_s"))]
    timed = [line["time_s"] for line in steps if line["phase"] == "window"]
    if not (run.rate and run.step_time_s and timed):
        raise UserError(f"{directory}: no timed windows; the run's state is {run.state!r}")
    picture = Picture((1.6, 1.6, 0.6))
    table, times, parts = picture.panels
    details = (run.precision, f"batch per rank {run.batch_per_gpu or 'unknown'}", f"{run.text_tokens} text tokens")
    told = ", ".join(filter(None, details[: 3 if run.text_tokens else 2]))
    picture.title(f"{run.model_name} on {run.gpus} × {run.device}, {told}")
    facts = _facts(run, timed)
    table.axis("off")
    for at, lines, align in ((0, facts, "left"), (1, facts.values(), "right")):
        table.text(at, 0.5, "\n".join(lines), va="center", ha=align, linespacing=1.5)
    for phase, color, marker, label in (("warmup", COLORS[2], "s", "warm-up"), ("window", COLORS[0], "o", "timed")):
        chosen = [(line["step"], line["time_s"]) for line in steps if line["phase"] == phase]
        times.plot(*zip(*chosen, strict=True) if chosen else ((), ()), marker, color=color, markersize=3, label=label)
    times.axhline(run.step_time_s, color="black", linewidth=0.8, linestyle="--", label="median")
    times.set(xlabel="step", ylabel="step time (s)", ylim=(0, 1.1 * max(line["time_s"] for line in steps)))
    times.legend(loc="lower right")
    if run.breakdown_s:
        _draw_parts(picture, parts, [run])
    else:
        parts.axis("off")
        parts.text(0, 0.5, "no breakdown of the step was recorded", va="center")
    return picture


def _facts(run: Run, timed_s: Sequence[float]) -> dict[str, str]:
    """Figures of a run that has a rate and a step time, as they are printed."""
    rate, slowest_s = run.rate or 0.0, run.slowest_rank_step_time_s
    return {
        f"samples/s/{run.unit.removesuffix('s')}": f"{rate:,.2f}",
        run.interval_label: "{:,.2f} – {:,.2f}".format(*run.interval) if run.interval else "–",
        "samples/s in all": f"{rate * run.gpus:,.2f}",
        "step, median": f"{1000 * (run.step_time_s or 0.0):,.0f} ms",
        "step, 95th percentile": f"{1000 * percentile(timed_s, 95):,.0f} ms",
        "step, slowest rank": f"{1000 * slowest_s:,.0f} ms" if slowest_s else "–",
        "waiting for data": f"{run.data_wait_percent:.2f} %" if run.data_wait_percent is not None else "–",
        "peak memory per rank": f"{run.memory_peak_gib:,.2f} GiB" if run.memory_peak_gib else "–",
    }


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
        if any(row.breakdown_s.get(part) for row in rows)
    }
    picture.stack(axes, named, [str(row.gpus) for row in rows])
    axes.set(ylabel=rows[0].unit, xlabel="ms a step")


@styled()
def draw_training(summaries: Mapping[Path, Mapping[str, Any]]) -> Picture:
    """Draw training runs, by their directories; UserError for one without a step."""
    picture = Picture((1.6,) * 3, columns=2, columns_wide=1.5)
    picture.title(_title(list(summaries.values())))
    loss, rate, _, norm, speed, evaluation = picture.panels
    for (directory, summary), color in zip(summaries.items(), cycle(COLORS), strict=False):
        history = summary.get("history") if summary.get("resumed_at_step") else None
        steps = read_steps(directory, "train", history=history)
        if not steps:
            raise UserError(f"{directory}: no step of training; the run's state is {summary.get('state')!r}")
        loss.plot([], [], color=color, label=" " + directory.name)
        _draw_steps(picture.panels, steps, color)
        lines = read_steps(directory, "evaluation", history=history)
        _draw_evaluations(evaluation, lines, color if len(summaries) > 1 else None)
    labels = [*CURVES.values(), "samples/s, each step", "evaluation, 0 to 1"]
    for axes, label in zip(picture.panels, labels, strict=True):
        axes.set(xlabel="step", ylabel=label)
    log_axis(norm)
    rate.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    evaluation.set_ylim(0, 1.02)
    if evaluation.lines:
        picture.name_below(evaluation, columns=2)
    else:
        evaluation.text(0.5, 0.5, "nothing evaluated", ha="center", color="0.4", transform=evaluation.transAxes)
    if len(summaries) > 1:
        loss.legend()
    return picture


def _title(summaries: Sequence[Mapping[str, Any]]) -> str:
    first, last = summaries[0], summaries[-1]
    names = ("preset", "world_size", "device_name", "precision", "global_batch")
    preset, ranks, device, precision, batch = (first.get(name) or "?" for name in names)
    text = f"{preset} on {ranks} × {device}, {precision}, global batch {batch}"
    text += f": {non_negative(last.get('samples')) or 0:,.0f} samples"
    if last.get("state") not in ("completed", "running"):  # it draws itself before it is over
        text += f", {last.get('state')}"
    seconds = non_negative(last.get("time_to_target_s"))
    return text + (f", target reached after {seconds:.0f} s" if seconds else "")


def _numbers(lines: Sequence[Mapping[str, Any]], *columns: str) -> pd.DataFrame:
    """Columns of lines by step; without a value where there is no number from zero on."""
    import pandas as pd

    frame = pd.DataFrame(lines, columns=["step", *columns]).apply(pd.to_numeric, errors="coerce")
    return frame.where(frame >= 0).set_index("step")


def _draw_steps(panels: Sequence[Axes], steps: Sequence[Mapping[str, Any]], color: str) -> None:
    """A training run's curves, the noisy ones with their moving mean, and its speed."""
    frame = _numbers(steps, *CURVES, "samples", "time_s")
    for axes, name in zip(panels, CURVES, strict=False):
        values = frame[name].dropna()
        width = min(SMOOTHED, len(values) // 10)
        if width > 1 and name in NOISY:
            axes.plot(values, color=color, linewidth=0.6, alpha=0.3)
            values = values.rolling(width).mean().dropna()
        axes.plot(values, color=color)
    known = frame.dropna(subset="samples")
    speed = known["samples"].diff() / known["time_s"].where(known["time_s"] > 0)
    panels[len(CURVES)].plot(speed.dropna(), ".", color=color, markersize=2)


def _draw_evaluations(axes: Axes, lines: Sequence[Mapping[str, Any]], color: str | None) -> None:
    """Some of what was evaluated, each in a colour of its own where the run has none, and dotted what chance would reach."""
    names = (name for line in lines for name in line if name.startswith(("retrieval_", "zero_shot_")))
    chosen = [name for name in dict.fromkeys(names) if name.endswith(("_r1", "_top1", "_map"))][:EVALUATED]
    named = axes.get_legend_handles_labels()[1]
    for name, style in zip(chosen, SERIES_STYLES, strict=False):
        values = _numbers(lines, name)[name].dropna()
        words = name.removesuffix("_r1").replace("_", " ") + (" R@1" if name.endswith("_r1") else "")
        look: dict[str, Any] = {"color": color or style["color"], "marker": style["marker"], "markersize": 3}
        chance = non_negative(section(lines[-1], "chance").get(name))
        if chance is not None:
            axes.axhline(chance, color=look["color"], linewidth=0.8, linestyle=":")
            words += f" (chance {chance:.2g})"
        axes.plot(values, label=f"_{words}" if words in named else words, **look)  # once for all runs


def main() -> None:
    options = parse_options("Draw a run, or several of training.", "directories", "--output", required="--output")
    draw_runs(options.directories, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
