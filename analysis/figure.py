"""How this project's figures look and how they are written: PNG, SVG or PDF, and on the pages they stand on.

A paper column wide (3.3 in) or half as much again, at 7 to 8 pt, so that they can be read on a telephone. Any two colours
differ by 35 or more in CIE L*a*b*, as colour-blind readers see them as well, and in lightness.
matplotlib is imported only when a figure is made. No pyplot, so no display and no state.
"""

from __future__ import annotations

import functools
import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from clap_ds.config.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN_WIDTH_INCHES = 3.3
FORMATS = (".png", ".svg", ".pdf")
IDEAL: Mapping[str, Any] = {"color": "0.55", "linewidth": 0.8, "linestyle": (0, (1, 1))}

_STYLE: Any = {
    "font.size": 8, "figure.titlesize": 8, "figure.titleweight": "bold", "axes.titlesize": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "legend.fontsize": 7, "legend.frameon": False, "axes.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True,
    "grid.linewidth": 0.4, "grid.color": "0.88", "lines.linewidth": 1.2, "lines.markersize": 4, "errorbar.capsize": 2,
    "svg.hashsalt": "clap_ds", "figure.dpi": 100, "text.parse_math": False, "axes.spines.top": False,
    "axes.spines.right": False,
}  # fmt: skip
COLORS = ("#2040d0", "#b5520a", "#8a8a8a", "#1c1c28", "#f5c211", "#5ab4f5")
SERIES_STYLES: list[Mapping[str, Any]] = [
    {"color": color, "marker": marker} for color, marker in zip(COLORS, "os^DvP", strict=True)
]
"""As matplotlib's `plot` takes them; taken in order, then again."""
ESTIMATE: Mapping[str, Any] = {"linestyle": (0, (3, 1.5)), "marker": "", "linewidth": 1.0}
"""Of what was not measured here: extrapolated, or published by others."""
STACK_COLORS = [COLORS[index] for index in (4, 0, 3, 5, 1, 2)]
_LABEL_CHARACTERS = 24

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def styled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """A function that draws, in this project's style; UserError without matplotlib, and for numbers too large to draw."""

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            import matplotlib as mpl
        except ImportError:
            message = "figures need matplotlib, which is not installed: pip install 'clap-ds[analysis]'"
            raise UserError(message) from None
        try:
            with mpl.rc_context(_STYLE):
                return function(*args, **kwargs)
        except (OverflowError, ValueError) as error:
            raise UserError(f"can't be drawn, its numbers are too large for an axis: {error}") from error

    return run


class Picture:
    """A figure of panels."""

    @styled
    def __init__(
        self, heights: Sequence[float] = (1.7,), columns: int = 1, columns_wide: float = 1, share_x: bool = False
    ) -> None:
        """An empty figure of panels, with the height of each row in inches; with `share_x` they share their horizontal axis."""
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(COLUMN_WIDTH_INCHES * columns_wide, sum(heights) + 0.6), layout="constrained")
        panels = self.figure.subplots(len(heights), columns, sharex=share_x, squeeze=False, height_ratios=heights)
        self.panels: list[Axes] = list(panels.flat)

    def title(self, text: str) -> None:
        """A title in as many lines as it needs."""
        width = int(15 * self.figure.get_figwidth())
        lines = "\n".join(fill(line.replace(" %", "\N{NO-BREAK SPACE}%"), width) for line in text.splitlines())
        self.figure.set_figheight(self.figure.get_figheight() + 0.16 * lines.count("\n") + 0.16)
        self.figure.suptitle(lines, x=0.01, ha="left")

    def name_beside(self, axes: Axes) -> None:
        """Name what is drawn at the right of `axes`, the last on top, as parts are stacked."""
        handles, labels = axes.get_legend_handles_labels()
        wrapped = [fill(label, _LABEL_CHARACTERS) for label in reversed(labels)]
        axes.legend(handles[::-1], wrapped, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.2)

    def name_below(self, axes: Axes, columns: int = 1) -> None:
        """Name what is drawn in `axes` under the whole figure, which grows by that."""
        handles, labels = axes.get_legend_handles_labels()
        self.figure.set_figheight(self.figure.get_figheight() + 0.16 * math.ceil(len(labels) / columns))
        look: dict[str, Any] = {"handlelength": 2.5 if columns == 1 else 1.2, "borderaxespad": 0.2, "ncols": columns}
        self.figure.legend(handles, labels, loc="outside lower left", **look)

    @styled
    def stack(self, axes: Axes, parts: Mapping[str, Sequence[float]], bars: Sequence[str], lying: bool = False) -> None:
        """Bars of `parts`, one on the other or, `lying`, side by side."""
        bottoms = [0.0] * len(bars)
        for (part, heights), color in zip(parts.items(), STACK_COLORS, strict=False):
            look: dict[str, Any] = {"color": color, "label": part, "edgecolor": "white", "linewidth": 0.4}
            (axes.barh if lying else axes.bar)(range(len(bars)), heights, 0.7, bottoms, **look)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        (axes.set_yticks if lying else axes.set_xticks)(range(len(bars)), bars)
        axes.grid(axis="y" if lying else "x", visible=False)
        limits = (-0.6, len(bars) - 0.4), (0, (1.0 if lying else 1.05) * max(bottoms))
        axes.set(**dict(zip(("ylim", "xlim") if lying else ("xlim", "ylim"), limits, strict=True)))
        self.name_below(axes, columns=2) if lying else self.name_beside(axes)

    @styled
    def svg(self, prefix: str = "") -> str:
        """An `<svg>` element; ids begin with `prefix`."""
        output = StringIO()
        self.figure.savefig(output, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = output.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg) if prefix else svg

    @styled
    def save(self, path: Path) -> None:
        """Write the figure in the format (one of `FORMATS`) that its name ends in."""
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            self.figure.savefig(path, dpi=200)


def check_format(path: Path) -> None:
    """UserError for a figure's file name that ends in none of `FORMATS`."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: expected a name ending in {', '.join(FORMATS)}")


def gpu_axis(axes: Axes, gpus: Sequence[int], what: str = "GPUs", margin: float = 1.25) -> None:
    """A logarithmic axis of counts of `what`, labelled with the counts themselves; it goes on by a factor `margin`."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(gpus))
    while len(ticks) > 7:
        ticks = ticks[::-2][::-1]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(gpus) / margin, max(gpus) * margin)
    axes.set_xlabel(what)


def log_axis(axes: Axes) -> None:
    """A logarithmic vertical axis, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,), numticks=9))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def shares_axis(axes: Axes) -> None:
    """A vertical axis of shares in percent: from 0, or from a break that is drawn, where all that is drawn is high up."""
    lowest, highest = axes.dataLim.intervaly
    bottom = 10 * (lowest // 10) - 10 if lowest > 0.6 * highest else 0
    axes.set_ylim(bottom, highest + 0.05 * (highest - bottom))
    if bottom > 0:
        dash: Any = {"marker": [(-1, -0.6), (1, 0.6)], "color": "black", "linestyle": "none", "markersize": 8}
        axes.plot([0, 0], [0.03, 0.06], transform=axes.transAxes, clip_on=False, **dash)


def page(title: str, markdown: str, figures: Mapping[str, str]) -> str:
    """One HTML page that refers to nothing outside itself; `figures` is SVG by its name in the Markdown's `![…](name)`.

    What a picture's brackets say is its caption. Headings of the second level can be linked to, by `anchor` of their text.
    Numbers stand at the right of a table's cells, words at the left.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError("HTML needs markdown-it-py, which is not installed: pip install 'clap-ds[analysis]'") from None

    def figure(match: re.Match[str]) -> str:
        return f"<figure>{figures[match[1]]}<figcaption>{match[2]}</figcaption></figure>"

    body = MarkdownIt("js-default", {"linkify": False, "html": False}).render(markdown)
    body = re.sub(r'<td style="text-align:right">(?=[^<]*[^\W\d_]{2}|<)', '<td class="words">', body)
    body = body.replace(' style="text-align:right"', "")
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<p><img src="(.*?)" alt="(.*?)"></p>', figure, body)
    body = re.sub(r"<h2>(.*?)</h2>", lambda found: f'<h2 id="{anchor(html.unescape(found[1]))}">{found[1]}</h2>', body)
    return _PAGE.replace("TITLE", html.escape(title)).replace("BODY", body)


def anchor(heading: str) -> str:
    """What a link to a heading is called, here and where Markdown is shown on the web."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE</title><style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; --shade: #f3f4f6; --accent: #2040d0; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 130rem;
  margin: 2rem auto; padding: 0 2rem; }
p, ul { max-width: 60rem; }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 2px solid var(--accent); } h3 { margin: 1.5rem 0 .5rem; }
a { color: var(--accent); } figure { max-width: 34rem; margin: 1rem 0; } figcaption { font-size: 13px; text-align: center; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; } tbody tr:hover { background: var(--shade); }
td { white-space: nowrap; } td.words { text-align: left; } .wide { overflow-x: auto; }
code { font-size: 13px; background: var(--shade); padding: .1rem .3rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #16181c; --line: #444; --shade: #262a30; --accent: #8aa2ff; }
  svg { filter: invert(.9) hue-rotate(180deg); }
}
@page { size: A4 landscape; margin: 10mm; }
@media print {
  :root { --ink: #000; --paper: #fff; --line: #bbb; --accent: #2040d0; }
  body { max-width: none; margin: 0; padding: 0; font-size: 11px; } svg { filter: none; }
  .wide { overflow: visible; } table, code { font-size: 8px; } th, td { padding: .1rem .25rem; white-space: normal; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
</style></head><body>
BODY
</body></html>
"""
