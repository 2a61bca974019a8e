"""Runs and scaling tables → one figure: scaling efficiency and throughput, with the ideal line, against GPUs.

    python analysis/plot_scaling.py RUN_OR_TABLE… [--rate engine] --output scaling.png|svg|pdf

Draws what `efficiency.py` works out, and for `project.py` the projection, and works out nothing itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.figure import SERIES_STYLES, Picture, gpu_axis, log_axis, styled
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Scale, by_series, relative_to, unit
from clap_ds.analysis.weak_scaling import Series
from clap_ds.config.errors import UserError, run_alone

IDEAL: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}


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
    if first.gpus == last.gpus:
        return f"{number} samples/s/{of} on {last.scale}"
    percent = last.cell("scaling_efficiency_percent", "scaling_efficiency_2sigma_percent")
    on = " ".join(filter(None, [f"on {last.gpus} {last.unit}", relative_to(rows)]))
    return f"{percent} % efficiency {on}: {number} samples/s/{of}"


@styled()
def draw(curves: Mapping[str, Sequence[Scale]]) -> Picture:
    """Draw efficiency over throughput with their ± and the ideal line, under the answer."""
    picture = Picture((2.6, 1.3), share_x=True)
    answers = {label: answer(rows) for label, rows in curves.items()}
    picture.title("\n".join(f"{label}: {text}" if len(curves) > 1 else text for label, text in answers.items()))
    efficiency, throughput = picture.panels
    for (label, rows), style in zip(curves.items(), cycle(SERIES_STYLES), strict=False):
        gpus, look = [row.gpus for row in rows], {**style, "elinewidth": 0.8}
        of_percents = [row.scaling_efficiency_2sigma_percent or 0.0 for row in rows]
        percents = [row.scaling_efficiency_percent or math.nan for row in rows]
        efficiency.errorbar(gpus, percents, of_percents if any(of_percents) else None, label=fill(label, 60), **look)
        ideal = [(rows[0].rate or 0.0) * count for count in (min(gpus), max(gpus))]
        throughput.plot([min(gpus), max(gpus)], ideal, label="_" if throughput.lines else "ideal", **IDEAL)
        halves = [(row.samples_per_s_per_gpu_2sigma or 0.0) * row.gpus for row in rows]
        totals = [row.samples_per_s or 0.0 for row in rows]
        throughput.errorbar(gpus, totals, halves if any(halves) else None, **look)
    all_rows = [row for rows in curves.values() for row in rows]
    gpu_axis(throughput, [row.gpus for row in all_rows], unit(*(row.device for row in all_rows)))
    efficiency.axhline(100, **IDEAL)
    efficiency.set_ylabel("\n".join(["scaling efficiency (%)", *filter(None, {*map(relative_to, curves.values())})]))
    log_axis(throughput)
    throughput.set_ylabel("samples/s (log)")
    throughput.legend()
    picture.name_below(efficiency)
    return picture


@styled()
def draw_projection(found: Sequence[Series], title: str = "") -> Picture:
    """Draw projected efficiency over the measured one: the law's line is solid as far as measurements go, and dashed, in its
    band, beyond."""
    picture = Picture((2.6,))
    picture.title(title)
    (axes,) = picture.panels
    for series, style in zip(found, cycle(SERIES_STYLES), strict=False):
        law, color, counts, last = series.best_law(), style["color"], series.node_counts, len(series.rates) - 1
        gpus = [nodes * series.gpus_per_node for nodes in counts]
        points = [series.efficiency_percent(rate) for _, rate in series.rates]
        halves = [point * error for point, error in zip(points, series.errors, strict=False)] or None
        look = {**style, "linestyle": "none", "elinewidth": 0.8, "label": f"{series.name}, measured"}
        axes.errorbar(gpus[: last + 1], points, halves, **look)
        fitted = [series.efficiency_percent(series.fit(law).rate(nodes)) for nodes in counts]
        axes.plot(gpus[: last + 1], fitted[: last + 1], color=color)
        axes.plot(gpus[last:], fitted[last:], "--", color=color, label=f"{series.name}, by {law} with 95 % band")
        if bands := series.bands(counts[last:]):
            low, high = zip(*bands.values(), strict=True)
            axes.fill_between(gpus[last:], low, high, color=color, alpha=0.18, linewidth=0)
    all_gpus = [nodes * series.gpus_per_node for series in found for nodes in series.node_counts]
    gpu_axis(axes, all_gpus, unit(*(series.title for series in found)))
    axes.set(ylabel="efficiency (%)", ylim=(0, None))
    picture.name_below(axes)
    return picture


def main() -> None:
    parser = input_parser("Plot the scaling of runs, logs or tables.")
    parser.add_argument("--output", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    options = parser.parse_args()
    draw(read_curves(options)).save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
