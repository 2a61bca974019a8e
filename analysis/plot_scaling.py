"""Scaling tables → one figure: throughput with the ideal line, scaling efficiency and MFU against GPUs.

    python analysis/plot_scaling.py TABLE.csv… --output scaling.png|svg|html [--no_published]

Draws what `efficiency.py` worked out and works out nothing itself. The published curve of every model shown is laid
over it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.figure import (
    SERIES_STYLES,
    HoverPoints,
    SeriesStyle,
    check_format,
    gpu_axis,
    new_figure,
    save,
)
from clap_ds.analysis.page import html_table
from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import InputError, run_command
from clap_ds.analysis.table import Row, format_cell, read_table, read_table_runs, series_title

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_CHARACTERS = 46
"""That fit beside a legend's line in a column's width."""


@dataclass(frozen=True)
class Curve:
    """One series of measured scales under one label."""

    label: str
    rows: tuple[Row, ...]
    is_published: bool

    @property
    def gpus(self) -> list[int]:
        return [row.gpus for row in self.rows]


def read_curves(paths: Sequence[Path], with_published: bool = True) -> list[Curve]:
    """The series of the tables, and the published ones of the same models.

    Raises:
        InputError: a table that can't be read, or no row with a rate in any of them.
    """
    curves: list[Curve] = []
    for path in paths:
        rows = _complete_rows(path)
        for series in dict.fromkeys(row.series for row in rows):
            members = tuple(row for row in rows if row.series == series and row.samples_per_s_per_gpu)
            if members:
                curves.append(_curve(members))
    if not curves:
        raise InputError(f"{', '.join(map(str, paths))}: no row has a rate to plot")
    if with_published:
        shown = {curve.rows[0].model for curve in curves if curve.is_published}
        wanted = {curve.rows[0].model for curve in curves} - shown
        for stem, facts in PUBLISHED_TABLES.items():
            if facts.model in wanted:
                curves.append(_curve(tuple(_complete_rows(PUBLISHED_DIR / f"{stem}.csv"))))
    return _told_apart(curves, paths)


def _complete_rows(path: Path) -> list[Row]:
    """A table's rows; one that lacks this project's columns is worked out first."""
    rows = read_table(path)
    if any(row.samples_per_s_per_gpu and (row.speedup is None or not row.model) for row in rows):
        return scaling_table(read_table_runs(path))
    return rows


def _curve(rows: tuple[Row, ...]) -> Curve:
    return Curve(series_title(rows[0]), rows, all(row.state.startswith("published") for row in rows))


def _told_apart(curves: list[Curve], paths: Sequence[Path]) -> list[Curve]:
    """Labels as short as tells the series apart: the model, and whatever else differs."""
    names = ("model", "device", "precision", "text_tokens", "scaling", "batch_per_gpu")
    measured = [curve for curve in curves if not curve.is_published]
    differing = [name for name in names[1:] if len({getattr(curve.rows[0], name) for curve in measured}) > 1]
    labelled = []
    for curve in curves:
        row = curve.rows[0]
        label = row.model.replace("_", "-") or "model not stated"
        if curve.is_published:
            label += f" (published, {row.device})"
        else:
            words = {"text_tokens": "{} tokens", "scaling": "{} scaling", "batch_per_gpu": "{} per GPU"}
            values = [(name, getattr(row, name)) for name in differing]
            extra = [words.get(name, "{}").format(value) for name, value in values if value]
            label += f" ({', '.join(extra)})" if extra else ""
        labelled.append(replace(curve, label=label))
    seen: dict[str, int] = {}
    for index, curve in enumerate(labelled):
        seen[curve.label] = seen.get(curve.label, 0) + 1
        if seen[curve.label] > 1:
            labelled[index] = replace(curve, label=f"{curve.label} [{seen[curve.label]}]")
    return labelled


def draw(curves: Sequence[Curve]) -> tuple[Figure, HoverPoints]:
    """Draw throughput, efficiency and, where any is known, MFU, one panel under the other."""
    has_mfu = any(row.mfu_percent or row.mfu_model_percent for curve in curves for row in curve.rows)
    figure, panels = new_figure(3 if has_mfu else 2)
    hover = HoverPoints()
    for index, (curve, style) in enumerate(zip(curves, _styles(curves), strict=True)):
        _draw_throughput(panels[0], curve, style, hover, label_ideal=index == 0)
        _draw_line(
            panels[1], curve, style, hover, "scaling_efficiency_percent", "scaling_efficiency_2sigma_percent", "%"
        )
        if has_mfu:
            _draw_line(panels[2], curve, style, hover, "mfu_percent", "", "% MFU, published convention")
            dotted = replace(style, line=":", filled=False)
            _draw_line(panels[2], curve, dotted, hover, "mfu_model_percent", "", "% MFU, by the work done")
    panels[0].set_yscale("log")
    panels[0].set_ylabel("samples/s")
    panels[1].axhline(100, color="0.55", linewidth=0.8, linestyle=(0, (1, 1)))
    panels[1].set_ylabel("scaling efficiency (%)")
    if has_mfu:
        panels[2].set_ylabel("MFU (%)")
        panels[2].set_ylim(0, 1.06 * panels[2].get_ylim()[1])
    gpu_axis(panels[-1], [gpus for curve in curves for gpus in curve.gpus])
    handles, labels = panels[0].get_legend_handles_labels()
    if any(row.mfu_model_percent for curve in curves for row in curve.rows):
        handles.append(_legend_line())
        labels.append("MFU by the work done (else published FLOPs)")
    wrapped = [fill(label, LEGEND_CHARACTERS) for label in labels]
    figure.legend(handles, wrapped, loc="outside lower center", frameon=False, fontsize=7, handlelength=3.2)
    for panel in panels:
        panel.tick_params(labelsize=7, width=0.6)
        panel.yaxis.label.set_fontsize(8)
    return figure, hover


def _styles(curves: Sequence[Curve]) -> list[SeriesStyle]:
    """A style for each curve, by order; a published one in its measured model's colour, open and dashed."""
    measured = [curve for curve in curves if not curve.is_published]
    by_model: dict[str, SeriesStyle] = {}
    styles = []
    for index, curve in enumerate([*measured, *(curve for curve in curves if curve.is_published)]):
        style = SERIES_STYLES[index % len(SERIES_STYLES)]
        if curve.is_published and curve.rows[0].model in by_model:
            style = replace(by_model[curve.rows[0].model], line=(0, (4, 2)), filled=False)
        elif not curve.is_published:
            by_model.setdefault(curve.rows[0].model, style)
        styles.append((id(curve), style))
    found = dict(styles)
    return [found[id(curve)] for curve in curves]


def _draw_throughput(axes: Axes, curve: Curve, style: SeriesStyle, hover: HoverPoints, label_ideal: bool) -> None:
    base = next((row for row in curve.rows if row.speedup and abs(row.speedup - 1) < 1e-9), curve.rows[0])
    assert base.samples_per_s_per_gpu
    ends = [min(curve.gpus), max(curve.gpus)]
    ideal = [base.samples_per_s_per_gpu * gpus for gpus in ends]
    axes.plot(ends, ideal, color="0.55", linewidth=0.8, linestyle=(0, (1, 1)), label="ideal" if label_ideal else None)
    rows = [row for row in curve.rows if row.samples_per_s]
    values = [row.samples_per_s or 0.0 for row in rows]
    errors = [(row.samples_per_s_per_gpu_2sigma or 0.0) * row.gpus for row in rows]
    _errorbar(axes, [row.gpus for row in rows], values, errors, style, curve.label)
    for row, value in zip(rows, values, strict=True):
        rate = format_cell("samples_per_s_per_gpu", row.samples_per_s_per_gpu)
        spread = format_cell("samples_per_s_per_gpu_2sigma", row.samples_per_s_per_gpu_2sigma)
        per_gpu = f"{rate} ± {spread}" if spread else rate
        text = f"{format_cell('samples_per_s', value)} samples/s\n{per_gpu} samples/s/GPU"
        hover.add(axes, row.gpus, value, f"{_where(curve, row)}\n{text}")


def _draw_line(
    axes: Axes, curve: Curve, style: SeriesStyle, hover: HoverPoints, column: str, sigma: str, unit: str
) -> None:
    rows = [row for row in curve.rows if getattr(row, column) is not None]
    if not rows:
        return
    values = [getattr(row, column) for row in rows]
    errors = [(getattr(row, sigma) or 0.0) if sigma else 0.0 for row in rows]
    _errorbar(axes, [row.gpus for row in rows], values, errors, style, None)
    for row, value, error in zip(rows, values, errors, strict=True):
        spread = f" ± {error:.2f}" if error else ""
        hover.add(axes, row.gpus, value, f"{_where(curve, row)}\n{value:.1f}{spread} {unit}")


def _errorbar(
    axes: Axes, gpus: list[int], values: list[float], errors: list[float], style: SeriesStyle, label: str | None
) -> None:
    axes.errorbar(
        gpus,
        values,
        yerr=errors if any(errors) else None,
        color=style.color,
        marker=style.marker,
        linestyle=style.line,
        markerfacecolor=style.color if style.filled else "white",
        markersize=4,
        linewidth=1.2,
        capsize=2,
        elinewidth=0.8,
        label=label,
    )


def _legend_line() -> Artist:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="0.3", linestyle=":", marker="o", markerfacecolor="white", markersize=4)


def _where(curve: Curve, row: Row) -> str:
    return f"{curve.label}\n{row.nodes} nodes, {row.gpus} GPUs"


def _page_table(curves: Sequence[Curve]) -> str:
    columns = ("nodes", "gpus", "samples_per_s_per_gpu", "samples_per_s", "scaling_efficiency_percent", "mfu_percent")
    header = ("series", "nodes", "GPUs", "samples/s/GPU", "samples/s", "efficiency %", "MFU % (published convention)")
    body = [
        [curve.label, *(format_cell(column, getattr(row, column)) for column in columns)]
        for curve in curves
        for row in curve.rows
    ]
    return html_table(header, body)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot scaling tables.")
    parser.add_argument("tables", nargs="+", type=Path, help="tables that efficiency.py wrote, or published ones")
    parser.add_argument("--output", type=Path, required=True, help="scaling.png, .svg or .html")
    parser.add_argument("--no_published", action="store_true", help="leave the published curves out")
    options = parser.parse_args()
    check_format(options.output)
    curves = read_curves(options.tables, not options.no_published)
    figure, hover = draw(curves)
    save(figure, options.output, hover, "Scaling of CLAP training", _page_table(curves))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_command(main)
