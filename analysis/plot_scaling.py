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
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import SERIES_STYLES, Picture, gpu_axis, styled
from clap_ds.analysis.plot_run import draw_runs
from clap_ds.analysis.published import PUBLISHED_BY, PUBLISHED_TABLES
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Scale, by_series, relative_to, unit
from clap_ds.analysis.weak_scaling import Series, list_doubts, series_of
from clap_ds.utils.errors import UserError, run_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_SERIES = 2
"""With more series, bands would cover each other."""
LEAST_PERCENT = 50
"""Start of the efficiency axis, if all values are above it."""
IDEAL: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}


def read_curves(options: argparse.Namespace) -> dict[str, list[Scale]]:
    """Return each series' rows with a rate, by title. UserError if there are none."""
    found = by_series(
        [row for row in scaling_table(read_runs(options.inputs, options)) if row.rate]
    )
    if not found:
        raise UserError(f"{', '.join(map(str, options.inputs))}: no row has a rate")
    return {rows[0].title: rows for rows in found}


def answer(rows: Sequence[Scale]) -> str:
    """Summarize a series at its largest scale: `87.3 ± 0.6% efficiency on 512 GPUs: …`. `rows`:
    with a rate."""
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
    common = (
        [part for part in first if all(part in other for other in others)] if others else first[1:]
    )
    return [
        ", ".join(part for part in each if part not in common) or each[0] for each in parts
    ], ", ".join(common)


def name_series(rows: Sequence[Scale]) -> str:
    """Return the title of a series, which begins with the source if it is a table of
    `published/`."""
    files = {Path(run.source).stem for row in rows for run in row.runs}
    is_published = bool(files) and files <= PUBLISHED_TABLES.keys()
    return f"{PUBLISHED_BY}, {rows[0].title}" if is_published else rows[0].title


def _looks() -> Iterator[Mapping[str, Any]]:
    """Yield the looks of series: hollow markers, which show the points below them, and filled ones
    from the seventh on."""
    for style in SERIES_STYLES:
        yield {**style, "markerfacecolor": "none"}
    yield from cycle(SERIES_STYLES)


@styled()
def draw(curves: Mapping[str, Sequence[Scale]]) -> Picture:
    """Draw efficiency with the 95% band of the fitted growth, and samples/s of all GPUs beside the
    ideal line.

    The legend has the values at each curve's largest scale. Bars are the ± of repeats.
    """
    picture = Picture((2.3,), columns=2)
    efficiency, throughput = picture.panels
    names, common = short_names([name_series(rows) for rows in curves.values()])
    efficiency.axhline(100, label="ideal (linear)", **IDEAL)
    is_banded = False
    for name, rows, style in zip(names, curves.values(), _looks(), strict=False):
        baseline_rate = rows[0].rate or 0.0
        # A scale of more nodes may have fewer GPUs.
        rows = sorted(rows, key=lambda row: row.gpus)
        gpus = [row.gpus for row in rows]
        compared = rows if len(rows) > 1 else []  # one scale has 100% by definition
        percents = [row.scaling_efficiency_percent or 0.0 for row in compared]
        percent_errors = [row.scaling_efficiency_percent_ci95 or 0.0 for row in compared]
        totals = [row.samples_per_s or 0.0 for row in rows]
        total_errors = [row.gpus * (row.samples_per_s_per_gpu_ci95 or 0.0) for row in rows]
        # Dashes would look like an extrapolation.
        look = {**style, "linestyle": "-", "elinewidth": 0.8}
        label = fill("; ".join([f"{name}, {answer(rows)}", *list_doubts(rows)]), 110)
        efficiency.errorbar(
            gpus[: len(compared)],
            percents,
            percent_errors if any(percent_errors) else None,
            label=label,
            **look,
        )
        throughput.errorbar(gpus, totals, total_errors if any(total_errors) else None, **look)
        throughput.plot(
            [0, gpus[-1]], [0, baseline_rate * gpus[-1]], **{**IDEAL, "color": style["color"]}
        )
        if len(curves) <= FEW_SERIES:
            is_banded |= shade_fit(efficiency, rows, style["color"])
    all_rows = [row for rows in curves.values() for row in rows]
    units = " or ".join(f"{name}s" for name in dict.fromkeys(row.unit for row in all_rows))
    scales = [row.gpus for row in all_rows]
    gpu_axis(efficiency, scales, units)
    gpu_axis(throughput, scales, units, is_log=False)
    # A fixed start, so that one percent looks the same in all figures.
    lowest = 0 if efficiency.dataLim.ymin < LEAST_PERCENT else LEAST_PERCENT
    efficiency.set(ylim=(lowest, max(105.0, 1.02 * efficiency.dataLim.ymax)))
    efficiency.set_ylabel(f"scaling efficiency (%), axis from {lowest}%")
    throughput.set_ylim(bottom=0)
    throughput.yaxis.set_major_formatter("{x:,.10g}")  # on CPUs, a tick may be 0.25
    throughput.set_ylabel(f"samples/s of all {units}")
    if max(map(len, curves.values())) == 1:
        efficiency.text(0.5, 0.5, "needs two scales", ha="center", transform=efficiency.transAxes)
    extent = "–".join(f"{count:,}" for count in sorted({min(scales), max(scales)}))
    picture.title(", ".join(filter(None, [common, f"{extent} {units}"])))
    picture.name_below(efficiency, 1, "Shaded: 95% band of the fitted growth" if is_banded else "")
    return picture


def shade_fit(axes: Axes, rows: Sequence[Scale], color: str) -> bool:
    """Shade the 95% band of the law fitted to a series. Return whether it has one, for which it
    needs three scales."""
    try:
        series = series_of(rows)
    except UserError:
        return False
    return shade_band(axes, series, [row.nodes for row in rows], color)


def shade_band(axes: Axes, series: Series, node_counts: Sequence[int], color: str) -> bool:
    bands = series.bands(node_counts)
    if bands:
        lows, highs = zip(*bands.values(), strict=True)
        gpus = [nodes * series.gpus_per_node for nodes in bands]
        axes.fill_between(gpus, lows, highs, color=color, alpha=0.18, linewidth=0)
        axes.plot(
            gpus, lows, ":", gpus, highs, ":", color=color, linewidth=0.4
        )  # edges, if bands overlap
    return bool(bands)


@styled()
def draw_projection(found: Sequence[Series]) -> Picture:
    """Draw measured efficiency and the projection: solid within measured scales, dashed with its
    band beyond them."""
    picture = Picture((2.6,))
    (axes,) = picture.panels
    names, common = short_names([series.title for series in found])
    axes.axhline(100, label="ideal", **IDEAL)
    units = f"{unit(found[0].title)}s"
    all_gpus = []
    is_banded = False
    for name, series, style in zip(names, found, _looks(), strict=False):
        color = style["color"]
        counts = series.node_counts
        last = len(series.rates)
        gpus = [nodes * series.gpus_per_node for nodes in counts]
        all_gpus += gpus
        points = [series.efficiency_percent(rate) for _, rate in series.rates]
        axes.plot(gpus[:last], points, label=f"{name}, measured", **{**style, "linestyle": "none"})
        fitted = series.percents(counts)
        axes.plot(gpus[:last], fitted[:last], color=color, label=f"{name}, fitted")
        label = fill(
            f"{name}, projected: {fitted[-1]:.1f}% on {gpus[-1]:,} {units}{series.relative}", 50
        )
        axes.plot(gpus[last - 1 :], fitted[last - 1 :], "--", color=color, label=label)
        is_banded |= shade_band(axes, series, counts[last - 1 :], color)
    gpu_axis(axes, all_gpus, units)
    axes.set_ylabel("scaling efficiency (%)")
    picture.name_below(
        axes, 2, "; ".join(filter(None, [common, "shaded: 95% band" if is_banded else ""]))
    )
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="write this picture, also as .pdf and .svg",
    )
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
