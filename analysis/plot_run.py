"""Runs as a picture, of the benchmark or of training.

    python analysis/plot_run.py RUN_DIRECTORY… --output run.png|svg|pdf|html

Of a benchmark: its final figures, every step's time, and where a step's time goes. Of training: loss, learning rate, logit
scale, gradient norm, evaluation and speed, from the run's first step where it was resumed; several training runs, such as one
and its control, share the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import SERIES_STYLES, Picture, check_format, styled
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
_FACES = ("#b8a100", ""), ("#0b3c6f", ""), ("#8c2d7d", ""), ("#7fa8d1", ""), ("#d1600a", "///"), ("#c9c9c9", "...")
"""Colour and hatch of each of `STEP_PHASES`."""


def draw_runs(directories: Sequence[Path], output: Path) -> None:
    """Draw one run of the benchmark, or any number of training runs, whatever state they are in.

    The ending of `output` chooses the format: .png, .svg, .pdf or .html. Raises UserError for what are no run directories,
    runs that can't be drawn together or have no timed step, and where matplotlib is missing.
    """
    check_format(output)
    notes: list[str] = []
    summaries = {directory: read_json(directory, "summary", notes) for directory in directories}
    for directory, summary in summaries.items():
        if not summary:
            raise UserError(f"{directory}: not a readable run directory: {', '.join(notes) or 'no summary.json in it'}")
    if all(summary.get("command") == "train" for summary in summaries.values()):
        picture = draw_training(summaries)
    elif len(directories) == 1:
        picture = draw_benchmark(directories[0])
    else:
        raise UserError("several runs share a picture only where all are of training; plot_scaling.py draws the others")
    picture.save(output, ", ".join(directory.name for directory in directories))


@styled
def draw_benchmark(directory: Path) -> Picture:
    """Draw a run of the benchmark; UserError where it has no timed step."""
    run = read_record(directory)
    steps = [line for line in read_steps(directory, "warmup", "window") if non_negative(line.get("time_s"))]
    timed = [line["time_s"] for line in steps if line["phase"] == "window"]
    if not (run.rate and run.step_time_s and timed):
        raise UserError(f"{directory}: no timed windows; the run's state is {run.state!r}")
    picture = Picture((1, 3), columns_wide=3, panel_height=2.1)
    table, times, parts = picture.panels
    picture.figure.suptitle(
        f"{run.model} on {run.gpus} × {run.device}, {run.precision}, batch per GPU {run.batch_per_gpu}, "
        f"{run.text_tokens} text tokens"
    )
    facts = {
        "samples/s/GPU": f"{run.rate:,.2f}",
        f"  {run.interval_label}": f"{run.interval[0]:,.2f} – {run.interval[1]:,.2f}" if run.interval else "–",
        "samples/s in all": f"{run.rate * run.gpus:,.2f}",
        "step, median": f"{1000 * run.step_time_s:,.0f} ms",
        "step, 95th percentile": f"{1000 * percentile(timed, 95):,.0f} ms",
        "step, slowest rank": f"{1000 * run.slowest_rank_step_time_s:,.0f} ms" if run.slowest_rank_step_time_s else "–",
        "waiting for data": f"{run.data_wait_percent:.2f} %" if run.data_wait_percent is not None else "–",
        "peak memory per GPU": f"{run.memory_peak_gib:,.2f} GiB" if run.memory_peak_gib else "–",
    }
    table.axis("off")
    table.text(0, 0.5, "\n".join(facts), va="center", linespacing=2)
    table.text(1, 0.5, "\n".join(facts.values()), va="center", ha="right", linespacing=2)
    for phase, color, label in (("warmup", "0.6", "warm-up"), ("window", SERIES_STYLES[0]["color"], "timed")):
        chosen = [line for line in steps if line["phase"] == phase]
        at, seconds = [line["step"] for line in chosen], [line["time_s"] for line in chosen]
        times.plot(at, seconds, ".", color=color, label=label)
    times.axhline(run.step_time_s, color="black", linewidth=0.8, linestyle="--", label="median")
    times.set(xlabel="step", ylabel="step time (s)", ylim=(0, None))
    times.legend(loc="lower right")
    _draw_bars(picture, parts, [run])
    if run.breakdown_s:
        parts.legend(loc="center right", reverse=True)
    return picture


@styled
def draw_breakdown(rows: Sequence[Row]) -> Picture:
    """Draw the parts of a step at every scale of one series, of which at least one has a breakdown."""
    picture = Picture(panel_height=2.2)
    _draw_bars(picture, picture.panels[0], [row for row in rows if row.breakdown_s])
    picture.figure.legend(loc="outside lower center", ncols=2)
    return picture


def _draw_bars(picture: Picture, axes: Axes, rows: Sequence[Row]) -> None:
    """One stacked bar a row, in milliseconds, labelled with shares where there is only one."""
    bottoms = [0.0] * len(rows)
    for part, (color, hatch) in zip(STEP_PHASES, _FACES, strict=True):
        heights = [1000 * row.breakdown_s.get(part, 0.0) for row in rows]
        if not any(heights):
            continue
        shares = [height / 10 / sum(row.breakdown_s.values()) for row, height in zip(rows, heights, strict=True)]
        name = part.replace("_", " ")
        face: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white"}
        label = f"{name} {shares[0]:.0f} %" if len(rows) == 1 else name
        axes.bar(range(len(rows)), heights, 0.62, bottom=bottoms, label=label, **face)
        for index, (row, height, share) in enumerate(zip(rows, heights, shares, strict=True)):
            if height:
                text = f"{row.nodes} nodes, {row.gpus} GPUs\n{name} {height:.3g} ms, {share:.1f} %"
                picture.hover(axes, index, bottoms[index] + height / 2, text)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(rows)), [str(row.gpus) for row in rows])
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="GPUs", ylabel="ms a step", xlim=(-0.75, max(len(rows), 3) - 0.25))


@styled
def draw_training(summaries: Mapping[Path, Mapping[str, Any]]) -> Picture:
    """Draw training runs, by their directories; UserError for one without a step."""
    picture = Picture((2, 3), columns_wide=3, panel_height=2.4)
    picture.figure.suptitle(_title(list(summaries.values())))
    handles: list[Any] = []
    for index, (directory, summary) in enumerate(summaries.items()):
        history = summary.get("history") if summary.get("resumed_at_step") else None
        steps = read_steps(directory, "train", history=history)
        if not steps:
            raise UserError(f"{directory}: no step of training; the run's state is {summary.get('state')!r}")
        color = SERIES_STYLES[index % len(SERIES_STYLES)]["color"]
        handles += picture.panels[0].plot([], [], color=color)
        for axes, name in zip(picture.panels, CURVES, strict=False):
            _draw_curve(axes, steps, name, color)
        _draw_evaluations(
            picture.panels[4],
            read_steps(directory, "evaluation", history=history),
            color if len(summaries) > 1 else None,
        )
        timed = [(before, line) for before, line in pairwise(steps) if non_negative(line.get("time_s"))]
        speed = [(line["samples"] - before["samples"]) / line["time_s"] for before, line in timed]
        picture.panels[5].plot([line["step"] for _, line in timed], speed, ".", color=color, markersize=2)
    for axes, label in zip(picture.panels, [*CURVES.values(), "evaluation", "samples/s, each step"], strict=True):
        axes.set(xlabel="step", ylabel=label)
    picture.panels[3].set_yscale("log")
    picture.panels[4].set_ylim(0, 1.02)
    picture.panels[5].set_ylim(bottom=0)
    if names := [directory.name for directory in summaries if len(summaries) > 1]:
        picture.figure.legend(handles, names, loc="outside lower center", ncols=2)
    return picture


def _title(summaries: Sequence[Mapping[str, Any]]) -> str:
    first, last = summaries[0], summaries[-1]
    text = f"{first.get('preset')} on {first.get('world_size')} × {first.get('device_name')}, {first.get('precision')}"
    text += f", global batch {first.get('global_batch')}: {last.get('samples', 0):,} samples"
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


def _draw_evaluations(axes: Axes, lines: Sequence[Mapping[str, Any]], color: str | None) -> None:
    """Up to four of what was evaluated, each in a colour of its own where the run has none."""
    names = (name for line in lines for name in line if name.startswith(("retrieval_", "zero_shot_")))
    chosen = [name for name in dict.fromkeys(names) if name.endswith(("_r1", "_top1", "_map"))][:4]
    for name, style in zip(chosen, SERIES_STYLES, strict=False):
        known = [line for line in lines if name in line]
        at, values = [line["step"] for line in known], [line[name] for line in known]
        axes.plot(at, values, color=color or style["color"], marker=style["marker"], markersize=3, label=name)
    if chosen and color is None:
        axes.legend()
    if not chosen:
        axes.text(0.5, 0.5, "nothing evaluated", ha="center", color="0.5", transform=axes.transAxes)


def main() -> None:
    options = parse_options("Draw a run, or several of training.", "directories", "--output", required="--output")
    draw_runs(options.directories, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
