"""The projection as a figure: measured and projected efficiency with its band, and what the projected steps are lost to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.figure import SERIES_STYLES, HoverPoints, gpu_axis, new_figure, save
from clap_ds.analysis.page import html_table
from clap_ds.analysis.projection import Measured, Setting, fit_measured, prediction_bands
from clap_ds.analysis.step_model import TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_projection(path: Path, found: Sequence[Measured], setting: Setting, fit_nodes: int, max_gpus: int) -> None:
    """Draw every series' projection and write it in the format the file's name ends in."""
    figure, hover = draw(found, setting, fit_nodes, max_gpus)
    rows = []
    for measured in found:
        model = fit_measured(measured, setting)
        counts = _node_counts(measured, max_gpus)
        bands = prediction_bands(measured, setting, counts)
        for nodes in counts:
            band = f"{bands[nodes][0]:.1f}–{bands[nodes][1]:.1f}" if bands else ""
            efficiency = f"{measured.efficiency_percent(model.rate(nodes)):.1f}"
            rows.append([measured.title, str(nodes), str(nodes * measured.workload.gpus_per_node), efficiency, band])
    table = html_table(("series", "nodes", "GPUs", "projected efficiency %", "95 % band"), rows)
    save(figure, path, hover, "Projected scaling of CLAP training", table)


def draw(found: Sequence[Measured], setting: Setting, fit_nodes: int, max_gpus: int) -> tuple[Figure, HoverPoints]:
    """Efficiency of every series over its projection, and the parts of the first series' step that are not compute."""
    figure, panels = new_figure(2, panel_height=2.1)
    hover = HoverPoints()
    gpus: list[int] = []
    for index, measured in enumerate(found):
        gpus += _draw_efficiency(panels[0], measured, setting, index, fit_nodes, max_gpus, hover)
    _draw_losses(panels[1], found[0], setting, max_gpus, hover)
    panels[0].set_ylabel("efficiency (%)", fontsize=8)
    panels[1].set_ylabel("share of the step (%)", fontsize=8)
    panels[1].set_ylim(bottom=0)
    gpu_axis(panels[1], gpus)
    for panel in panels:
        panel.tick_params(labelsize=7, width=0.6)
    panels[1].set_title(_name(found[0]), fontsize=7, loc="right", pad=2)
    panels[1].legend(fontsize=7, frameon=False, loc="upper left", handlelength=3)
    handles, labels = _legend(found, fit_nodes)
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7, handlelength=3.2)
    return figure, hover


def _name(measured: Measured) -> str:
    return measured.title.partition(",")[0]


def _legend(found: Sequence[Measured], fit_nodes: int) -> tuple[list[Any], list[str]]:
    """One entry a series (band, model and measured points together) and one for the hold-out fits."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for index in range(len(found)):
        style = SERIES_STYLES[index % len(SERIES_STYLES)]
        face = style.color if index % 2 == 0 else "white"
        line = Line2D(
            [], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, markerfacecolor=face
        )
        handles.append((Patch(facecolor=style.color, alpha=0.18), line))
    labels = [f"{_name(measured)}: measured, model, 95 % band" for measured in found]
    if any(_has_hold_out(measured, fit_nodes) for measured in found):
        handles.append(Line2D([], [], color="0.3", linestyle=":", linewidth=1.0))
        labels.append(f"model fitted on up to {fit_nodes} nodes only")
    return handles, labels


def _has_hold_out(measured: Measured, fit_nodes: int) -> bool:
    return 2 <= len(measured.up_to(fit_nodes).rates) < len(measured.rates)


def _node_counts(measured: Measured, max_gpus: int) -> list[int]:
    """Measured node counts, then doublings up to `max_gpus`."""
    counts = [nodes for nodes, _ in measured.rates]
    while 2 * counts[-1] * measured.workload.gpus_per_node <= max_gpus:
        counts.append(2 * counts[-1])
    return counts


def _draw_efficiency(
    axes: Axes, measured: Measured, setting: Setting, index: int, fit_nodes: int, max_gpus: int, hover: HoverPoints
) -> list[int]:
    """Points, fitted line and band of one series; returns the GPU counts on its axis."""
    style = SERIES_STYLES[index % len(SERIES_STYLES)]
    model = fit_measured(measured, setting)
    counts = _node_counts(measured, max_gpus)
    gpus = [nodes * measured.workload.gpus_per_node for nodes in counts]
    bands = prediction_bands(measured, setting, counts)
    name = _name(measured)
    if bands:
        low, high = zip(*(bands[nodes] for nodes in counts), strict=True)
        axes.fill_between(gpus, low, high, color=style.color, alpha=0.18, linewidth=0)
    projected = [measured.efficiency_percent(model.rate(nodes)) for nodes in counts]
    axes.plot(gpus, projected, color=style.color, linestyle=style.line, linewidth=1.2)
    small = measured.up_to(fit_nodes)
    if _has_hold_out(measured, fit_nodes):
        held_out = fit_measured(small, setting)
        tried = [measured.efficiency_percent(held_out.rate(nodes)) for nodes in counts]
        axes.plot(gpus, tried, color=style.color, linestyle=":", linewidth=1.0)
    points = [measured.efficiency_percent(rate) for _, rate in measured.rates]
    face = style.color if index % 2 == 0 else "white"
    axes.plot(
        gpus[: len(points)], points, color=style.color, marker=style.marker, markerfacecolor=face, markersize=4,
        linestyle="none",
    )  # fmt: skip
    for count, nodes, value in zip(gpus, counts, projected, strict=True):
        band = f"\n95 % band {bands[nodes][0]:.1f}–{bands[nodes][1]:.1f} %" if bands else ""
        hover.add(axes, count, value, f"{name}\n{nodes} nodes, {count} GPUs\nmodel {value:.1f} %{band}")
    return gpus


def _draw_losses(axes: Axes, measured: Measured, setting: Setting, max_gpus: int, hover: HoverPoints) -> None:
    model = fit_measured(measured, setting)
    counts = _node_counts(measured, max_gpus)
    gpus = [nodes * measured.workload.gpus_per_node for nodes in counts]
    for style, term in zip(SERIES_STYLES, reversed(TERMS[1:]), strict=False):
        shares = [100 * model.terms_s(nodes)[term] / sum(model.terms_s(nodes).values()) for nodes in counts]
        axes.plot(
            gpus, shares, color=style.color, marker=style.marker, linestyle=style.line, markersize=3.5, linewidth=1.2,
            label=term,
        )  # fmt: skip
        for count, share in zip(gpus, shares, strict=True):
            hover.add(axes, count, share, f"{term}\n{count} GPUs\n{share:.1f} % of the step")
