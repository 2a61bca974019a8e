"""How figures look and are written: each format is what it says, and the page needs nothing else."""

import re
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, FORMATS, Picture, page
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
    assert struct.unpack(">I", png[16:20])[0] == round(300 * COLUMN_WIDTH_INCHES)
    assert files[".pdf"].read_bytes().startswith(b"%PDF")
    assert files[".svg"].read_bytes() == files[".SVG"].read_bytes()
    assert ElementTree.parse(files[".svg"]).getroot().tag.endswith("svg")
    text = files[".html"].read_text()
    assert all(link.startswith("#") for link in re.findall(r'\b(?:src|href)="(.*?)"', text))
    assert "@import" not in text
    titles = re.findall(r'<g id="hover-\d+" class="hover"><title>([^<]*)</title>', text)
    assert len(titles) == 3 * 8
    assert any("128 nodes, 512 GPUs\n278833 samples/s\n544.6 samples/s/GPU" in title for title in titles)
    assert any("87.3 %" in title for title in titles)
    assert "<td>87.3</td>" in text
    with pytest.raises(UserError, match=r"expected a name ending in \.png, \.svg, \.pdf, \.html"):
        command(monkeypatch, plot_scaling.main, TINY, "--output", tmp_path / "s.gif")


def test_a_page_takes_text_as_text() -> None:
    text = page("a <b>", "## h\n\n| `x` | y |\n| -: | -: |\n| <i> | **2** |\n\n![an *alt*](f)", {"f": "<svg/>"})
    for part in ("<title>a &lt;b&gt;</title>", "<th><code>x</code></th>", "<td>&lt;i&gt;</td>", "<strong>2</strong>",
                 '<figure aria-label="an alt"><svg/></figure>'):  # fmt: skip
        assert part in text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", {})
