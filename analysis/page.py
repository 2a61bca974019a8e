"""One self-contained HTML page from the Markdown that these commands print, with figures whose values show on hover.

Knows the Markdown written here and no more: headings, paragraphs, lists, pipe tables, `code` and images. Figures are inline
SVG; a page refers to nothing outside itself.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

HOVER_CLASS = "hover"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
h2 {{ margin: 2.5rem 0 .5rem; border-bottom: 2px solid #0b3c6f; }} h3 {{ margin: 1.5rem 0 .5rem; }}
svg {{ width: 100%; max-width: 34rem; height: auto; display: block; margin: 1rem auto; }}
.{hover} * {{ cursor: pointer; pointer-events: all; }}
#tip {{ position: fixed; display: none; background: #222; color: #fff; padding: .3rem .6rem; border-radius: 4px;
        font-size: 13px; white-space: pre; pointer-events: none; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .5rem 0; }}
th, td {{ text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #ddd; }}
th {{ vertical-align: bottom; }} tbody tr:hover {{ background: #f3f6fa; }}
td {{ white-space: nowrap; }} td:first-child, th:first-child {{ text-align: left; }} .wide {{ overflow-x: auto; }}
code {{ font-size: 13px; background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere; }}
@media print {{ body {{ max-width: none; }} .wide {{ overflow: visible; }} }}
</style></head><body>
{body}
<div id="tip" role="status"></div>
<script>
const tip = document.getElementById("tip");
const points = [...document.querySelectorAll(".{hover}")].map(mark => {{
  const title = mark.querySelector("title"), text = title.textContent;
  title.remove();
  return {{mark, text}};
}});
const covers = (mark, x, y) => {{
  const box = mark.getBoundingClientRect();
  return x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
}};
document.addEventListener("mousemove", event => {{
  const under = points.filter(point => covers(point.mark, event.clientX, event.clientY));
  tip.style.display = under.length ? "block" : "none";
  tip.textContent = under.map(point => point.text).join("\\n\\n");
  tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}});
</script>
</body></html>
"""


def page(title: str, body: str) -> str:
    """A whole HTML page around `body`."""
    return _PAGE.format(title=html.escape(title), hover=HOVER_CLASS, body=body)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain text; empty cells become dashes."""
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{_inline(cell) or '–'}</td>" for cell in row) + "</tr>" for row in rows]
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def from_markdown(text: str, figures: Mapping[str, str]) -> str:
    """HTML of this project's Markdown.

    Args:
        text: blocks separated by empty lines.
        figures: SVG that stands for an image, by the file name in `![…](name)`.
    """
    return "\n".join(_block(block, figures) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str, figures: Mapping[str, str]) -> str:
    lines = block.splitlines()
    if heading := re.fullmatch(r"(#{1,6}) (.*)", lines[0]):
        level = len(heading[1])
        rest = "\n".join(lines[1:])
        return f"<h{level}>{_inline(heading[2])}</h{level}>" + (_block(rest, figures) if rest else "")
    if image := re.fullmatch(r"!\[(.*)\]\((.*)\)", block):
        return f'<figure aria-label="{html.escape(image[1])}">{figures[image[2]]}</figure>'
    if block.startswith("|"):
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
        return html_table(cells[0], cells[2:])
    if block.startswith("- "):
        items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
    return f"<p>{_inline(block)}</p>"


def _inline(text: str) -> str:
    escaped = html.escape(text.strip(), quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
