"""Runs and scaling tables → one figure: scaling efficiency, throughput with the ideal line and MFU against GPUs.

    python analysis/plot_scaling.py RUN_OR_TABLE… --output scaling.png|svg|pdf [--no_published]

Draws what `efficiency.py` worked out, and for `project.py` the projection, and works out nothing itself. The published
curve of every model shown is laid under it in grey. Of runs each repeat is a dot; a table knows only their mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.csv_table import read_table, read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.figure import ESTIMATE, IDEAL, SERIES_STYLES, Picture, check_format, gpu_axis, log_axis, styled
from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import INPUT_OPTIONS, TABLE_SUFFIXES, parse_options, read_runs
from clap_ds.analysis.table import Row, Scale, by_series, in_doubt, unit
from clap_ds.analysis.weak_scaling import Series
from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PUBLISHED_STYLE: dict[str, Any] = {"color": "0.6", "markerfacecolor": "white", "zorder": 1.5}
"""Of what others published, where there is anything else."""
BY_WORK: dict[str, Any] = {"linestyle": ":", "marker": "."}
"""MFU of the work done; all other markers are those of a series."""


def read_curves(
    paths: Sequence[Path], with_published: bool = True, given: argparse.Namespace | None = None
) -> dict[str, list[Row]]:
    """The series of tables and, `given` what they leave out (as of `read_runs`), of runs and logs; as `curves_of` names them.

    Raises UserError for what can't be read, and where no row of any has a rate.
    """
    tables = [path for path in paths if path.suffix.lower() in TABLE_SUFFIXES]
    series = [rows for path in tables for rows in _series(path)]
    if given and (others := [path for path in paths if path not in tables]):
        series += by_series([row for row in scaling_table(read_runs(others, given)) if row.rate])
    if not series:
        raise UserError(f"{', '.join(map(str, paths))}: no row has a rate to plot")
    return curves_of(series, with_published)


def curves_of(series: Sequence[Sequence[Row]], with_published: bool = True) -> dict[str, list[Row]]:
    """Series of rows with a rate, and the published ones of the same models, by labels that say what differs."""
    measured = [rows for rows in series if not _is_published(rows)]
    shown = [list(rows) for rows in series]
    missing = {rows[0].model for rows in measured} - {rows[0].model for rows in series if _is_published(rows)}
    for stem, facts in PUBLISHED_TABLES.items():
        if with_published and facts["model"] in missing:
            shown += _series(PUBLISHED_DIR / f"{stem}.csv")
    units = {"device": "", "precision": "", "variant": "", "text_tokens": " tokens", "scaling": " scaling"}
    differing = [name for name in units if len({getattr(rows[0], name) for rows in measured}) > 1]
    labelled: dict[str, list[Row]] = {}
    for rows in shown:
        row = rows[0]
        extra = [f"{value}{units[name]}" for name in differing if (value := getattr(row, name))]
        extra = ["published", row.device] if _is_published(rows) else extra
        plain = label = row.model_name + (f" ({', '.join(extra)})" if extra else "")
        while label in labelled:
            label = f"{plain} [{sum(other.startswith(plain) for other in labelled) + 1}]"
        labelled[label] = rows
    return labelled


def _series(path: Path) -> list[list[Row]]:
    """Rows with a rate of each series of a table; one that lacks this project's columns is worked out first."""
    rows: Sequence[Row] = read_table(path)
    if any(row.rate and (row.speedup is None or not row.model) for row in rows):
        rows = scaling_table(read_table_runs(path))
    return by_series([row for row in rows if row.rate])


def _is_published(rows: Sequence[Row]) -> bool:
    return all(row.state.startswith("published") for row in rows)


def _baseline(rows: Sequence[Row]) -> Row:
    return next((row for row in rows if row.speedup and abs(row.speedup - 1) < 1e-9), rows[0])


def answer(rows: Sequence[Row]) -> str:
    """What a series' rows with a rate come to at the largest scale: `87.3 ± 0.6 % efficiency on 512 GPUs: …`."""
    first, last = (pick(rows, key=lambda row: (row.gpus, row.nodes)) for pick in (min, max))
    number, of = last.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma"), last.unit.removesuffix("s")
    rate = f"{number} samples/s/{of}"
    if last.scaling_efficiency_percent is None or first.gpus == last.gpus:
        return f"{rate} on {last.scale}"
    percent = last.cell("scaling_efficiency_percent", "scaling_efficiency_2sigma_percent")
    larger = [row for row in rows if row.gpus > _baseline(rows).gpus]
    doubts = (in_doubt(row.scaling_efficiency_percent or 0.0, row.scaling_efficiency_2sigma_percent) for row in larger)
    doubt = " (in doubt: a scale is above 100 % by more than its ±)" if any(doubts) else ""
    return f"{percent} % efficiency on {last.gpus} {last.unit}{doubt}: {rate}"


@styled()
def draw(curves: Mapping[str, Sequence[Row]]) -> Picture:
    """Draw efficiency, throughput and, where this project's is known, MFU, one panel under the other, the answer over them."""
    own = {label: rows for label, rows in curves.items() if not _is_published(rows)} or curves
    has_mfu = any(row.mfu_percent or row.mfu_model_percent for rows in own.values() for row in rows)
    picture = Picture((2.6, 1.3, 1.1)[: 2 + has_mfu], share_x=True)
    answers = {label: answer(rows) for label, rows in own.items()}
    picture.title("\n".join(f"{label}: {text}" if len(own) > 1 else text for label, text in answers.items()))
    efficiency, throughput, *mfu = picture.panels
    styles, markers = cycle(SERIES_STYLES), cycle("ds^vP")
    for number, (label, rows) in enumerate(curves.items()):
        style = next(styles) if label in own else {**PUBLISHED_STYLE, "marker": next(markers)}
        apart = 1.06 ** (number - (len(curves) - 1) / 2) if len(own) > 1 else 1.0  # error bars side by side
        _draw_efficiency(efficiency, label, rows, style, apart)
        _draw_totals(throughput, rows, style)
        for axes in mfu:
            _draw_mfu(axes, rows, style, "mfu_percent", "published convention" if label in own else "")
            _draw_mfu(axes, rows, {**style, **BY_WORK}, "mfu_model_percent", "work done")
    rows = [row for members in curves.values() for row in members]
    gpu_axis(picture.panels[-1], [row.gpus for row in rows], unit(*(row.device for row in rows)))
    efficiency.axhline(100, **IDEAL)
    efficiency.set_ylabel("scaling efficiency (%)")
    log_axis(throughput)
    throughput.set_ylabel("samples/s (log)")
    throughput.legend()
    for axes in mfu:
        axes.set(ylim=(0, 1.06 * axes.get_ylim()[1]), ylabel="MFU (%)")
        axes.legend()
    for what in dict.fromkeys(row.uncertainty_from for row in rows if row.samples_per_s_per_gpu_2sigma):
        efficiency.plot([], [], "|", color="0.3", label=fill(f"±: {what}", 60))
    picture.name_below(efficiency)
    return picture


def _draw_efficiency(axes: Axes, label: str, rows: Sequence[Row], style: Mapping[str, Any], apart: float) -> None:
    """Means with their ±, which move by a factor `apart`, and a dot for each repeat."""
    known = [row for row in rows if row.scaling_efficiency_percent is not None]
    values = [row.scaling_efficiency_percent or 0.0 for row in known]
    errors = [row.scaling_efficiency_2sigma_percent or 0.0 for row in known]
    gpus = [row.gpus * apart for row in known]
    axes.errorbar(gpus, values, errors if any(errors) else None, elinewidth=0.8, label=label, **style)
    for row, at, value in zip(known, gpus, values, strict=True):
        repeats = [value * (run.rate or 0.0) / (row.rate or 1.0) for run in row.runs] if isinstance(row, Scale) else []
        if len(repeats) > 1:
            axes.plot([1.08 * at] * len(repeats), repeats, ".", color=style["color"], markersize=3)


def _draw_totals(axes: Axes, rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    """Samples/s of all GPUs, and the line of as many from each as at the baseline."""
    ends = [pick(row.gpus for row in rows) for pick in (min, max)]
    ideal = [(_baseline(rows).rate or 0.0) * gpus for gpus in ends]
    axes.plot(ends, ideal, label="_" if axes.lines else "ideal", **IDEAL)
    totals = [row.samples_per_s or (row.rate or 0.0) * row.gpus for row in rows]
    errors = [(row.samples_per_s_per_gpu_2sigma or 0.0) * row.gpus for row in rows]
    axes.errorbar([row.gpus for row in rows], totals, errors if any(errors) else None, elinewidth=0.8, **style)


def _draw_mfu(axes: Axes, rows: Sequence[Row], style: Mapping[str, Any], column: str, name: str) -> None:
    known = [(row.gpus, value) for row in rows if (value := getattr(row, column))]
    if known:
        named = name in axes.get_legend_handles_labels()[1]
        axes.plot(*zip(*known, strict=True), label="_" if named else name or "_", **style)


@styled()
def draw_projection(found: Sequence[Series], title: str = "", gpus: Sequence[int] = ()) -> Picture:
    """Draw projected efficiency with its band over the measured one.

    Points are measured; the law's line is solid as far as they go, and dashed, in a band, beyond, up to these `gpus` or four
    times as far. Of a series that nothing is projected from there are the points only.
    """
    picture = Picture((2.6,))
    picture.title(title)
    (efficiency,) = picture.panels
    counts = [series.node_counts(gpus) for series in found]
    for series, style, nodes in zip(found, cycle(SERIES_STYLES), counts, strict=False):
        _draw_projected(efficiency, series, style, nodes)
    shown = [n * series.workload.gpus_per_node for series, nodes in zip(found, counts, strict=True) for n in nodes]
    gpu_axis(efficiency, shown, unit(*(series.title for series in found)))
    efficiency.set(ylabel="efficiency (%)", ylim=(0, None))
    largest = max(series.rates[-1][0] * series.workload.gpus_per_node for series in found)
    efficiency.axvline(largest, color="0.3", linewidth=0.8)
    look: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 7}
    efficiency.annotate("measured", (largest, 1), (-4, 3), ha="right", **look)
    efficiency.annotate("extrapolated", (largest, 1), (4, 3), **look)
    picture.name_below(efficiency)
    return picture


def _draw_projected(axes: Axes, series: Series, style: Mapping[str, Any], counts: Sequence[int]) -> None:
    """Points, fitted line and band of one series."""
    law, color, last = series.best_law(), style["color"], counts.index(series.rates[-1][0])
    per_node, model, bands = series.workload.gpus_per_node, series.fit(law), series.bands(counts)
    points = [series.efficiency_percent(rate) for _, rate in series.rates]
    halves = [point * error for point, error in zip(points, series.errors, strict=False)] or None
    measured = [nodes * per_node for nodes, _ in series.rates]
    look = {**style, "linestyle": "none", "elinewidth": 0.8, "label": f"{series.name}, measured"}
    axes.errorbar(measured, points, halves, **look)
    if series.doubt():
        return
    gpus = [nodes * per_node for nodes in counts]
    projected = [series.efficiency_percent(model.rate(nodes)) for nodes in counts]
    axes.plot(gpus[: last + 1], projected[: last + 1], color=color)
    label = f"{series.name}, {law} with its 95 % band"
    axes.plot(gpus[last:], projected[last:], color=color, label=label, **ESTIMATE)
    if bands:
        low, high = zip(*(bands[nodes] for nodes in counts[last:]), strict=True)
        axes.fill_between(gpus[last:], low, high, color=color, alpha=0.18, linewidth=0)


def main() -> None:
    names = ("inputs", "--output", "--no_published", *INPUT_OPTIONS)
    options = parse_options("Plot the scaling of runs, logs or tables.", *names, required="--output")
    check_format(options.output)
    picture = draw(read_curves(options.inputs, not options.no_published, options))
    picture.save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_alone(main)
