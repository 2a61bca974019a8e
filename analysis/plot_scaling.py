"""Scaling tables → one figure: throughput with the ideal line, scaling efficiency and MFU against GPUs.

    python analysis/plot_scaling.py TABLE.csv… --output scaling.png|svg|pdf|html [--no_published]

Draws what `efficiency.py` worked out, and for `project.py` the projection, and works out nothing itself. The published
curve of every model shown is laid over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.figure import (
    COLORS,
    ESTIMATE,
    IDEAL,
    SERIES_STYLES,
    Picture,
    check_format,
    gpu_axis,
    log_axis,
    shares_axis,
    styled,
)
from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import FIT_NODES, PROJECTED_GPUS, parse_options
from clap_ds.analysis.step_model import TERMS, Series
from clap_ds.analysis.table import Row, by_series, count_of, markdown_table, read_table, read_table_runs, unit
from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BY_WORK: dict[str, Any] = {"linestyle": ":", "marker": "."}
"""MFU of the work done; all other markers are those of a series, open where it is published."""
_COLUMNS = {
    "nodes": "nodes", "GPUs": "gpus", "samples/s/GPU": "samples_per_s_per_gpu", "samples/s": "samples_per_s",
    "efficiency %": "scaling_efficiency_percent", "MFU % (published convention)": "mfu_percent",
}  # fmt: skip


def read_curves(paths: Sequence[Path], with_published: bool = True) -> dict[str, list[Row]]:
    """The series of the tables, and the published ones of the same models: rows with a rate, by label.

    Raises UserError for a table that can't be read, and where no row of any has a rate.
    """
    series = [rows for path in paths for rows in _series(path)]
    if not series:
        raise UserError(f"{', '.join(map(str, paths))}: no row has a rate to plot")
    shown = {rows[0].model for rows in series if _is_published(rows)}
    wanted = {rows[0].model for rows in series if with_published} - shown
    for stem, facts in PUBLISHED_TABLES.items():
        series += _series(PUBLISHED_DIR / f"{stem}.csv") if facts["model"] in wanted else []
    return _labelled(series)


def _series(path: Path) -> list[list[Row]]:
    """Rows with a rate of each series of a table; one that lacks this project's columns is worked out first."""
    rows: Sequence[Row] = read_table(path)
    if any(row.rate and (row.speedup is None or not row.model) for row in rows):
        rows = scaling_table(read_table_runs(path))
    return by_series([row for row in rows if row.rate])


def _is_published(rows: Sequence[Row]) -> bool:
    return all(row.state.startswith("published") for row in rows)


def _labelled(series: Sequence[list[Row]]) -> dict[str, list[Row]]:
    """Under labels as short as keeps the series apart: the model, and whatever else differs."""
    units = {"text_tokens": " tokens", "scaling": " scaling", "batch_per_gpu": " per GPU"}
    measured = [rows[0] for rows in series if not _is_published(rows)]
    differing = [
        name for name in ("device", "precision", "variant", *units) if len({getattr(row, name) for row in measured}) > 1
    ]
    labelled: dict[str, list[Row]] = {}
    for rows in series:
        row = rows[0]
        extra = [f"{value}{units.get(name, '')}" for name in differing if (value := getattr(row, name))]
        extra = [text for text in extra if not (text.endswith(" per GPU") and "batch per GPU" in row.variant)]
        extra = ["published", row.device] if _is_published(rows) else extra
        plain = label = row.model_name + (f" ({', '.join(extra)})" if extra else "")
        while label in labelled:
            label = f"{plain} [{sum(other.startswith(plain) for other in labelled) + 1}]"
        labelled[label] = rows
    return labelled


@styled
def draw(curves: Mapping[str, Sequence[Row]]) -> Picture:
    """Draw throughput, efficiency and, where any is known, MFU, one panel under the other."""
    rows = [row for members in curves.values() for row in members]
    has_mfu = any(row.mfu_percent or row.mfu_model_percent for row in rows)
    picture = Picture((3 if has_mfu else 2, 1), share_x=True)
    throughput, efficiency, *mfu = picture.panels
    styles = _styles(curves)
    ends: list[tuple[float, float, str, Any]] = []
    of_mfu: list[tuple[float, float, str, Any]] = []
    with_bars = [label for label, members in curves.items() if any(row.samples_per_s_per_gpu_2sigma for row in members)]
    for index, (label, members) in enumerate(curves.items()):
        place = with_bars.index(label) - (len(with_bars) - 1) / 2 if label in with_bars else 0.0
        apart = 1.15**place  # error bars side by side
        line, dotted = (
            partial(_draw_column, picture, label, style, members, apart)
            for style in (styles[label], styles[label] | BY_WORK)
        )
        base = next((row for row in members if row.speedup and abs(row.speedup - 1) < 1e-9), members[0])
        first, last = (pick(members, key=lambda row: row.gpus) for pick in (min, max))
        throughput.plot([first.gpus, last.gpus], [(base.rate or 0) * row.gpus for row in (first, last)], **IDEAL)
        line(throughput, "samples_per_s", "samples/s", "samples_per_s_per_gpu_2sigma")
        line(efficiency, "scaling_efficiency_percent", "%", "scaling_efficiency_2sigma_percent")
        ends.append((last.gpus, last.samples_per_s or (last.rate or 0) * last.gpus, label, styles[label]["color"]))
        ends += [(last.gpus, (base.rate or 0) * last.gpus, "ideal", IDEAL["color"])] if index == 0 else []
        for axes in mfu:
            line(axes, "mfu_percent", "% MFU, published convention")
            dotted(axes, "mfu_model_percent", "% MFU, by the work done")
            for column, name in (("mfu_percent", "514 tokens counted"), ("mfu_model_percent", "the work done")):
                if (value := getattr(last, column)) and all(name != known[2] for known in of_mfu):
                    of_mfu.append((last.gpus, value, name, styles[label]["color"]))
    gpu_axis(picture.panels[-1], [row.gpus for row in rows], unit(*(row.device for row in rows)))
    log_axis(throughput)
    throughput.set_ylabel("samples/s (log)")
    efficiency.axhline(100, **IDEAL)
    shares_axis(efficiency)
    efficiency.set_ylabel("scaling efficiency (%)")
    for axes in mfu:
        axes.set(ylim=(0, 1.06 * axes.get_ylim()[1]), ylabel="MFU (%)")
        picture.label_ends(axes, of_mfu)
    if named := ", ".join(dict.fromkeys(row.uncertainty_from for row in rows if row.samples_per_s_per_gpu_2sigma)):
        efficiency.set_title(fill(f"error bars: {named}", 50), fontsize=7, loc="right", pad=2)
    picture.label_ends(throughput, ends)
    body = [[label, *row.cells(*_COLUMNS.values())] for label, members in curves.items() for row in members]
    picture.table = markdown_table(("series", *_COLUMNS), body)
    return picture


def _styles(curves: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """By label, in order, the measured ones first; a published one in its measured model's colour, open and dashed."""
    styles: dict[str, dict[str, Any]] = {}
    by_model: dict[str, dict[str, Any]] = {}
    for index, (label, rows) in enumerate(sorted(curves.items(), key=lambda item: _is_published(item[1]))):
        styles[label] = dict(SERIES_STYLES[index % len(SERIES_STYLES)])
        if not _is_published(rows):
            by_model.setdefault(rows[0].model, styles[label])
        elif rows[0].model in by_model:
            styles[label] = by_model[rows[0].model] | {"linestyle": ESTIMATE["linestyle"], "markerfacecolor": "white"}
    return styles


def _draw_column(
    picture: Picture, label: str, style: Mapping[str, Any], rows: Sequence[Row], apart: float,
    axes: Axes, column: str, what: str, spread: str = "",
) -> None:  # fmt: skip
    """Draw a column of a series with error bars, which move by a factor `apart`; each value is shown on hover."""
    rows = [row for row in rows if getattr(row, column) is not None]
    is_total = column == "samples_per_s"
    values = [getattr(row, column) for row in rows]
    errors = [(getattr(row, spread, None) or 0.0) * (row.gpus if is_total else 1) for row in rows]
    gpus = [row.gpus * (apart if any(errors) else 1) for row in rows]
    if rows:
        axes.errorbar(gpus, values, errors if any(errors) else None, elinewidth=0.8, **style)
    for row, value, error in zip(rows, values, errors, strict=True):
        text = f"{value:.1f}" + (f" ± {error:.2f}" if error else "") + f" {what}"
        if is_total:
            text = f"{row.cell(column)} {what}\n{row.cell('samples_per_s_per_gpu', spread)} samples/s/GPU"
        picture.hover(axes, row.gpus, value, f"{label}\n{row.scale}\n{text}")


@styled
def draw_projection(found: Sequence[Series], fit_nodes: int = FIT_NODES, max_gpus: int = PROJECTED_GPUS[-1]) -> Picture:
    """Draw projected efficiency with its band over the measured one, and what the first series' step is lost to.

    Points are measured; the model's line is solid as far as they go, and dashed, in a band, beyond. Dotted is what a fit on
    up to `fit_nodes` said, where a series has such a hold-out.
    """
    picture = Picture((2, 1), panel_height=2.1, share_x=True)
    efficiency, losses = picture.panels
    cells: list[list[str]] = []
    ends = []
    for series, style in zip(found, SERIES_STYLES, strict=False):
        drawn = _draw_efficiency(picture, efficiency, series, style, fit_nodes, _node_counts(series, max_gpus))
        cells += drawn
        ends.append((int(drawn[-1][2]), float(drawn[-1][4]), series.name, style["color"]))
    where = unit(*(series.title for series in found))
    gpu_axis(losses, [int(row[2]) for row in cells], where)
    shares_axis(efficiency)
    efficiency.set_ylabel("efficiency (%)")
    efficiency.plot([], [], "o", color="0.3", label="measured (points)")
    efficiency.plot([], [], color="0.3", label="extrapolated, with 95 % band", **ESTIMATE)
    if any(series.has_hold_out(fit_nodes) for series in found):
        efficiency.plot([], [], ":", color="0.3", linewidth=1.0, label=f"fitted on ≤ {fit_nodes} nodes")
    efficiency.legend(loc="lower left", handlelength=2.5)
    picture.label_ends(efficiency, ends)
    _draw_losses(picture, losses, found[0], _node_counts(found[0], max_gpus))
    header = ("series", "nodes", where, "measured efficiency %", "projected efficiency %", "95 % band")
    picture.table = markdown_table(header, cells)
    return picture


def _node_counts(series: Series, max_gpus: int) -> list[int]:
    """Measured node counts, then doublings up to `max_gpus`."""
    counts = [nodes for nodes, _ in series.rates]
    while 2 * counts[-1] * series.workload.gpus_per_node <= max_gpus:
        counts.append(2 * counts[-1])
    return counts


def _draw_efficiency(
    picture: Picture, axes: Axes, series: Series, style: Mapping[str, Any], fit_nodes: int, counts: Sequence[int]
) -> list[list[str]]:
    """Points, fitted line and band of one series; returns what the page's table says of it."""
    model, bands, measured = series.fit(), series.bands(counts), dict(series.rates)
    gpus = [nodes * series.workload.gpus_per_node for nodes in counts]
    num_measured, color = len(series.rates), style["color"]
    if bands:
        low, high = zip(*(bands[nodes] for nodes in counts[num_measured - 1 :]), strict=True)
        axes.fill_between(gpus[num_measured - 1 :], low, high, color=color, alpha=0.18, linewidth=0)
    projected = [series.efficiency_percent(model.rate(nodes)) for nodes in counts]
    axes.plot(gpus[:num_measured], projected[:num_measured], color=color)
    axes.plot(gpus[num_measured - 1 :], projected[num_measured - 1 :], color=color, **ESTIMATE)
    if series.has_hold_out(fit_nodes):
        held_out = series.up_to(fit_nodes).fit()
        tried = [series.efficiency_percent(held_out.rate(nodes)) for nodes in counts]
        axes.plot(gpus, tried, color=color, linestyle=":", linewidth=1.0)
    points = [series.efficiency_percent(rate) for _, rate in series.rates]
    axes.plot(gpus[:num_measured], points, **style, linestyle="none")
    cells = []
    for count, nodes, value in zip(gpus, counts, projected, strict=True):
        known = f"{series.efficiency_percent(measured[nodes]):.1f}" if nodes in measured else ""
        band = "{:.1f}–{:.1f}".format(*bands[nodes]) if bands else ""
        cells.append([series.title, str(nodes), str(count), known, f"{value:.1f}", band])
        text = f"{series.name}\n{count_of(nodes, 'node')}, {count} {unit(series.title)}\nmodel {value:.1f} %"
        text += f", measured {known} %" if known else ", extrapolated"
        picture.hover(axes, count, value, text + (f"\n95 % band {band} %" if band else ""))
    return cells


def _draw_losses(picture: Picture, axes: Axes, series: Series, counts: Sequence[int]) -> None:
    """What the fitted model's step is lost to, of which nothing is measured; the first in the colour of its series."""
    model, ends = series.fit(), []
    gpus = [nodes * series.workload.gpus_per_node for nodes in counts]
    for color, term in zip(COLORS[2:], reversed(TERMS[1:]), strict=True):
        shares = [100 * model.terms_s(nodes)[term] / model.step_s(nodes) for nodes in counts]
        axes.plot(gpus, shares, color=color)
        ends.append((gpus[-1], shares[-1], term, color))
        for count, share in zip(gpus, shares, strict=True):
            picture.hover(axes, count, share, f"{term}\n{count} {unit(series.title)}\n{share:.1f} % of the step")
    axes.set(ylabel="share of the step (%)", ylim=(0, None))
    axes.set_title(f"{series.name}, by the model", fontsize=7, loc="left", pad=2)
    picture.label_ends(axes, ends)


def main() -> None:
    options = parse_options("Plot scaling tables.", "tables", "--output", "--no_published", required="--output")
    check_format(options.output)
    draw(read_curves(options.tables, not options.no_published)).save(options.output, "Scaling of CLAP training")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
