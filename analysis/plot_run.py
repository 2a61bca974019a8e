"""Runs as a picture, of the benchmark or of training.

    python analysis/plot_run.py RUN_DIRECTORY… --output run.png|svg|pdf

Of a benchmark: its final figures, every step's time, and where a step's time goes. Of training: loss, learning rate, logit
scale, gradient norm, evaluation and speed, from the run's first step where it was resumed; several training runs, such as one
and its control, share the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import (
    COLORS,
    SERIES_STYLES,
    STACK_COLORS,
    Picture,
    check_format,
    gpu_axis,
    log_axis,
    styled,
)
from clap_ds.analysis.record import non_negative, read_json, read_record, read_steps
from clap_ds.analysis.runs import parse_options
from clap_ds.analysis.table import Row
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.schema import STEP_PHASES
from clap_ds.record.statistics import percentile

if TYPE_CHECKING:
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
    check_format(output)
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


@styled
def draw_benchmark(directory: Path) -> Picture:
    """Draw a run of the benchmark; UserError where it has no timed step."""
    from matplotlib.transforms import blended_transform_factory

    run = read_record(directory)
    steps = [line for line in read_steps(directory, "warmup", "window") if non_negative(line.get("time_s"))]
    timed = [line["time_s"] for line in steps if line["phase"] == "window"]
    if not (run.rate and run.step_time_s and timed):
        raise UserError(f"{directory}: no timed windows; the run's state is {run.state!r}")
    picture = Picture((1.6, 1.6, 0.6))
    table, times, parts = picture.panels
    beside = blended_transform_factory(picture.figure.transFigure, table.transAxes)
    details = [run.precision, f"batch per rank {run.batch_per_gpu or 'unknown'}"]
    details += [f"{run.text_tokens} text tokens"] if run.text_tokens else []
    picture.title(f"{run.model_name} on {run.gpus} × {run.device}, {', '.join(filter(None, details))}")
    facts = {
        f"samples/s/{run.unit.removesuffix('s')}": f"{run.rate:,.2f}",
        run.interval_label: f"{run.interval[0]:,.2f} – {run.interval[1]:,.2f}" if run.interval else "–",
        "samples/s in all": f"{run.rate * run.gpus:,.2f}",
        "step, median": f"{1000 * run.step_time_s:,.0f} ms",
        "step, 95th percentile": f"{1000 * percentile(timed, 95):,.0f} ms",
        "step, slowest rank": f"{1000 * run.slowest_rank_step_time_s:,.0f} ms" if run.slowest_rank_step_time_s else "–",
        "waiting for data": f"{run.data_wait_percent:.2f} %" if run.data_wait_percent is not None else "–",
        "peak memory per rank": f"{run.memory_peak_gib:,.2f} GiB" if run.memory_peak_gib else "–",
    }
    table.axis("off")
    for at, lines, align in ((0.02, facts, "left"), (0.98, facts.values(), "right")):
        text = table.text(at, 0.5, "\n".join(lines), va="center", ha=align, linespacing=1.5, transform=beside)
        text.set_in_layout(False)
    for phase, color, marker, label in (("warmup", COLORS[2], "s", "warm-up"), ("window", COLORS[0], "o", "timed")):
        chosen = [line for line in steps if line["phase"] == phase]
        numbers, seconds = [line["step"] for line in chosen], [line["time_s"] for line in chosen]
        times.plot(numbers, seconds, marker, color=color, markersize=3, label=label)
    times.axhline(run.step_time_s, color="black", linewidth=0.8, linestyle="--", label="median")
    times.set(xlabel="step", ylabel="step time (s)", ylim=(0, 1.1 * max(line["time_s"] for line in steps)))
    times.legend(loc="lower right", handlelength=1.5)
    if run.breakdown_s:
        _draw_parts(picture, parts, [run])
    else:
        parts.axis("off")
        parts.text(0, 0.5, "no breakdown of the step was recorded", va="center")
    return picture


@styled
def draw_breakdown(rows: Sequence[Row]) -> Picture:
    """Draw the parts of a step at every scale of one series, of which at least one has a breakdown."""
    known = [row for row in rows if row.breakdown_s]
    picture = Picture((2.2 if len(known) > 1 else 0.6,))
    _draw_parts(picture, picture.panels[0], known)
    return picture


def _draw_parts(picture: Picture, axes: Axes, rows: Sequence[Row]) -> None:
    """Areas over the scales, or one lying bar, in milliseconds, named with the last scale's shares."""
    seconds = {part: [row.breakdown_s.get(part, 0.0) for row in rows] for part in STEP_PHASES}
    shares = percents([of_part[-1] for of_part in seconds.values()])
    named = {
        f"{part.replace('_', ' ')} {share}\N{NO-BREAK SPACE}%": [1000 * value for value in of_part]
        for (part, of_part), share in zip(seconds.items(), shares, strict=True)
        if any(of_part)
    }

    if not named:
        axes.set_axis_off()
    elif len(rows) == 1:
        picture.stack(axes, named, [str(rows[0].gpus)], lying=True)
        axes.set(ylabel=rows[0].unit, xlabel="ms a step")
    else:
        gpus = [row.gpus for row in rows]
        axes.stackplot(gpus, *named.values(), labels=list(named), colors=STACK_COLORS, edgecolor="white", linewidth=0.4)
        axes.set_ylim(bottom=0)
        picture.name_beside(axes)
        gpu_axis(axes, gpus, rows[0].unit, margin=1)
        axes.set_ylabel("ms a step")


def percents(values: Sequence[float]) -> list[str]:
    """Shares of the sum in percent, to one decimal, that add up to 100.0: what rounding leaves goes where most was cut off."""
    exact = [1000 * value / sum(values) for value in values] if sum(values) else [0.0] * len(values)
    tenths = [int(value) for value in exact]
    most_cut = sorted(range(len(exact)), key=lambda index: tenths[index] - exact[index])
    for index in most_cut[: round(sum(exact)) - sum(tenths)]:
        tenths[index] += 1
    return [f"{tenth / 10:.1f}" for tenth in tenths]


@styled
def draw_training(summaries: Mapping[Path, Mapping[str, Any]]) -> Picture:
    """Draw training runs, by their directories; UserError for one without a step."""
    picture = Picture((1.6,) * 3, columns=2, columns_wide=1.5)
    picture.title(_title(list(summaries.values())))
    loss, speed, evaluation = picture.panels[0], picture.panels[4], picture.panels[5]
    evaluated = False
    for index, (directory, summary) in enumerate(summaries.items()):
        history = summary.get("history") if summary.get("resumed_at_step") else None
        steps = read_steps(directory, "train", history=history)
        if not steps:
            raise UserError(f"{directory}: no step of training; the run's state is {summary.get('state')!r}")
        color = COLORS[index % len(COLORS)]
        loss.plot([], [], color=color, label=" " + directory.name)
        for axes, name in zip(picture.panels, CURVES, strict=False):
            _draw_curve(axes, steps, name, color)
        lines = read_steps(directory, "evaluation", history=history)
        evaluated |= _draw_evaluations(evaluation, lines, color if len(summaries) > 1 else None)
        _draw_speed(speed, steps, color)
    for axes, label in zip(
        picture.panels, [*CURVES.values(), "samples/s, each step", "evaluation, 0 to 1"], strict=True
    ):
        axes.set(xlabel="step", ylabel=label)
    log_axis(picture.panels[3])
    picture.panels[1].set_ylim(bottom=0)
    evaluation.set_ylim(0, 1.02)
    speed.set_ylim(bottom=0)
    if evaluated:
        picture.name_below(evaluation, columns=2)
    else:
        evaluation.text(0.5, 0.5, "nothing evaluated", ha="center", color="0.4", transform=evaluation.transAxes)
    if len(summaries) > 1:
        loss.legend(loc="upper right")
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


def _draw_curve(axes: Axes, steps: Sequence[Mapping[str, Any]], name: str, color: str) -> None:
    import numpy as np

    known = [line for line in steps if non_negative(line.get(name)) is not None]
    at, values = [line["step"] for line in known], [line[name] for line in known]
    width = min(SMOOTHED, len(values) // 10)
    if width > 1 and name in NOISY:
        axes.plot(at, values, color=color, linewidth=0.6, alpha=0.3)
        at, values = at[width - 1 :], list(np.convolve(values, np.ones(width) / width, "valid"))
    axes.plot(at, values, color=color)


def _draw_speed(axes: Axes, steps: Sequence[Mapping[str, Any]], color: str) -> None:
    known = [line for line in steps if non_negative(line.get("samples")) is not None]
    timed = [(before, line) for before, line in pairwise(known) if non_negative(line.get("time_s"))]
    speed = [(line["samples"] - before["samples"]) / line["time_s"] for before, line in timed]
    axes.plot([line["step"] for _, line in timed], speed, ".", color=color, markersize=2)


def _draw_evaluations(axes: Axes, lines: Sequence[Mapping[str, Any]], color: str | None) -> bool:
    """Some of what was evaluated, each in a colour of its own where the run has none, and dotted what chance would reach;
    whether there was any."""
    names = (name for line in lines for name in line if name.startswith(("retrieval_", "zero_shot_")))
    chosen = [name for name in dict.fromkeys(names) if name.endswith(("_r1", "_top1", "_map"))][:EVALUATED]
    named = axes.get_legend_handles_labels()[1]
    drawn = False
    for name, style in zip(chosen, SERIES_STYLES, strict=False):
        known = [line for line in lines if non_negative(line.get(name)) is not None]
        if not known:
            continue
        words = name.removesuffix("_r1").replace("_", " ") + (" R@1" if name.endswith("_r1") else "")
        chances = known[-1].get("chance")
        chance = non_negative(chances.get(name)) if isinstance(chances, dict) else None
        look: dict[str, Any] = {"color": color or style["color"], "marker": style["marker"], "markersize": 3}
        if chance is not None:
            axes.axhline(chance, color=look["color"], linewidth=0.8, linestyle=":")
            words += f" (chance {chance:.2g})"
        label = words if words not in named else f"_{words}"  # of another run, in its colour
        axes.plot([line["step"] for line in known], [line[name] for line in known], label=label, **look)
        drawn = True
    return drawn


def main() -> None:
    options = parse_options("Draw a run, or several of training.", "directories", "--output", required="--output")
    draw_runs(options.directories, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
