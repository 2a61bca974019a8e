"""Plot scaling efficiency and speed-up of runs and tables against the number of GPUs, with the ideal line.

    python analysis/plot_scaling.py RUN_OR_TABLE… [--rate engine] --output scaling.png [--columns 1] [--title …]

Also draws the projection of `project.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from clap_ds.analysis.figure import SERIES_STYLES, Picture, gpu_axis, label_ends, log_axis, percent_axis, styled
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Scale, by_series, relative_to, unit
from clap_ds.analysis.weak_scaling import Series
from clap_ds.config.errors import UserError, run_alone

IDEAL: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}


def read_curves(options: argparse.Namespace) -> dict[str, list[Scale]]:
    """Return each series' rows with a rate, by title. UserError if there are none."""
    found = by_series([row for row in scaling_table(read_runs(options.inputs, options)) if row.rate])
    if not found:
        raise UserError(f"{', '.join(map(str, options.inputs))}: no row has a rate")
    return {rows[0].title: rows for rows in found}


def answer(rows: Sequence[Scale]) -> str:
    """Summarize a series at its largest scale: `87.3 ± 0.6% efficiency on 512 GPUs: …`. `rows`: with a rate."""
    first, last = (pick(rows, key=lambda row: (row.gpus, row.nodes)) for pick in (min, max))
    number, of = last.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma"), last.unit.removesuffix("s")
    if first.gpus == last.gpus:
        return f"{number} samples/s/{of} on {last.scale}"
    percent = last.cell("scaling_efficiency_percent", "scaling_efficiency_2sigma_percent")
    on = " ".join(filter(None, [f"on {last.gpus} {last.unit}", relative_to(rows)]))
    return f"{percent}% efficiency {on}: {number} samples/s/{of}"


def short_names(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles of series into their distinguishing and their common parts."""
    parts = [title.split(", ") for title in titles]
    if len(parts) == 1:
        return [parts[0][0]], ", ".join(parts[0][1:])
    common = [part for part in parts[0] if all(part in others for others in parts)]
    return [", ".join(part for part in each if part not in common) or each[0] for each in parts], ", ".join(common)


@styled()
def draw(curves: Mapping[str, Sequence[Scale]], columns: int = 2, title: str = "") -> Picture:
    """Draw efficiency and speed-up with ± and the ideal: side by side in two columns, or stacked in one."""
    picture = Picture((2.1,) * (3 - columns), columns, columns, share_x=columns == 1)
    picture.title(title, 1)
    efficiency, speedup = picture.panels
    names, common = short_names([*curves])
    all_rows = [row for rows in curves.values() for row in rows]
    gpus = [row.gpus for row in all_rows]
    ends: dict[Any, list[tuple[float, float, str, str]]] = {efficiency: [], speedup: []}
    for name, rows, style in zip(names, curves.values(), cycle(SERIES_STYLES), strict=False):
        known, look = [row for row in rows if row.speedup], {**style, "elinewidth": 0.8}
        counts, percents = [row.gpus for row in known], [row.scaling_efficiency_percent or math.nan for row in known]
        of_percents = [row.scaling_efficiency_2sigma_percent or 0.0 for row in known]
        efficiency.errorbar(counts, percents, of_percents if any(of_percents) else None, label=fill(name, 40), **look)
        times = [row.speedup or math.nan for row in known]
        of_times = [time * of / percent for time, of, percent in zip(times, of_percents, percents, strict=True)]
        ideal = [counts[0], counts[-1]], [1, counts[-1] / counts[0]]
        speedup.plot(*ideal, label="_" if speedup.lines else "ideal", **IDEAL)
        speedup.errorbar(counts, times, of_times if any(of_times) else None, **look)
        if len(known) > 1:
            ends[efficiency].append((counts[-1], percents[-1], f"{percents[-1]:.1f}%", style["color"]))
            ends[speedup].append((counts[-1], times[-1], f"{times[-1]:.3g}×", style["color"]))
    for axes in (efficiency, speedup):
        gpu_axis(axes, gpus, unit(*(row.device for row in all_rows)))
        axes.set_xlabel(axes.get_xlabel() if axes is speedup or columns == 2 else "")
        axes.set_xlim(right=max(gpus) * (max(gpus) / min(gpus)) ** 0.2 * 1.25)  # for labels at the ends
    every = [row.scaling_efficiency_percent for row in all_rows if row.scaling_efficiency_percent]
    percent_axis(efficiency, min(every, default=100.0), max(every, default=100.0))
    efficiency.axhline(100, label="ideal", **IDEAL)
    most = max(gpus) / min(rows[0].gpus for rows in curves.values())
    if ends[speedup]:
        ends[speedup].append((max(gpus), most, f"ideal {most:.3g}×", IDEAL["color"]))
    relative = ", ".join(filter(None, dict.fromkeys(map(relative_to, curves.values()))))
    efficiency.set_ylabel("\n".join(filter(None, ["scaling efficiency (%)", relative])))
    log_axis(speedup)
    speedup.set_ylabel("\n".join(filter(None, ["speed-up", relative])))
    for axes, labels in ends.items():
        label_ends(axes, labels)
    picture.name_below(efficiency, 1 if columns == 1 else min(len(names) + 1, 3), common)
    return picture


@styled()
def draw_projection(found: Sequence[Series], title: str = "") -> Picture:
    """Draw measured efficiency and the projecting law: solid within measured scales, dashed with its band beyond them."""
    picture = Picture((2.6,), columns_wide=2)
    picture.title(title, 1)
    (axes,) = picture.panels
    names, common = short_names([series.title for series in found])
    measured, ends = [], []
    for name, series, style in zip(names, found, cycle(SERIES_STYLES), strict=False):
        law, color, counts, last = series.select_law(), style["color"], series.node_counts, len(series.rates) - 1
        gpus = [nodes * series.gpus_per_node for nodes in counts]
        points = [series.efficiency_percent(rate) for _, rate in series.rates]
        measured += points
        halves = [point * error for point, error in zip(points, series.errors, strict=False)] or None
        look = {**style, "linestyle": "none", "elinewidth": 0.8, "label": f"{name}, measured"}
        axes.errorbar(gpus[: last + 1], points, halves, **look)
        fitted = [series.efficiency_percent(series.fit(law).rate(nodes)) for nodes in counts]
        axes.plot(gpus[: last + 1], fitted[: last + 1], color=color)
        axes.plot(gpus[last:], fitted[last:], "--", color=color, label=f"{name}, projected by {law} with 95% band")
        ends.append((gpus[-1], fitted[-1], f"{fitted[-1]:.1f}%", color))
        if bands := series.bands(counts[last:]):
            low, high = zip(*bands.values(), strict=True)
            axes.fill_between(gpus[last:], low, high, color=color, alpha=0.18, linewidth=0)
    all_gpus = [nodes * series.gpus_per_node for series in found for nodes in series.node_counts]
    gpu_axis(axes, all_gpus, unit(*(series.title for series in found)), most=16)
    axes.set_xlim(right=max(all_gpus) * 1.9)
    axes.axhline(100, label="ideal", **IDEAL)
    axes.set(ylabel="scaling efficiency (%)")
    percent_axis(axes, min(measured), max(measured), min(percent for _, percent, *_ in ends))
    label_ends(axes, [end for end in ends if end[1] >= axes.get_ylim()[0]])
    picture.name_below(axes, 2, common)
    return picture


def main() -> None:
    parser = input_parser("Plot the scaling of runs, logs or tables.")
    parser.add_argument("--output", type=Path, required=True, help="picture to write; also written as .pdf and .svg")
    parser.add_argument(
        "--columns", type=int, choices=(1, 2), default=2, help="paper columns: 3.25 or 6.5 inches wide (default: 2)"
    )
    parser.add_argument("--title", default="", help="one-line title (default: none)")
    options = parser.parse_args()
    curves = read_curves(options)
    draw(curves, options.columns, options.title).save(options.output, ".pdf", ".svg")
    print("\n".join(f"{title}: {answer(rows)}" for title, rows in curves.items()))
    print(f"wrote {options.output}, also as .pdf and .svg")


if __name__ == "__main__":
    run_alone(main)
