"""Plot scaling efficiency and speed-up of runs and tables against the number of GPUs, with the ideal line.

Examples:
    clap-ds plot runs/sweeps/htsat_tiny-… --output scaling.png
    clap-ds plot analysis/published/*.csv --output published.png
    clap-ds plot --curves runs/my_run-… --output curves.png      losses and speed of a run, not its scaling
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from clap_ds.analysis.figure import SERIES_STYLES, Picture, gpu_axis, log_axis, styled
from clap_ds.analysis.plot_run import draw_runs
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
    rate = f"{last.cell('samples_per_s_per_gpu')} samples/s/{last.unit}"
    if first.gpus == last.gpus:
        return f"{rate} on {last.scale}"
    percent = last.cell("scaling_efficiency_percent")
    on = " ".join(filter(None, [f"on {last.gpus} {last.unit}s", relative_to(rows)]))
    return f"{percent}% efficiency {on}: {rate}"


def short_names(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles of series into their distinguishing and their common parts."""
    first, *others = parts = [title.split(", ") for title in titles]
    common = [part for part in first if all(part in other for other in others)] if others else first[1:]
    return [", ".join(part for part in each if part not in common) or each[0] for each in parts], ", ".join(common)


@styled()
def draw(curves: Mapping[str, Sequence[Scale]]) -> Picture:
    """Draw efficiency and speed-up with ± and the ideal. The legend has the values at each curve's largest scale."""
    import pandas as pd

    picture = Picture((2.1,), columns=2)
    efficiency, speedup = picture.panels
    names, common = short_names([*curves])
    efficiency.axhline(100, label="ideal", **IDEAL)
    for name, rows, style in zip(names, curves.values(), cycle(SERIES_STYLES), strict=False):
        table = pd.DataFrame([vars(row) for row in rows])
        gpus, percents = table["gpus"], table["scaling_efficiency_percent"]
        errors, ideals = table["scaling_efficiency_percent_ci95"].astype(float), gpus / gpus[0]
        label = f"{name}: {rows[-1].scaling_efficiency_percent:.1f}%, {rows[-1].speedup:.3g}× of {max(ideals):.3g}×"
        speedup.plot(gpus, ideals, **IDEAL)
        for axes, factor in ((efficiency, 1.0), (speedup, ideals / 100)):
            halves = errors * factor if errors.any() else None
            axes.errorbar(gpus, percents * factor, halves, label=fill(label, 50), elinewidth=0.8, **style)
    all_rows = [row for rows in curves.values() for row in rows]
    relative = ", ".join(filter(None, dict.fromkeys(map(relative_to, curves.values()))))
    for axes, quantity in ((efficiency, "scaling efficiency (%)"), (speedup, "speed-up")):
        gpu_axis(axes, [row.gpus for row in all_rows], f"{all_rows[0].unit}s")
        axes.set_ylabel("\n".join(filter(None, [quantity, relative])))
    efficiency.margins(y=0.1)
    log_axis(speedup)
    picture.name_below(efficiency, 2, common)
    return picture


@styled()
def draw_projection(found: Sequence[Series]) -> Picture:
    """Draw measured efficiency and the projecting law: solid within measured scales, dashed with its band beyond them."""
    picture = Picture((2.6,))
    (axes,) = picture.panels
    names, common = short_names([series.title for series in found])
    axes.axhline(100, label="ideal", **IDEAL)
    all_gpus = []
    for name, series, style in zip(names, found, cycle(SERIES_STYLES), strict=False):
        law, color, counts, last = series.select_law(), style["color"], series.node_counts, len(series.rates)
        gpus = [nodes * series.gpus_per_node for nodes in counts]
        all_gpus += gpus
        points = [series.efficiency_percent(rate) for _, rate in series.rates]
        axes.plot(gpus[:last], points, **{**style, "linestyle": "none", "label": f"{name}, measured"})
        fitted = [series.percent_by(law, nodes) for nodes in counts]
        axes.plot(gpus[:last], fitted[:last], color=color)
        label = fill(f"{name} by {law}: {fitted[-1]:.1f}% on {gpus[-1]} GPUs", 60)
        axes.plot(gpus[last - 1 :], fitted[last - 1 :], "--", color=color, label=label)
        if bands := series.bands(counts[last - 1 :]):
            low, high = zip(*bands.values(), strict=True)
            axes.fill_between(gpus[last - 1 :], low, high, color=color, alpha=0.18, linewidth=0)
    gpu_axis(axes, all_gpus, f"{unit(found[0].title)}s")
    axes.set_ylabel("scaling efficiency (%)")
    picture.name_below(axes, 2, "; ".join(filter(None, [common, "shaded: 95% band"])))
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="write this picture, also as .pdf and .svg")
    add(
        "--curves",
        action="store_true",
        help="draw instead the steps of a benchmark run, or the curves of training runs",
    )
    options = parser.parse_args(argv)
    if options.curves:
        draw_runs(options.inputs, options.output)
        print(f"wrote {options.output}")
        return
    curves = read_curves(options)
    draw(curves).save(options.output, ".pdf", ".svg")
    print("\n".join(f"{title}: {answer(rows)}" for title, rows in curves.items()))
    print(f"wrote {options.output}, also as .pdf and .svg")


if __name__ == "__main__":
    run_alone(main)
