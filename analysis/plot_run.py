"""Command: one run as a picture: its final figures, every step's time, and where a step's time goes.

    python analysis/plot_run.py RUN_DIRECTORY --output run.png

Leaves comparing runs to the other commands of this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PHASES = ("data_wait", "forward", "loss", "backward", "exposed_communication", "optimizer")


class RunError(ValueError):
    """A run directory that can't be drawn."""


def read_run(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and steps of a completed run.

    Raises:
        RunError: no run directory, or a run without timed windows.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise RunError(f"{directory}: not a readable run directory: {error}") from None
    if summary.get("command") == "train":
        raise RunError(f"{directory}: a training run; analysis/plot_training.py draws its curves")
    if "step_time_s" not in summary:
        raise RunError(f"{directory}: no timed windows; the run's state is {summary.get('state')!r}")
    return summary, steps


def draw(summary: dict[str, Any], steps: list[dict[str, Any]], output: Path) -> None:
    """Draw the figure and write it to `output`, whose ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (table, times, phases) = pyplot.subplots(
        1, 3, figsize=(11, 3.1), width_ratios=(1.25, 1, 1), layout="constrained"
    )
    figure.suptitle(_title(summary), fontsize=10, fontweight="bold")
    _draw_table(table, summary)
    _draw_steps(times, summary, steps)
    _draw_phases(phases, summary)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def _title(summary: dict[str, Any]) -> str:
    return (
        f"{summary['preset']} on {summary['world_size']} × {summary['device_name']}, {summary['precision']},"
        f" micro-batch {summary['micro_batch_per_gpu']}, {summary['text_tokens']} text tokens"
    )


def _draw_table(axes: Any, summary: dict[str, Any]) -> None:
    rate, step = summary["samples_per_s_per_gpu"], summary["step_time_s"]
    rows = [
        ("samples/s per rank", f"{rate['median']:,.2f}"),
        ("  its interval", f"{rate['low']:,.2f} – {rate['high']:,.2f}"),
        ("samples/s in all", f"{summary['samples_per_s']:,.2f}"),
        ("step, median", f"{step['median'] * 1000:,.0f} ms"),
        ("step, 95th percentile", f"{step['p95'] * 1000:,.0f} ms"),
        ("step, slowest rank", f"{step['slowest_rank_median'] * 1000:,.0f} ms"),
        ("waiting for data", f"{summary['data_wait_percent']:.2f} %"),
        ("peak memory per rank", f"{summary['memory_peak_bytes'] / 2**30:,.2f} GiB"),
    ]
    axes.axis("off")
    drawn = axes.table(cellText=rows, cellLoc="left", loc="center", edges="horizontal", colWidths=(0.6, 0.4))
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    drawn.scale(1, 1.35)
    for (_, column), cell in drawn.get_celld().items():
        cell.set_edgecolor("0.85")
        if column == 1:
            cell.get_text().set_horizontalalignment("right")


def _draw_steps(axes: Any, summary: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    for phase, color, name in (("warmup", "0.7", "warm-up"), ("window", "tab:blue", "timed")):
        chosen = [step for step in steps if step["phase"] == phase]
        axes.plot([step["step"] for step in chosen], [step["time_s"] for step in chosen], ".", color=color, label=name)
    axes.axhline(summary["step_time_s"]["median"], color="black", linewidth=0.8, linestyle="--", label="median")
    axes.set(xlabel="step", ylabel="step time, s", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _draw_phases(axes: Any, summary: dict[str, Any]) -> None:
    breakdown = summary.get("breakdown_s") or {}
    names = [phase for phase in reversed(PHASES) if phase in breakdown]
    seconds = [breakdown[name] for name in names]
    bars = axes.barh([name.replace("_", " ") for name in names], seconds, color="tab:blue")
    total = sum(seconds)
    axes.bar_label(bars, [f"{100 * value / total:.0f} %" for value in seconds], padding=3, fontsize=8)
    axes.set(xlabel="seconds of a step (instrumented pass)", xlim=(0, 1.2 * max(seconds, default=1.0)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="analysis/plot_run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="picture to write: .png, .svg or .pdf"
    )
    arguments = parser.parse_args()
    try:
        draw(*read_run(arguments.run), arguments.output)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
