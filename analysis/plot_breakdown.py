"""The parts of a step at every scale, as stacked bars: from each run's instrumented pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clap_ds.analysis.figure import HoverPoints, new_figure
from clap_ds.analysis.runs import BREAKDOWN_PARTS
from clap_ds.analysis.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FACES = {
    "data_wait": ("#b8a100", ""),
    "forward": ("#0b3c6f", ""),
    "loss": ("#8c2d7d", ""),
    "backward": ("#7fa8d1", ""),
    "exposed_communication": ("#d1600a", "///"),
    "optimizer": ("#c9c9c9", "..."),
}


def draw(rows: Sequence[Row]) -> tuple[Figure, HoverPoints]:
    """One bar a row, in milliseconds; rows without a breakdown are left out.

    Args:
        rows: of one series, at least one with a breakdown.
    """
    rows = [row for row in rows if row.breakdown_s]
    assert rows
    figure, (axes,) = new_figure(1, panel_height=2.2)
    hover = HoverPoints()
    bottoms = [0.0] * len(rows)
    for part in BREAKDOWN_PARTS:
        heights = [1000 * row.breakdown_s.get(part, 0.0) for row in rows]
        if not any(heights):
            continue
        color, hatch = _FACES[part]
        label = part.replace("_", " ")
        axes.bar(
            range(len(rows)), heights, 0.62, bottom=bottoms, color=color, hatch=hatch, edgecolor="white", linewidth=0.4,
            label=label,
        )  # fmt: skip
        for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
            if height:
                share = height / 10 / sum(row.breakdown_s.values())
                text = f"{row.nodes} nodes, {row.gpus} GPUs\n{label} {height:.3g} ms, {share:.1f} %"
                hover.add(axes, index, bottoms[index] + height / 2, text)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(rows)), [str(row.gpus) for row in rows])
    axes.set_xlim(-0.75, max(len(rows), 3) - 0.25)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("GPUs", fontsize=8)
    axes.set_ylabel("ms a step", fontsize=8)
    axes.tick_params(labelsize=7, width=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure, hover
