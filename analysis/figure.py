"""How this project's figures look and how they are written: PNG, SVG, PDF, or one HTML page with values on hover.

A paper column wide (3.3 in), or two, at 8 pt; series differ in marker, line style and lightness, so that a greyscale print
still tells them apart. matplotlib is imported only when a figure is made. No pyplot, so no display and no state.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
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
    "hatch.linewidth": 0.4, "svg.hashsalt": "clap_ds", "figure.dpi": 100,
}  # fmt: skip
_COLORS = ("#0b3c6f", "#d1600a", "#2f8f6b", "#8c2d7d", "#6b6b6b", "#b8a100")
SERIES_STYLES: Sequence[Mapping[str, Any]] = [
    {"color": color, "marker": marker, "linestyle": line}
    for color, marker, line in zip(_COLORS, "os^DvP", ("-", "--", "-.", ":", "-", "--"), strict=True)
]
"""As matplotlib's `plot` takes them. Colours whose lightness differs; taken in order, then again."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def styled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """A function that draws, in this project's style; UserError when called without matplotlib."""

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            import matplotlib as mpl
        except ImportError:
            message = "figures need matplotlib, which is not installed: pip install 'clap-ds[analysis]'"
            raise UserError(message) from None
        with mpl.rc_context(_STYLE):
            return function(*args, **kwargs)

    return run


class Picture:
    """A figure of panels, and what its HTML page shows besides: values on hover, and a table."""

    @styled
    def __init__(self, shape: tuple[int, int] = (1, 1), columns_wide: int = 1, panel_height: float = 1.7) -> None:
        """An empty figure of rows × columns panels; those of one column share their horizontal axis. Height is in inches."""
        from matplotlib.figure import Figure

        height = panel_height * shape[0] + 0.6
        self.figure = Figure(figsize=(COLUMN_WIDTH_INCHES * columns_wide, height), layout="constrained")
        self.panels: list[Axes] = list(self.figure.subplots(*shape, sharex=shape[1] == 1, squeeze=False).flat)
        self.table = ""
        """Markdown that follows the figure."""
        self._hover: dict[str, str] = {}

    def hover(self, axes: Axes, x: float, y: float, text: str) -> None:
        """Show `text` over a data point, by an invisible mark."""
        identity = f"{HOVER_PREFIX}{len(self._hover)}"
        self._hover[identity] = text
        axes.plot([x], [y], marker="o", markersize=7, alpha=0, linestyle="none", gid=identity, zorder=20)

    @styled
    def svg(self, prefix: str = "") -> str:
        """An `<svg>` element whose hover marks carry their values as `<title>`; ids begin with `prefix`."""
        output = StringIO()
        self.figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
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
            self.figure.savefig(path, dpi=300)


def check_format(path: Path) -> None:
    """UserError for a figure's file name that ends in none of `FORMATS`."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: expected a name ending in {', '.join(FORMATS)}")


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


def page(title: str, markdown: str, figures: Mapping[str, str]) -> str:
    """One HTML page that refers to nothing outside itself; `figures` is SVG by its name in the Markdown's `![…](name)`."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError("HTML needs markdown-it-py, which is not installed: pip install 'clap-ds[analysis]'") from None

    def figure(match: re.Match[str]) -> str:
        return f'<figure aria-label="{match[2]}">{figures[match[1]]}</figure>'

    body = MarkdownIt("js-default", {"linkify": False, "html": False}).render(markdown)
    body = body.replace(' style="text-align:right"', "")
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<p><img src="(.*?)" alt="(.*?)"></p>', figure, body)
    return _PAGE.replace("TITLE", html.escape(title)).replace("BODY", body)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 2px solid #0b3c6f; } h3 { margin: 1.5rem 0 .5rem; }
svg { width: 100%; max-width: 34rem; height: auto; display: block; margin: 1rem auto; }
.hover * { cursor: pointer; pointer-events: all; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; } tbody tr:hover { background: #f3f6fa; }
td { white-space: nowrap; } td:first-child, th:first-child { text-align: left; } .wide { overflow-x: auto; }
code { font-size: 13px; background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere; }
@media print { body { max-width: none; } .wide { overflow: visible; } }
</style></head><body>
BODY
</body></html>
"""
