"""How this project's figures look and how they are written: PNG, SVG, PDF, or one HTML page with values on hover.

A paper column wide (3.3 in) or half as much again, at 7 to 8 pt, so that they can be read on a telephone. Any two colours
are told apart by colour-blind readers and in greyscale (tests/analysis/test_figure.py). Names stand beside what they name.
matplotlib is imported only when a figure is made. No pyplot, so no display and no state.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from clap_ds.config.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN_WIDTH_INCHES = 3.3
FORMATS = (".png", ".svg", ".pdf", ".html")
HOVER_PREFIX = "hover-"
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
SERIES_STYLES: Sequence[Mapping[str, Any]] = [
    {"color": color, "marker": marker} for color, marker in zip(COLORS, "os^DvP", strict=True)
]
"""As matplotlib's `plot` takes them; taken in order, then again."""
ESTIMATE: Mapping[str, Any] = {"linestyle": (0, (3, 1.5)), "marker": "", "linewidth": 1.0}
"""Of what was not measured here: extrapolated, or published by others."""
_STACK_COLORS = [COLORS[index] for index in (4, 0, 3, 5, 1, 2)]
_LABEL_CHARACTERS = 15
_LINE_POINTS = 9.0

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
    """A figure of panels, and what its HTML page shows besides: values on hover, and a table."""

    @styled
    def __init__(
        self, shape: tuple[int, int] = (1, 1), columns_wide: float = 1, panel_height: float = 1.7, share_x: bool = False
    ) -> None:
        """An empty figure of rows × columns panels; with `share_x` they share their horizontal axis. Height is in inches."""
        from matplotlib.figure import Figure

        height = panel_height * shape[0] + 0.6
        self.figure = Figure(figsize=(COLUMN_WIDTH_INCHES * columns_wide, height), layout="constrained")
        self.panels: list[Axes] = list(self.figure.subplots(*shape, sharex=share_x, squeeze=False).flat)
        self._panel_height = panel_height
        self.table = ""
        """Markdown that follows the figure."""
        self._hover: dict[str, str] = {}

    def hover(self, axes: Axes, x: float, y: float, text: str) -> None:
        """Show `text` over a data point, by an invisible mark."""
        identity = f"{HOVER_PREFIX}{len(self._hover)}"
        self._hover[identity] = text
        axes.plot([x], [y], marker="o", markersize=7, alpha=0, linestyle="none", gid=identity, zorder=20)

    def title(self, text: str) -> None:
        """A title in as many lines as it needs."""
        lines = fill(text, int(15 * self.figure.get_figwidth()))
        self.figure.set_figheight(self.figure.get_figheight() + 0.16 * lines.count("\n") + 0.16)
        self.figure.suptitle(lines, x=0.01, ha="left")

    def label_ends(self, axes: Axes, ends: Iterable[tuple[float, float, str, Any]]) -> None:
        """Name lines and areas at the right of `axes`, whose limits are final: (x, y) of the end, name and colour of each.

        A thin line leads from a name to its end; names keep clear of each other.
        """
        to_axes = axes.transData + axes.transAxes.inverted()
        named = [
            (to_axes.transform((x, y))[1], (x, y), fill(name, _LABEL_CHARACTERS), color) for x, y, name, color in ends
        ]
        named.sort(key=lambda item: item[0])
        lines = [1.25 + name.count("\n") for _, _, name, _ in named]
        needed = _LINE_POINTS / 72 * sum(lines) + 0.3
        if needed > self._panel_height and (grid := axes.get_gridspec()):
            row = self.panels.index(axes) // grid.ncols
            grid.set_height_ratios([needed / self._panel_height if at == row else 1 for at in range(grid.nrows)])
            self.figure.set_figheight(self.figure.get_figheight() + needed - self._panel_height)
        line = _LINE_POINTS / (72 * (max(needed, self._panel_height) - 0.3))
        heights = [line * count for count in lines]
        places: list[float] = []
        for (wanted, *_), height in zip(named, heights, strict=True):
            lowest = places[-1] + (heights[len(places) - 1] + height) / 2 if places else height / 2
            places.append(max(wanted, lowest))
        highest = 1.08
        for index in reversed(range(len(places))):
            places[index] = min(places[index], highest - heights[index] / 2)
            highest = places[index] - heights[index] / 2
        for place, (_, end, name, color) in zip(places, named, strict=True):
            axes.annotate(
                name, end, (1.08, place), textcoords="axes fraction", va="center", fontsize=7, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0,
                            "relpos": (0, 0.5)},
            )  # fmt: skip

    def stack(
        self, axes: Axes, parts: Mapping[str, Sequence[float]], bars: Sequence[str], text: Callable[[str, int], str],
        labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Bars of `parts`, one on the other, each named at the last bar (by `labels`); `text` of a part and bar is on hover."""
        bottoms, ends = [0.0] * len(bars), []
        for (part, heights), color in zip(parts.items(), _STACK_COLORS, strict=False):
            axes.bar(range(len(bars)), heights, 0.7, bottoms, color=color, label=part, edgecolor="white", linewidth=0.4)
            for index, height in enumerate(heights):
                if height:
                    self.hover(axes, index, bottoms[index] + height / 2, text(part, index))
            if any(heights):
                ends.append((len(bars) - 0.65, bottoms[-1] + heights[-1] / 2, (labels or {}).get(part, part), color))
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(bars)), bars)
        axes.grid(axis="x", visible=False)
        axes.set(xlim=(-0.6, len(bars) - 0.4), ylim=(0, 1.05 * max(bottoms)))
        self.label_ends(axes, ends)

    @styled
    def svg(self, prefix: str = "") -> str:
        """An `<svg>` element whose hover marks carry their values as `<title>`; ids begin with `prefix`."""
        output = StringIO()
        self.figure.savefig(output, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = output.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)

        def with_title(match: re.Match[str]) -> str:
            return f'<g id="{match[1]}" class="hover"><title>{html.escape(self._hover[match[1]])}</title>'

        svg = re.sub(rf'<g id="({HOVER_PREFIX}\d+)">', with_title, svg)
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg) if prefix else svg

    @styled
    def save(self, path: Path, title: str = "") -> None:
        """Write the figure in the format (one of `FORMATS`) that its name ends in; `title` is an HTML page's."""
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        elif path.suffix.lower() == ".html":
            text = page(title, f"# {title}\n\n![{title}](figure)\n\n{self.table}", {"figure": self.svg()})
            path.write_text(text, encoding="utf-8")
        else:
            self.figure.savefig(path, dpi=200)


def check_format(path: Path) -> None:
    """UserError for a figure's file name that ends in none of `FORMATS`."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: expected a name ending in {', '.join(FORMATS)}")


def gpu_axis(axes: Axes, gpus: Sequence[int], what: str = "GPUs") -> None:
    """A logarithmic axis of counts of `what`, labelled with the counts themselves."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(gpus))
    while len(ticks) > 7:
        ticks = ticks[::-2][::-1]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(gpus) / 1.25, max(gpus) * 1.25)
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
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError("HTML needs markdown-it-py, which is not installed: pip install 'clap-ds[analysis]'") from None

    def figure(match: re.Match[str]) -> str:
        return f"<figure>{figures[match[1]]}<figcaption>{match[2]}</figcaption></figure>"

    body = MarkdownIt("js-default", {"linkify": False, "html": False}).render(markdown)
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
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 2px solid var(--accent); } h3 { margin: 1.5rem 0 .5rem; }
a { color: var(--accent); } figure { max-width: 34rem; margin: 1rem auto; } figcaption { font-size: 13px; text-align: center; }
svg { width: 100%; height: auto; display: block; }
.hover * { cursor: pointer; pointer-events: all; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; } tbody tr:hover { background: var(--shade); }
td { white-space: nowrap; } td:first-child, th:first-child { text-align: left; } .wide { overflow-x: auto; }
code { font-size: 13px; background: var(--shade); padding: .1rem .3rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #16181c; --line: #444; --shade: #262a30; --accent: #8aa2ff; }
  svg { filter: invert(.9) hue-rotate(180deg); }
}
@media print { body { max-width: none; } .wide { overflow: visible; } }
</style></head><body>
BODY
</body></html>
"""
