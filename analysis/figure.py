"""Style and output of figures, and HTML pages that contain them.

Figures are as wide as two columns of a paper, with 7 to 8 pt text. Any two colors differ in
lightness and by 35 or more in CIE L*a*b*, also as color-blind readers see them.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from clap_ds.utils.errors import UserError
from clap_ds.utils.files import open_atomically, read_bytes

WIDTH_INCHES = 6.5
LINE_INCHES = 0.16
# Width of a panel's axis relative to the panel, about.
PLOT_FRACTION = 0.85
# Width of a digit on an axis.
DIGIT_POINTS = 4.5
COLORS = ("#2040d0", "#b5520a", "#8a8a8a", "#1c1c28", "#f5c211", "#5ab4f5")
_COLOR_ORDER = (0, 1, 3, 5, 4, 2)
SERIES_STYLES: list[Mapping[str, Any]] = [
    {"color": COLORS[index], "marker": marker, "linestyle": line}
    for index, marker, line in zip(_COLOR_ORDER, "os^DvP", ("-", "--", "-.") * 2, strict=True)
]
_STYLE: Any = {
    "font.size": 8,
    "figure.titlesize": 8,
    "figure.titleweight": "bold",
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "0.88",
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    # Equal figures become equal files.
    "svg.hashsalt": "clap_ds",
    # A dollar sign in a name is no formula.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 200,
    # Text stays text, which can be searched and edited.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply this project's style (context manager or decorator). UserError for undrawable data."""
    try:
        with mpl.rc_context(_STYLE):
            yield
    # matplotlib raises it for data that no axis can show.
    except ValueError as error:
        raise UserError(f"the figure can't be drawn: {error}") from error


class FigureBuilder:
    """A figure of stacked rows of panels that grows with its title and legends."""

    @styled()
    def __init__(self, heights: Sequence[float] = (1.7,), columns: int = 1) -> None:
        """Create empty panels. `heights`: inches per row."""
        size = (WIDTH_INCHES, sum(heights) + 0.6)
        self.figure = Figure(figsize=size, layout="constrained")
        panels = self.figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
        self.panels: list[Axes] = list(panels.flat)

    def add_title(self, text: str) -> None:
        """Add a title; the figure grows by its lines."""
        # Characters per line at this width and size.
        lines = "\n".join(fill(line, 97) for line in text.splitlines())
        self._grow(lines)
        self.figure.suptitle(lines, x=0.01, ha="left")

    def add_legend_below(self, axes: Axes, columns: int = 1, heading: str = "") -> None:
        """Add a legend of `axes` below the figure, which grows by its height."""
        handles, labels = axes.get_legend_handles_labels()
        # A label that several curves share has one entry.
        entries = dict(zip(labels, handles, strict=True))
        heading = fill(heading, 117)
        rows = [*entries][::columns]
        if heading:
            rows.append(f"{heading}\n")
        self._grow(*rows)
        self.figure.legend(
            entries.values(),
            entries,
            loc="outside lower left",
            ncols=columns,
            title=heading or None,
            alignment="left",
            title_fontsize=7,
        )

    def _grow(self, *texts: str) -> None:
        lines = sum(text.count("\n") + 1 for text in texts)
        self.figure.set_figheight(self.figure.get_figheight() + LINE_INCHES * lines)

    @styled()
    def save(self, path: Path, *extra_suffixes: str) -> None:
        """Write the figure in the format of its suffix, such as .png, and also with these suffixes.
        UserError for a folder."""
        if path.is_dir():
            raise UserError(f"--output {path}: expected a file such as scaling.png, found a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.with_suffix(path.suffix or ".png")
        for target in dict.fromkeys([path, *map(path.with_suffix, extra_suffixes)]):
            with open_atomically(target) as file:
                self.figure.savefig(file, format=target.suffix[1:])


def set_gpu_axis(axes: Axes, gpus: Sequence[int], units: str, *, is_log: bool = True) -> None:
    """Put a tick at each of these counts. Label the largest, the smallest, and as many others as
    fit, from the largest down."""
    counts = sorted(set(gpus), reverse=True)
    if is_log:
        left = counts[-1] / 1.25
        right = counts[0] * 1.25
    else:
        left = 0.0
        right = counts[0] * 1.04
    axes.set_xscale("log" if is_log else "linear")
    axes.set(xlim=(left, right), xlabel=units)
    # Labels must not overlap, in points on the axis.
    scaled = axes.xaxis.get_transform().transform
    grid = axes.get_gridspec()
    axis_points = 72 * PLOT_FRACTION * WIDTH_INCHES / (grid.ncols if grid else 1)
    # Center and width in points of each labeled count.
    labels = dict[int, tuple[float, float]]()
    for count in (counts[0], counts[-1], *counts[1:-1]):
        center = axis_points * (scaled(count) - scaled(left)) / (scaled(right) - scaled(left))
        width = DIGIT_POINTS * (len(f"{count:,}") + 1)
        overlapping = [
            label
            for label, (other_center, other_width) in labels.items()
            if abs(center - other_center) < (width + other_width) / 2
        ]
        if not overlapping:
            labels[count] = (center, width)
    axes.set_xticks([*labels], [f"{count:,}" for count in labels])
    # Counts without a label have a small tick.
    axes.set_xticks(counts, [""] * len(counts), minor=True)


def set_log_axis(axes: Axes) -> None:
    """Make the y-axis logarithmic, with as many plain numbers as fit. Draw the data before."""
    axes.set_yscale("log", subs=())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axes.yaxis.set_major_formatter("{x:,g}")


def render_page(title: str, markdown: str, folder: Path) -> str:
    """Render Markdown as a self-contained HTML page, with its pictures, `![](name.png)` in the
    folder, embedded."""

    def embed(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{b64encode(read_bytes(folder / match[1])).decode()}"'

    # HTML and links of records have no effect.
    body = MarkdownIt("js-default", {"html": False}).disable(["link", "autolink"]).render(markdown)
    # `plain_text` replaced "<" for viewers of Markdown, which may take tags.
    body = body.replace("‹", "&lt;")
    body = re.sub(r'src="([\w-]+\.png)"', embed, body)
    return _PAGE.replace("TITLE", html.escape(title)).replace("BODY", body)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>TITLE</title><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; } img { width: 34rem; max-width: 100%; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 13px; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #8886; white-space: nowrap; }
</style></head><body>
BODY
</body></html>
"""
