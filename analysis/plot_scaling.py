"""Runs and scaling tables → one figure: scaling efficiency and throughput, with the ideal line, against GPUs.

    python analysis/plot_scaling.py RUN_OR_TABLE… [--rate engine] --output scaling.png|svg|pdf

Draws what `efficiency.py` works out, and for `project.py` the projection, and works out nothing itself. Each repeat is a dot; a
table that `efficiency.py` wrote knows only their mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.figure import SERIES_STYLES, Picture, gpu_axis, log_axis, styled
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Scale, by_series, relative_to, unit
from clap_ds.analysis.weak_scaling import Series
from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDEAL: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}
Curves = Mapping[str, Sequence[Scale]]


def read_curves(options: argparse.Namespace) -> dict[str, list[Scale]]:
    """Rows with a rate of each series of a command's inputs, by its title; UserError where there is none."""
    found = by_series([row for row in scaling_table(read_runs(options.inputs, options)) if row.rate])
    if not found:
        raise UserError(f"{', '.join(map(str, options.inputs))}: no row has a rate")
    return {rows[0].title: rows for rows in found}


def answer(rows: Sequence[Scale]) -> str:
    """What a series' rows with a rate come to at the largest scale: `87.3 ± 0.6 % efficiency on 512 GPUs: …`."""
    first, last = (pick(rows, key=lambda row: (row.gpus, row.nodes)) for pick in (min, max))
    number, of = last.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma"), last.unit.removesuffix("s")
    rate = f"{number} samples/s/{of}"
    if last.scaling_efficiency_percent is None or first.gpus == last.gpus:
        return f"{rate} on {last.scale}"
    percent = last.cell("scaling_efficiency_percent", "scaling_efficiency_2sigma_percent")
    doubted = any("efficiency above 100 %" in row.notes for row in rows)
    doubt = " (in doubt: a scale is above 100 % by more than its ±)" if doubted else ""
    on = " ".join(filter(None, [f"on {last.gpus} {last.unit}", relative_to(rows)]))
    return f"{percent} % efficiency {on}{doubt}: {rate}"


@styled()
def draw(curves: Curves) -> Picture:
    """Draw efficiency over throughput, under the answer."""
    picture = Picture((2.6, 1.3), share_x=True)
    answers = {label: answer(rows) for label, rows in curves.items()}
    picture.title("\n".join(f"{label}: {text}" if len(curves) > 1 else text for label, text in answers.items()))
    efficiency, throughput = picture.panels
    shown = [(*each, style) for each, style in zip(curves.items(), cycle(SERIES_STYLES), strict=False)]
    for label, rows, style in shown:
        _draw_efficiency(efficiency, fill(label, 60), rows, style)
        _draw_totals(throughput, rows, style)
    all_rows = [row for _, rows, _ in shown for row in rows]
    gpu_axis(throughput, [row.gpus for row in all_rows], unit(*(row.device for row in all_rows)))
    efficiency.axhline(100, **IDEAL)
    relative = {relative_to(rows) for rows in curves.values()}
    efficiency.set_ylabel(
        "\n".join(filter(None, ["scaling efficiency (%)", *(relative if len(relative) == 1 else ())]))
    )
    log_axis(throughput)
    throughput.set_ylabel("samples/s (log)")
    throughput.legend()
    for what in dict.fromkeys(row.uncertainty_from for row in all_rows if row.samples_per_s_per_gpu_2sigma):
        efficiency.plot([], [], "|", color="0.3", label=fill(f"±: {what}", 60))
    picture.name_below(efficiency)
    return picture


def _draw_efficiency(axes: Axes, label: str, rows: Sequence[Scale], style: Mapping[str, Any]) -> None:
    """Means with their ±, and a dot for each repeat."""
    known = [row for row in rows if row.scaling_efficiency_percent is not None]
    values = [row.scaling_efficiency_percent or 0.0 for row in known]
    errors = [row.scaling_efficiency_2sigma_percent or 0.0 for row in known]
    gpus = [row.gpus for row in known]
    axes.errorbar(gpus, values, errors if any(errors) else None, elinewidth=0.8, label=label, **style)
    for row, value in zip(known, values, strict=True):
        if len(row.runs) > 1:
            repeats = [value * (run.rate or 0.0) / (row.rate or 1.0) for run in row.runs]
            axes.plot([1.08 * row.gpus] * len(repeats), repeats, ".", color=style["color"], markersize=3)


def _draw_totals(axes: Axes, rows: Sequence[Scale], style: Mapping[str, Any]) -> None:
    """Samples/s of all GPUs, and the line of as many from each as at the baseline."""
    ends = [pick(row.gpus for row in rows) for pick in (min, max)]
    baseline = next((row for row in rows if row.speedup == 1), rows[0])
    ideal = [(baseline.rate or 0.0) * gpus for gpus in ends]
    axes.plot(ends, ideal, label="_" if axes.lines else "ideal", **IDEAL)
    totals = [row.samples_per_s or 0.0 for row in rows]
    errors = [(row.samples_per_s_per_gpu_2sigma or 0.0) * row.gpus for row in rows]
    axes.errorbar([row.gpus for row in rows], totals, errors if any(errors) else None, elinewidth=0.8, **style)


@styled()
def draw_projection(found: Sequence[Series], title: str = "") -> Picture:
    """Draw projected efficiency with its band over the measured one.

    Points are measured; the law's line is solid as far as they go, and dashed, in a band, beyond.
    """
    picture = Picture((2.6,))
    picture.title(title)
    (efficiency,) = picture.panels
    for series, style in zip(found, cycle(SERIES_STYLES), strict=False):
        _draw_projected(efficiency, series, style)
    gpus = [nodes * series.gpus_per_node for series in found for nodes in series.node_counts]
    gpu_axis(efficiency, gpus, unit(*(series.title for series in found)))
    efficiency.set(ylabel="efficiency (%)", ylim=(0, None))
    picture.name_below(efficiency)
    return picture


def _draw_projected(axes: Axes, series: Series, style: Mapping[str, Any]) -> None:
    """Points, fitted line and band of one series."""
    law, color, counts, scales = series.best_law(), style["color"], series.node_counts, len(series.rates)
    fit, bands, gpus = series.fit(law), series.bands(counts), [n * series.gpus_per_node for n in counts]
    points = [series.efficiency_percent(rate) for _, rate in series.rates]
    halves = [point * error for point, error in zip(points, series.errors, strict=False)] or None
    look = {**style, "linestyle": "none", "elinewidth": 0.8, "label": f"{series.name}, measured"}
    axes.errorbar(gpus[:scales], points, halves, **look)
    fitted = [series.efficiency_percent(fit.rate(nodes)) for nodes in counts]
    axes.plot(gpus[:scales], fitted[:scales], color=color)
    beyond = slice(scales - 1, None)
    axes.plot(gpus[beyond], fitted[beyond], "--", color=color, label=f"{series.name}, by {law} with 95 % band")
    if bands:
        low, high = zip(*(bands[nodes] for nodes in counts[beyond]), strict=True)
        axes.fill_between(gpus[beyond], low, high, color=color, alpha=0.18, linewidth=0)


def main() -> None:
    parser = input_parser("Plot the scaling of runs, logs or tables.")
    parser.add_argument("--output", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    options = parser.parse_args()
    draw(read_curves(options)).save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
