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
from clap_ds.analysis.figure import IDEAL, SERIES_STYLES, Picture, check_format, gpu_axis, styled
from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import FIT_NODES, PROJECTED_GPUS, parse_options
from clap_ds.analysis.step_model import TERMS, Series
from clap_ds.analysis.table import Row, by_series, markdown_table, read_table, read_table_runs
from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTTED: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "white"}
LEGEND_CHARACTERS = 46
"""That fit beside a legend's line in a column's width."""
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
    picture = Picture((3 if has_mfu else 2, 1))
    throughput, efficiency, *mfu = picture.panels
    styles = _styles(curves)
    for label, members in curves.items():
        line = partial(_draw_column, picture, label, styles[label], members)
        base = next((row for row in members if row.speedup and abs(row.speedup - 1) < 1e-9), members[0])
        ends = [pick(row.gpus for row in members) for pick in (min, max)]
        name = "ideal" if label == next(iter(curves)) else None
        throughput.plot(ends, [(base.rate or 0) * end for end in ends], **IDEAL, label=name)
        line(throughput, "samples_per_s", "samples/s", "samples_per_s_per_gpu_2sigma")
        line(efficiency, "scaling_efficiency_percent", "%", "scaling_efficiency_2sigma_percent")
        dotted = partial(_draw_column, picture, label, styles[label] | DOTTED, members)
        for axes in mfu:
            line(axes, "mfu_percent", "% MFU, published convention")
            dotted(axes, "mfu_model_percent", "% MFU, by the work done")
    throughput.set(yscale="log", ylabel="samples/s")
    efficiency.axhline(100, **IDEAL)
    efficiency.set_ylabel("scaling efficiency (%)")
    for axes in mfu:
        axes.set(ylim=(0, 1.06 * axes.get_ylim()[1]), ylabel="MFU (%)")
    gpu_axis(picture.panels[-1], [row.gpus for row in rows])
    handles, labels = throughput.get_legend_handles_labels()
    if any(row.mfu_model_percent for row in rows):
        handles += picture.panels[-1].plot([], [], color="0.3", marker="o", **DOTTED)
        labels.append("MFU by the work done (else published FLOPs)")
    wrapped = [fill(label, LEGEND_CHARACTERS) for label in labels]
    picture.figure.legend(handles, wrapped, loc="outside lower center", handlelength=3.2)
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
            styles[label] = by_model[rows[0].model] | {"linestyle": (0, (4, 2)), "markerfacecolor": "white"}
    return styles


def _draw_column(
    picture: Picture, label: str, style: Mapping[str, Any], rows: Sequence[Row],
    axes: Axes, column: str, unit: str, spread: str = "",
) -> None:  # fmt: skip
    """Draw a column of a series with error bars, each value shown on hover."""
    rows = [row for row in rows if getattr(row, column) is not None]
    is_total = column == "samples_per_s"
    gpus, values = [row.gpus for row in rows], [getattr(row, column) for row in rows]
    errors = [(getattr(row, spread, None) or 0.0) * (row.gpus if is_total else 1) for row in rows]
    if rows:
        bars = errors if any(errors) else None
        axes.errorbar(gpus, values, bars, elinewidth=0.8, label=label if is_total else None, **style)
    for row, value, error in zip(rows, values, errors, strict=True):
        text = f"{value:.1f}" + (f" ± {error:.2f}" if error else "") + f" {unit}"
        if is_total:
            text = f"{row.cell(column)} {unit}\n{row.cell('samples_per_s_per_gpu', spread)} samples/s/GPU"
        picture.hover(axes, row.gpus, value, f"{label}\n{row.nodes} nodes, {row.gpus} GPUs\n{text}")


@styled
def draw_projection(found: Sequence[Series], fit_nodes: int = FIT_NODES, max_gpus: int = PROJECTED_GPUS[-1]) -> Picture:
    """Draw projected efficiency with its band over the measured one, and what the first series' step is lost to.

    Hold-out fits, on up to `fit_nodes`, are drawn where a series has one.
    """
    picture = Picture((2, 1), panel_height=2.1)
    efficiency, losses = picture.panels
    handles: dict[str, Any] = {}
    cells: list[list[str]] = []
    for index, series in enumerate(found):
        style = dict(SERIES_STYLES[index % len(SERIES_STYLES)])
        style |= {"markerfacecolor": style["color"] if index % 2 == 0 else "white"}
        cells += _draw_efficiency(picture, efficiency, series, style, fit_nodes, _node_counts(series, max_gpus))
        band = efficiency.fill_between([], [], [], color=style["color"], alpha=0.18, linewidth=0)
        handles[f"{series.name}: measured, model, 95 % band"] = (band, *efficiency.plot([], [], **style))
    if any(series.has_hold_out(fit_nodes) for series in found):
        (line,) = efficiency.plot([], [], color="0.3", linestyle=":", linewidth=1.0)
        handles[f"model fitted on up to {fit_nodes} nodes only"] = line
    _draw_losses(picture, losses, found[0], _node_counts(found[0], max_gpus))
    efficiency.set_ylabel("efficiency (%)")
    gpu_axis(losses, [int(row[2]) for row in cells])
    picture.figure.legend(list(handles.values()), list(handles), loc="outside lower center", handlelength=3.2)
    picture.table = markdown_table(("series", "nodes", "GPUs", "projected efficiency %", "95 % band"), cells)
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
    model, bands = series.fit(), series.bands(counts)
    gpus = [nodes * series.workload.gpus_per_node for nodes in counts]
    color, line = style["color"], style["linestyle"]
    if bands:
        low, high = zip(*(bands[nodes] for nodes in counts), strict=True)
        axes.fill_between(gpus, low, high, color=color, alpha=0.18, linewidth=0)
    projected = [series.efficiency_percent(model.rate(nodes)) for nodes in counts]
    axes.plot(gpus, projected, color=color, linestyle=line)
    if series.has_hold_out(fit_nodes):
        held_out = series.up_to(fit_nodes).fit()
        tried = [series.efficiency_percent(held_out.rate(nodes)) for nodes in counts]
        axes.plot(gpus, tried, color=color, linestyle=":", linewidth=1.0)
    points = [series.efficiency_percent(rate) for _, rate in series.rates]
    axes.plot(gpus[: len(points)], points, **{**style, "linestyle": "none"})
    cells = []
    for count, nodes, value in zip(gpus, counts, projected, strict=True):
        band = "{:.1f}–{:.1f}".format(*bands[nodes]) if bands else ""
        cells.append([series.title, str(nodes), str(count), f"{value:.1f}", band])
        text = f"{series.name}\n{nodes} nodes, {count} GPUs\nmodel {value:.1f} %"
        picture.hover(axes, count, value, text + (f"\n95 % band {band} %" if band else ""))
    return cells


def _draw_losses(picture: Picture, axes: Axes, series: Series, counts: Sequence[int]) -> None:
    model = series.fit()
    gpus = [nodes * series.workload.gpus_per_node for nodes in counts]
    for style, term in zip(SERIES_STYLES, reversed(TERMS[1:]), strict=False):
        shares = [100 * model.terms_s(nodes)[term] / model.step_s(nodes) for nodes in counts]
        axes.plot(gpus, shares, markersize=3.5, label=term, **style)
        for count, share in zip(gpus, shares, strict=True):
            picture.hover(axes, count, share, f"{term}\n{count} GPUs\n{share:.1f} % of the step")
    axes.set(ylabel="share of the step (%)", ylim=(0, None))
    axes.set_title(series.name, fontsize=7, loc="right", pad=2)
    axes.legend(loc="upper left", handlelength=3)


def main() -> None:
    options = parse_options("Plot scaling tables.", "tables", "--output", "--no_published", required="--output")
    check_format(options.output)
    draw(read_curves(options.tables, not options.no_published)).save(options.output, "Scaling of CLAP training")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
