"""How this project's figures look and how they are written: PNG, SVG, or one self-contained HTML page with values on
hover.

A paper column wide (3.3 in) at 8 pt; series differ in marker, line style and lightness, so that a greyscale print
still tells them apart. matplotlib is imported only when a figure is made. No pyplot, so no display and no state.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.page import HOVER_CLASS, page
from clap_ds.analysis.runs import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_WIDTH_INCHES = 3.3
FORMATS = (".png", ".svg", ".html")
HOVER_PREFIX = "hover-"

_STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "0.88",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "svg.hashsalt": "clap_ds",
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class SeriesStyle:
    """How one series is drawn."""

    color: str
    marker: str
    line: Any
    """A matplotlib line style: a name, or (offset, (on, off))."""
    filled: bool = True


SERIES_STYLES = (
    SeriesStyle("#0b3c6f", "o", "-"),
    SeriesStyle("#d1600a", "s", "--"),
    SeriesStyle("#2f8f6b", "^", "-."),
    SeriesStyle("#8c2d7d", "D", (":")),
    SeriesStyle("#6b6b6b", "v", "-"),
    SeriesStyle("#b8a100", "P", "--"),
)
"""Colours whose lightness differs; taken in order, then again."""


class HoverPoints:
    """Collects the values that an HTML figure shows on hover, each tied to an invisible mark over its data point."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, axes: Axes, x: float, y: float, text: str) -> None:
        identity = f"{HOVER_PREFIX}{len(self.texts)}"
        self.texts[identity] = text
        axes.plot([x], [y], marker="o", markersize=7, alpha=0, linestyle="none", gid=identity, zorder=20)


def new_figure(num_panels: int, panel_height: float = 1.7) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels one above the other that share their horizontal axis."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(COLUMN_WIDTH_INCHES, panel_height * num_panels + 0.6), layout="constrained")
        panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)
    return figure, list(panels[:, 0])


def gpu_axis(axes: Axes, gpus: Sequence[int]) -> None:
    """A logarithmic axis of GPU counts, labelled with the counts themselves."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(gpus))
    while len(ticks) > 9:
        ticks = ticks[::-2][::-1]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(gpus) / 1.25, max(gpus) * 1.25)
    axes.set_xlabel("GPUs")


def check_format(path: Path) -> None:
    """Refuse a figure's file name whose ending names no format.

    Raises:
        InputError: not .png, .svg or .html.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: expected a name ending in {', '.join(FORMATS)}")


def save(figure: Figure, path: Path, hover: HoverPoints, title: str, body: str = "") -> None:
    """Write a figure in the format its name ends in; `body` is HTML that follows it on the page.

    Raises:
        InputError: unknown ending, or the file can't be written.
    """
    import matplotlib as mpl

    check_format(path)
    try:
        with mpl.rc_context(_STYLE):
            if path.suffix.lower() == ".png":
                figure.savefig(path, dpi=300)
            elif path.suffix.lower() == ".svg":
                path.write_text(figure_svg(figure, hover.texts), encoding="utf-8")
            else:
                svg = figure_svg(figure, hover.texts)
                content = page(title, f"<h1>{html.escape(title)}</h1>\n{svg}\n{body}")
                path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror})") from error


def figure_svg(figure: Figure, hover_texts: Mapping[str, str], prefix: str = "") -> str:
    """The figure as an `<svg>` element whose hover marks carry their values as `<title>`.

    Args:
        prefix: put before every id, so that several figures can share a page.
    """
    output = StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    svg = output.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)

    def with_title(match: re.Match[str]) -> str:
        title = html.escape(hover_texts[match[1]])
        return f'<g id="{match[1]}" class="{HOVER_CLASS}"><title>{title}</title>'

    svg = re.sub(rf'<g id="({HOVER_PREFIX}\d+)">', with_title, svg)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg) if prefix else svg
