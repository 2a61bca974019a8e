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
from typing import TYPE_CHECKING, Any

from clap_ds.utils.errors import UserError
from clap_ds.utils.files import read_bytes, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 6.5
LINE_INCHES = 0.16
PLOT_SHARE = 0.85
"""Width of a panel's axis relative to the panel, about."""
DIGIT_POINTS = 4.5
"""Width of a digit on an axis."""
COLORS = ("#2040d0", "#b5520a", "#8a8a8a", "#1c1c28", "#f5c211", "#5ab4f5")
SERIES_STYLES: list[Mapping[str, Any]] = [
    {"color": COLORS[place], "marker": marker, "linestyle": line}
    for place, marker, line in zip((0, 1, 3, 5, 4, 2), "os^DvP", ("-", "--", "-.") * 2, strict=True)
]
_STYLE: Any = {
    "font.size": 8, "figure.titlesize": 8, "figure.titleweight": "bold", "axes.titlesize": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False, "axes.linewidth": 0.6,
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.4, "grid.color": "0.88", "lines.linewidth": 1.2,
    "lines.markersize": 4, "errorbar.capsize": 2, "svg.hashsalt": "clap_ds", "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200,
    "svg.fonttype": "none", "pdf.fonttype": 42,
}  # fmt: skip


@contextmanager
def styled() -> Iterator[None]:
    """Apply this project's style (context manager or decorator). UserError without matplotlib or
    for undrawable data."""
    try:
        import matplotlib as mpl
        import pandas as pd  # noqa: F401, needed to draw
    except ImportError as error:
        raise UserError(
            f"figures need {error.name}, which is not installed: pip install 'clap-ds[analysis]'"
        ) from None
    try:
        with mpl.rc_context(_STYLE):
            yield
    except ValueError as error:
        raise UserError(f"the figure can't be drawn: {error}") from error


class Picture:
    @styled()
    def __init__(self, heights: Sequence[float] = (1.7,), columns: int = 1) -> None:
        """Create empty panels. `heights`: inches per row."""
        from matplotlib import figure

        self.figure = figure.Figure(
            figsize=(WIDTH_INCHES, sum(heights) + 0.6), layout="constrained"
        )
        panels = self.figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
        self.panels: list[Axes] = list(panels.flat)

    def title(self, text: str) -> None:
        """Add a title; the figure grows by its lines."""
        lines = "\n".join(fill(line, 97) for line in text.splitlines())
        self._grow(lines)
        self.figure.suptitle(lines, x=0.01, ha="left")

    def name_below(self, axes: Axes, columns: int = 1, common: str = "") -> None:
        """Add a legend of `axes` below the figure, which grows by its height. `common`: heading of
        the legend."""
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        heading = fill(common, 117)
        self._grow(*[f"{heading}\n"] * bool(heading), *[*named][::columns])
        self.figure.legend(named.values(), named, loc="outside lower left", ncols=columns, title=heading or None,
                           alignment="left", title_fontsize=7)  # fmt: skip

    def _grow(self, *texts: str) -> None:
        lines = sum(text.count("\n") + 1 for text in texts)
        self.figure.set_figheight(self.figure.get_figheight() + LINE_INCHES * lines)

    @styled()
    def save(self, path: Path, *beside: str) -> None:
        """Write the figure in the format of its suffix, such as .png, and also with the suffixes
          `beside`. UserError for a
        folder."""
        if path.is_dir():
            raise UserError(f"--output {path}: expected a file such as scaling.png, found a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.with_suffix(path.suffix or ".png")
        for target in dict.fromkeys([path, *map(path.with_suffix, beside)]):
            with replacing(target) as file:
                self.figure.savefig(file, format=target.suffix[1:])


def gpu_axis(axes: Axes, gpus: Sequence[int], units: str, *, is_log: bool = True) -> None:
    """Put a tick at each of these counts. Label the largest, the smallest, and as many others as
    fit, from the largest down."""
    counts = sorted(set(gpus), reverse=True)
    left, right = (counts[-1] / 1.25, counts[0] * 1.25) if is_log else (0.0, counts[0] * 1.04)
    axes.set_xscale("log" if is_log else "linear")
    axes.set(xlim=(left, right), xlabel=units)
    scaled = axes.xaxis.get_transform().transform
    grid = axes.get_gridspec()
    axis_points = 72 * PLOT_SHARE * WIDTH_INCHES / (grid.ncols if grid else 1)
    labels = dict[int, tuple[float, float]]()  # count: center and width in points
    for count in (counts[0], counts[-1], *counts[1:-1]):
        center = axis_points * (scaled(count) - scaled(left)) / (scaled(right) - scaled(left))
        width = DIGIT_POINTS * (len(f"{count:,}") + 1)
        if all(
            abs(center - other) >= (width + other_width) / 2
            for other, other_width in labels.values()
        ):
            labels[count] = (center, width)
    axes.set_xticks([*labels], [f"{count:,}" for count in labels])
    axes.set_xticks(counts, [""] * len(counts), minor=True)


def log_axis(axes: Axes) -> None:
    """Make the y-axis logarithmic, with as many plain numbers as fit. Draw the data before."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", subs=())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axes.yaxis.set_major_formatter("{x:,g}")


def page(title: str, markdown: str, folder: Path) -> str:
    """Render Markdown as a self-contained HTML page, with its pictures, `![](name.png)` in the
    folder, embedded."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError(
            "HTML needs markdown-it-py, which is not installed: pip install 'clap-ds[analysis]'"
        ) from None

    def embedded(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{b64encode(read_bytes(folder / match[1])).decode()}"'

    body = MarkdownIt("js-default", {"html": False}).disable(["link", "autolink"]).render(markdown)
    body = body.replace(
        "‹", "&lt;"
    )  # `plain_text` replaced it for viewers of Markdown, which may take tags
    return _PAGE.replace("TITLE", html.escape(title)).replace(
        "BODY", re.sub(r'src="([\w-]+\.png)"', embedded, body)
    )


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
