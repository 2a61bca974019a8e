"""How figures look and are written: each format is what it says, and the page needs nothing else."""

import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, FORMATS, Picture, anchor, check_format, page
from clap_ds.config.errors import UserError


@pytest.fixture
def picture() -> Picture:
    """Bars and lines, all named, under a long title."""
    made = Picture((1.5, 1.0))
    bars, lines = made.panels
    made.stack(bars, {"a": [1.0, 2.0], "b": [0.0, 3.0]}, ["x", "y"])
    for index in range(5):
        lines.plot([0, 1], [index, index], label=f"a name of line {index}")
    made.name_below(lines)
    made.title("an answer of 50 % that is\nlonger than a line of this narrow figure can be at that size")
    return made


def test_texts_are_legible_and_within_the_figure(picture: Picture) -> None:
    picture.figure.draw_without_rendering()
    assert picture.figure.get_size_inches()[0] == COLUMN_WIDTH_INCHES
    texts = [text for text in picture.figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    assert {"a", "b", "a name of line 4"} <= {text.get_text() for text in texts}
    assert picture.figure.get_suptitle().startswith("an answer of 50\N{NO-BREAK SPACE}% that is\nlonger")
    for legend in picture.figure.legends:
        box = legend.get_window_extent()
        assert box.y1 < picture.panels[1].bbox.y0
        assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= picture.figure.bbox.x1) == (True, True, True)


def test_a_stacks_parts_lie_side_by_side(picture: Picture) -> None:
    bars = picture.panels[0].containers[1]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(1.0, 0.0), (2.0, 3.0)]
    assert picture.panels[0].get_xlim()[0] == 0


def test_each_format_is_what_its_name_says(tmp_path: Path, picture: Picture) -> None:
    files = {suffix: tmp_path / f"s{suffix}" for suffix in (*FORMATS, ".SVG")}
    for path in files.values():
        check_format(path)
        picture.save(path)
    png = files[".png"].read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", png[16:20])[0] == round(200 * COLUMN_WIDTH_INCHES)
    assert files[".pdf"].read_bytes().startswith(b"%PDF")
    assert all(ElementTree.parse(files[name]).getroot().tag.endswith("svg") for name in (".svg", ".SVG"))
    with pytest.raises(UserError, match=r"expected a name ending in \.png, \.svg, \.pdf"):
        check_format(tmp_path / "s.gif")


def test_a_page_takes_text_as_text() -> None:
    text = page("a <b>", "## H & h\n\n| `x` | y |\n| -: | -: |\n| 12.5 | **2** |\n\n![an *alt*](f)", {"f": "<svg/>"})
    assert f'<h2 id="{anchor("H & h")}">H &amp; h</h2>' in text
    for part in ("<title>a &lt;b&gt;</title>", "<th", "<code>x</code>", "12.5</td>", "<strong>2</strong>",
                 "<figure><svg/><figcaption>an alt</figcaption></figure>"):  # fmt: skip
        assert part in text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", {})
