"""Plot scaling efficiency and samples/s of runs and tables against the number of GPUs, with the
ideal line.

Examples:
    clap-ds plot runs/sweeps/htsat_tiny-… --output scaling.png
    clap-ds plot analysis/published/*.csv --output published.png
    clap-ds plot --curves runs/my_run-… --output curves.png   losses and speed of a run, not its scaling
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from clap_ds.analysis.figure import SERIES_STYLES, FigureBuilder, set_gpu_axis, styled
from clap_ds.analysis.plot_run import draw_runs
from clap_ds.analysis.published import PUBLISHED_BY, PUBLISHED_TABLES
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import (
    Scale,
    describe_baseline,
    group_by_series,
    join_texts,
    name_unit,
)
from clap_ds.analysis.weak_scaling import Series, list_doubts, make_series
from clap_ds.utils.errors import UserError, run_alone

# With more series, bands would cover each other.
FEW_SERIES = 2
# Start of the efficiency axis, if all values are above it.
MIN_PERCENT = 50
IDEAL: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}


def read_curves(options: argparse.Namespace) -> dict[str, list[Scale]]:
    """Return each series' rows with a rate, by title. UserError if there are none."""
    curves = select_curves(scaling_table(read_runs(options.inputs, options)))
    if not curves:
        raise UserError(f"{', '.join(map(str, options.inputs))}: no row has a rate")
    return curves


def select_curves(rows: Sequence[Scale]) -> dict[str, list[Scale]]:
    series = group_by_series([row for row in rows if row.rate])
    return {members[0].title: members for members in series}


def summarize(rows: Sequence[Scale]) -> str:
    """Summarize a series at its largest scale: `87.3 ± 0.6% efficiency on 512 GPUs: …`. `rows`:
    with a rate."""
    # A scale of more nodes may have fewer GPUs.
    ordered = sorted(rows, key=lambda row: (row.gpus, row.nodes))
    largest = ordered[-1]
    rate = f"{largest.cell('samples_per_s_per_gpu')} samples/s/{largest.unit}"
    if largest.gpus == ordered[0].gpus:
        return f"{rate} on {largest.scale}"
    percent = largest.cell("scaling_efficiency_percent")
    gpus = join_texts(f"{largest.gpus} {largest.unit}s", describe_baseline(rows), by=" ")
    return f"{percent}% efficiency on {gpus}: {rate}"


def shorten_titles(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles of series into their distinguishing and their common parts."""
    # Parts of titles, such as model, device and precision.
    parts = [title.split(", ") for title in titles]
    # A single series is named by its model.
    common = parts[0][1:]
    if len(parts) > 1:
        shared = set(parts[0]).intersection(*parts[1:])
        common = [part for part in parts[0] if part in shared]
    names = []
    for title_parts in parts:
        distinct = [part for part in title_parts if part not in common]
        names.append(", ".join(distinct) or title_parts[0])
    return names, ", ".join(common)


def name_series(rows: Sequence[Scale]) -> str:
    """Return the title of a series, which begins with the source if it is a table of
    `published/`."""
    # Names of tables without suffix.
    files = set[str]()
    for row in rows:
        files |= {Path(run.source).stem for run in row.runs}
    is_published = bool(files) and files <= PUBLISHED_TABLES.keys()
    return f"{PUBLISHED_BY}, {rows[0].title}" if is_published else rows[0].title


def _list_styles() -> Iterator[Mapping[str, Any]]:
    """Yield the styles of series: hollow markers, which show the points below them, and filled ones
    from the seventh on."""
    for style in SERIES_STYLES:
        yield {**style, "markerfacecolor": "none"}
    yield from cycle(SERIES_STYLES)


@styled()
def draw_scaling(curves: Mapping[str, Sequence[Scale]]) -> FigureBuilder:
    """Draw efficiency with the 95% band of the fitted growth, and samples/s of all GPUs beside the
    ideal line.

    The legend has the values at each curve's largest scale. Bars are the ± of repeats.
    """
    figure = FigureBuilder((2.3,), columns=2)
    efficiency, throughput = figure.panels
    names, common = shorten_titles([name_series(rows) for rows in curves.values()])
    efficiency.axhline(100, label="ideal (linear)", **IDEAL)
    is_banded = False
    for name, rows, style in zip(names, curves.values(), _list_styles(), strict=False):
        # The legend stands in for a table.
        label = "; ".join([f"{name}, {summarize(rows)}", *list_doubts(rows)])
        _draw_series(figure, rows, fill(label, 110), style)
        if len(curves) <= FEW_SERIES:
            is_banded |= shade_fit(efficiency, rows, style["color"])
    scales = list[Scale]()
    for rows in curves.values():
        scales += rows
    gpus = [row.gpus for row in scales]
    units = " or ".join(f"{name}s" for name in dict.fromkeys(row.unit for row in scales))
    set_gpu_axis(efficiency, gpus, units)
    set_gpu_axis(throughput, gpus, units, is_log=False)
    # A fixed start, so that one percent looks the same in all figures.
    lowest = 0 if efficiency.dataLim.ymin < MIN_PERCENT else MIN_PERCENT
    efficiency.set(ylim=(lowest, max(105.0, 1.02 * efficiency.dataLim.ymax)))
    efficiency.set_ylabel(f"scaling efficiency (%), axis from {lowest}%")
    throughput.set_ylim(bottom=0)
    # On CPUs, a tick may be 0.25.
    throughput.yaxis.set_major_formatter("{x:,.10g}")
    throughput.set_ylabel(f"samples/s of all {units}")
    # One point is no curve.
    if max(map(len, curves.values())) == 1:
        efficiency.text(0.5, 0.5, "needs two scales", ha="center", transform=efficiency.transAxes)
    extent = "–".join(f"{count:,}" for count in sorted({min(gpus), max(gpus)}))
    figure.add_title(join_texts(common, f"{extent} {units}"))
    heading = "Shaded: 95% band of the fitted growth" if is_banded else ""
    figure.add_legend_below(efficiency, heading=heading)
    return figure


def _draw_series(
    figure: FigureBuilder, rows: Sequence[Scale], label: str, style: Mapping[str, Any]
) -> None:
    efficiency, throughput = figure.panels
    # A scale of more nodes may have fewer GPUs.
    points = pd.DataFrame([vars(row) for row in rows]).sort_values("gpus")
    # One scale has 100% by definition.
    percents = points if len(points) > 1 else points[:0]
    column = "scaling_efficiency_percent"
    labeled = {**style, "label": label}
    _draw_points(efficiency, percents, percents[column], percents[f"{column}_ci95"], labeled)
    errors = points["gpus"] * points["samples_per_s_per_gpu_ci95"].astype(float)
    _draw_points(throughput, points, points["samples_per_s"], errors, style)
    gpus = points["gpus"].max()
    baseline_rate = rows[0].rate or 0.0
    throughput.plot([0, gpus], [0, baseline_rate * gpus], **{**IDEAL, "color": style["color"]})


def _draw_points(
    axes: Axes, points: pd.DataFrame, values: Any, errors: Any, style: Mapping[str, Any]
) -> None:
    errors = errors.astype(float).fillna(0.0)
    # Dashes would look like an extrapolation.
    style = {**style, "linestyle": "-", "elinewidth": 0.8}
    axes.errorbar(points["gpus"], values, errors if errors.any() else None, **style)


def shade_fit(axes: Axes, rows: Sequence[Scale], color: str) -> bool:
    """Shade the 95% band of the law fitted to a series. Return whether it has one, for which it
    needs three scales."""
    try:
        # Refused series are drawn without a band.
        series = make_series(rows)
    except UserError:
        return False
    node_counts = [row.nodes for row in sorted(rows, key=lambda row: row.gpus)]
    return shade_band(axes, series, node_counts, color)


def shade_band(axes: Axes, series: Series, node_counts: Sequence[int], color: str) -> bool:
    bands = series.bands(node_counts)
    if not bands:
        return False
    lows, highs = zip(*bands.values(), strict=True)
    gpus = [nodes * series.gpus_per_node for nodes in bands]
    axes.fill_between(gpus, lows, highs, color=color, alpha=0.18, linewidth=0)
    # Edges, which show if bands overlap.
    axes.plot(gpus, lows, ":", gpus, highs, ":", color=color, linewidth=0.4)
    return True


@styled()
def draw_projection(projections: Sequence[Series]) -> FigureBuilder:
    """Draw measured efficiency and the projection: solid within measured scales, dashed with its
    band beyond them."""
    figure = FigureBuilder((2.6,))
    (axes,) = figure.panels
    names, common = shorten_titles([series.title for series in projections])
    axes.axhline(100, label="ideal", **IDEAL)
    units = f"{name_unit(projections[0].title)}s"
    all_gpus = list[int]()
    is_banded = False
    for name, series, style in zip(names, projections, _list_styles(), strict=False):
        node_counts = series.node_counts
        gpus = [nodes * series.gpus_per_node for nodes in node_counts]
        all_gpus += gpus
        # Points, then a line through the fitted efficiencies.
        measured = [series.efficiency_percent(rate) for _, rate in series.rates]
        fitted = series.percents(node_counts)
        count = len(measured)
        points = {**style, "linestyle": "none"}
        axes.plot(gpus[:count], measured, label=f"{name}, measured", **points)
        color = style["color"]
        axes.plot(gpus[:count], fitted[:count], color=color, label=f"{name}, fitted")
        end = f"{fitted[-1]:.1f}% on {gpus[-1]:,} {units}{series.relative}"
        label = fill(f"{name}, projected: {end}", 50)
        # The dashed line begins at the last measured scale.
        axes.plot(gpus[count - 1 :], fitted[count - 1 :], "--", color=color, label=label)
        is_banded |= shade_band(axes, series, node_counts[count - 1 :], color)
    set_gpu_axis(axes, all_gpus, units)
    axes.set_ylabel("scaling efficiency (%)")
    band = "shaded: 95% band" if is_banded else ""
    figure.add_legend_below(axes, 2, join_texts(common, band, by="; "))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    add = parser.add_argument
    output_help = "write this picture, also as .pdf and .svg"
    add("--output", type=Path, required=True, metavar="FILE", help=output_help)
    curves_help = "draw instead the steps of a benchmark run, or the curves of training runs"
    add("--curves", action="store_true", help=curves_help)
    options = parser.parse_args(argv)
    if options.curves:
        draw_runs(options.inputs, options.output)
        print(f"wrote {options.output}")
        return
    curves = read_curves(options)
    # Papers take .pdf, pages .svg.
    draw_scaling(curves).save(options.output, ".pdf", ".svg")
    for title, rows in curves.items():
        print(f"{title}: {summarize(rows)}")
    print(f"wrote {options.output}, also as .pdf and .svg")


if __name__ == "__main__":
    run_alone(main)
