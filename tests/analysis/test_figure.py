"""How figures look and are written: each format is what it says, and the page needs nothing else."""

import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, FORMATS, Picture, anchor, page, shares_axis
from clap_ds.analysis.plot_scaling import draw, draw_projection, read_curves
from clap_ds.analysis.step_model import Machine, Method, read_series
from clap_ds.config.errors import UserError
from tests.analysis.samples import BASE, TINY, command


def test_every_text_is_at_least_7_points() -> None:
    for picture in (draw(read_curves([TINY, BASE])), draw_projection([read_series(TINY, Machine(), Method())])):
        picture.figure.draw_without_rendering()
        texts = picture.figure.findobj(Text)
        assert min(text.get_fontsize() for text in texts if isinstance(text, Text) and text.get_text()) >= 7
        assert picture.figure.get_size_inches()[0] == COLUMN_WIDTH_INCHES


def test_each_format_is_what_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {suffix: tmp_path / f"s{suffix}" for suffix in (*FORMATS, ".SVG")}
    for path in files.values():
        command(monkeypatch, plot_scaling.main, TINY, "--output", path)
    png = files[".png"].read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", png[16:20])[0] == round(200 * COLUMN_WIDTH_INCHES)
    assert files[".pdf"].read_bytes().startswith(b"%PDF")
    assert files[".svg"].read_bytes() == files[".SVG"].read_bytes()
    assert ElementTree.parse(files[".svg"]).getroot().tag.endswith("svg")
    with pytest.raises(UserError, match=r"expected a name ending in \.png, \.svg, \.pdf"):
        command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / "s.gif")


def test_names_stand_outside_of_what_they_name_and_within_the_figure() -> None:
    picture = Picture((1.5, 1.0))
    for axes in picture.panels:
        for index in range(5):
            axes.plot([0, 1], [index, index], label=f"a name of line {index}")
    picture.name_beside(picture.panels[0])
    picture.name_below(picture.panels[1], columns=2)
    picture.title("an answer of 50 % that is\nlonger than a line of this narrow figure can be at that size")
    picture.figure.draw_without_rendering()
    beside, below = picture.panels[0].get_legend(), picture.figure.legends[0]
    assert beside.get_window_extent().x0 > picture.panels[0].bbox.x1
    assert below.get_window_extent().y1 < picture.panels[1].bbox.y0
    for legend in (beside, below):
        box = legend.get_window_extent()
        assert (box.x0, box.y0) >= (0, 0)
        assert box.x1 <= picture.figure.bbox.x1
        assert len(legend.get_texts()) == 5
    assert picture.figure.get_suptitle().startswith("an answer of 50\N{NO-BREAK SPACE}% that is\nlonger")


@pytest.mark.parametrize("lying", [False, True])
def test_a_stack_names_its_parts(lying: bool) -> None:
    picture = Picture()
    (axes,) = picture.panels
    picture.stack(axes, {"a": [1.0, 2.0], "b": [0.0, 3.0]}, ["x", "y"], lying)
    legend = picture.figure.legends[0] if lying else axes.get_legend()
    assert {text.get_text() for text in legend.get_texts()} == {"a", "b"}
    assert [bar.get_width() if lying else bar.get_height() for bar in axes.containers[1]] == [0.0, 3.0]
    assert [bar.get_x() if lying else bar.get_y() for bar in axes.containers[1]] == [1.0, 2.0]
    assert (axes.get_xlim if lying else axes.get_ylim)()[0] == 0


def test_shares_have_a_break_or_start_at_zero() -> None:
    for lowest, bottom, marks in ((10.0, 0, 0), (84.0, 70, 1)):
        (axes,) = Picture().panels
        axes.plot([0, 1], [lowest, 100.0])
        shares_axis(axes)
        assert (axes.get_ylim()[0], len(axes.lines)) == (bottom, 1 + marks)


def test_a_page_takes_text_as_text() -> None:
    text = page(
        "a <b>", "## h\n\n| `x` | y |\n| -: | -: |\n| ab | **2** |\n| 12.5 | – |\n\n![an *alt*](f)", {"f": "<svg/>"}
    )
    assert '<h2 id="h-h">H &amp; h</h2>'.replace("h-h", anchor("H & h")) in page("", "## H & h", {})
    for part in ("<title>a &lt;b&gt;</title>", "<th><code>x</code></th>", "<td>12.5</td>", "<strong>2</strong>",
                 '<td class="words">ab</td>',
                 '<figure><svg/><figcaption>an alt</figcaption></figure>'):  # fmt: skip
        assert part in text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", {})
