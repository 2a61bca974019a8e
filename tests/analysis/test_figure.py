"""How figures look and are written: each format is what it says, and the page needs nothing else."""

import re
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, SERIES_STYLES, Picture, page
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


def test_series_differ_without_colour() -> None:
    assert len({style["marker"] for style in SERIES_STYLES}) == len(SERIES_STYLES)


def test_png_is_a_column_wide_at_print_resolution_and_pdf_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("s.png", "s.pdf"):
        command(monkeypatch, plot_scaling.main, TINY, BASE, "--output", tmp_path / name)
    content = (tmp_path / "s.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20])[0] == round(300 * COLUMN_WIDTH_INCHES)
    assert (tmp_path / "s.pdf").read_bytes().startswith(b"%PDF")


def test_svg_is_xml_and_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.svg", "b.svg"):
        command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_html_is_self_contained_and_every_point_has_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / "s.html")
    text = (tmp_path / "s.html").read_text()

    assert all(link.startswith("#") for link in re.findall(r'\b(?:src|href)="(.*?)"', text))
    assert "@import" not in text
    titles = re.findall(r'<g id="hover-\d+" class="hover"><title>([^<]*)</title>', text)
    assert len(titles) == 3 * 8
    assert any("128 nodes, 512 GPUs\n278833 samples/s\n544.6 samples/s/GPU" in title for title in titles)
    assert any("87.3 %" in title for title in titles)
    assert "<td>87.3</td>" in text


def test_a_page_takes_text_as_text() -> None:
    text = page("a <b>", "## h\n\n| `x` | y |\n| -: | -: |\n| <i> | **2** |\n\n![an *alt*](f)", {"f": "<svg/>"})
    for part in ("<title>a &lt;b&gt;</title>", "<th><code>x</code></th>", "<td>&lt;i&gt;</td>", "<strong>2</strong>",
                 '<figure aria-label="an alt"><svg/></figure>'):  # fmt: skip
        assert part in text


def test_bad_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"expected a name ending in \.png, \.svg, \.pdf, \.html"):
        command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / "s.gif")
    for name in ("s.png", "s.svg"):
        with pytest.raises(UserError, match="can't be written"):
            command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / "no" / name)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", {})
