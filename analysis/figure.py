"""How this project's figures look and are written, and the pages they stand on.

One column of a paper wide (3.25 in), or two (6.5 in), at 7 to 8 pt. Any two colours differ by 35 or more in CIE L*a*b*, as
colour-blind readers see them as well, and in lightness.
"""

from __future__ import annotations

import html
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from clap_ds.config.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN_WIDTH_INCHES = 3.25
LINE_INCHES = 0.16
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
    """For what draws, as a decorator, too: this project's style; UserError without matplotlib and for what it can't draw."""
    try:
        import matplotlib as mpl
        import pandas as pd  # noqa: F401, for those who draw
    except ImportError as error:
        raise UserError(f"figures need {error.name}, which is not installed: pip install 'clap-ds[analysis]'") from None
    try:
        with mpl.rc_context(_STYLE):
            yield
    except ValueError as error:
        raise UserError(f"can't be drawn: {error}") from error


class Picture:
    @styled()
    def __init__(
        self, heights: Sequence[float] = (1.7,), columns: int = 1, columns_wide: float = 1, share_x: bool = False
    ) -> None:
        """An empty figure of panels, with the height of each row in inches; with `share_x` they share their horizontal axis."""
        from matplotlib import figure

        self.figure = figure.Figure(
            figsize=(COLUMN_WIDTH_INCHES * columns_wide, sum(heights) + 0.6), layout="constrained"
        )
        panels = self.figure.subplots(len(heights), columns, sharex=share_x, squeeze=False, height_ratios=heights)
        self.panels: list[Axes] = list(panels.flat)

    def title(self, text: str, most_lines: int | None = None) -> None:
        """Write a title in as many lines as it needs, for which the figure grows; UserError for more than `most_lines`."""
        width = int(15 * self.figure.get_figwidth())
        lines = "\n".join(fill(line, width) for line in text.splitlines())
        if most_lines is not None and lines.count("\n") >= most_lines:
            raise UserError(f"--title: expected one line of at most {width} letters, found {len(text)}")
        if not lines:
            return
        self._grow(lines.count("\n") + 1)
        self.figure.suptitle(lines, x=0.01, ha="left")

    def name_below(self, axes: Axes, columns: int = 1, common: str = "") -> None:
        """Name what is drawn in `axes` under the whole figure, which grows by that; `common` is the names' heading."""
        handles, labels = axes.get_legend_handles_labels()
        heading = fill(common, int(18 * self.figure.get_figwidth()))
        self._grow(math.ceil(len(labels) / columns) + bool(heading) * (1 + heading.count("\n")))
        self.figure.legend(handles, labels, loc="outside lower left", ncols=columns, title=heading or None, alignment="left",
                           title_fontsize=7)  # fmt: skip

    def _grow(self, lines: int) -> None:
        self.figure.set_figheight(self.figure.get_figheight() + LINE_INCHES * lines)

    @styled()
    def save(self, path: Path, *beside: str) -> None:
        """Write the figure in the format that its name ends in, such as .png, and in those of the endings `beside`."""
        for each in dict.fromkeys([path, *map(path.with_suffix, beside)]):
            self.figure.savefig(each)


class Figure(NamedTuple):
    """A picture to be written beside a page's Markdown under this name, and what stands under it."""

    name: str
    caption: str
    picture: Picture


Blocks = Iterator[str | Figure]


def gpu_axis(axes: Axes, gpus: Sequence[int], what: str = "GPUs", most: int = 8) -> None:
    """Make the horizontal axis logarithmic, with ticks at these counts: all, or at most about `most` with both ends."""
    counts = sorted(set(gpus))
    gap = (counts[-1] / counts[0]) ** (0.9 / (most - 1))
    ticks = [counts[-1]]
    for count in reversed(counts[1:-1]):
        if ticks[-1] / count >= gap and count / counts[0] >= gap:
            ticks.append(count)
    ticks = sorted({*ticks, counts[0]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(counts[0] / 1.25, counts[-1] * 1.25), xlabel=what)


def percent_axis(axes: Axes, low: float, high: float, lowest: float | None = None) -> None:
    """Set a vertical axis on which the measured range, `low` to `high` percent, takes half the height or more.

    The axis begins at 0, or is marked as cut: at `lowest` where that leaves the measured range its half.
    """
    high = max(high, 100.0)
    wanted = [low - 0.5 * (high - low)] if lowest is None else [lowest, low]
    bottoms = [step * math.floor(each / step) for each in wanted for step in (10, 5, 2, 1, 0.5)]
    bottom = max(0.0, next((each for each in bottoms if high - low >= 0.54 * (high - each)), bottoms[-1]))
    bottom *= high > low
    axes.set_ylim(bottom, high + 0.08 * (high - bottom))
    axes.locator_params(axis="y", steps=(1, 2, 5, 10))
    if bottom:
        for height in (0.03, 0.055):
            axes.plot((-0.015, 0.015), (height, height + 0.02), "k", linewidth=0.8, transform=axes.transAxes, clip_on=False,
                      gid="axis cut")  # fmt: skip


def label_ends(axes: Axes, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Write a text, in its color, to the right of each point (x, y, text, color), apart from each other. Limits come first."""
    ordered, apart = sorted(ends, key=lambda end: end[1]), 0.12 / axes.get_window_extent().height * axes.figure.dpi
    places = [axes.transLimits.transform(axes.transScale.transform(end[:2])) for end in ordered]
    heights = [height for _, height in places]
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + apart)
    for number in range(len(heights) - 1, -1, -1):  # none above the panel
        heights[number] = min(heights[number], 0.98 if number + 1 == len(heights) else heights[number + 1] - apart)
    for (x, y, text, color), (across, _), height in zip(ordered, places, heights, strict=True):
        axes.annotate(
            text, (x, y), (across + 0.02, height), textcoords="axes fraction", color=color, va="center", fontsize=7
        )


def log_axis(axes: Axes) -> None:
    """A logarithmic vertical axis of what is drawn already, with plain numbers: as many as fit without touching."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", subs=())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=9))
    axes.yaxis.set_major_formatter("{x:,g}")


def page(title: str, markdown: str, folder: Path) -> str:
    """One HTML page with the Markdown's pictures, `![](name.png)` of the folder, in itself; it loads nothing from outside."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError("HTML needs markdown-it-py, which is not installed: pip install 'clap-ds[analysis]'") from None

    def embedded(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = MarkdownIt("js-default", {"html": False}).disable(["link", "autolink"]).render(markdown)
    return _PAGE.replace("TITLE", html.escape(title)).replace("BODY", re.sub(r'src="([\w-]+\.png)"', embedded, body))


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
