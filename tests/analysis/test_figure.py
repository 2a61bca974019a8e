"""How figures look and are written: each format is what it says, and the page needs nothing else."""

import re
import struct
import sys
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.text import Text

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import COLORS, COLUMN_WIDTH_INCHES, FORMATS, Picture, anchor, page, shares_axis
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


def seen(color: str, matrix: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as seen through a matrix in linear RGB."""
    coded = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(matrix @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


TO_XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
SIGHT = {  # Machado, Oliveira and Fernandes 2009, severity 1.0
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "usual": np.eye(3),
}


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_are_told_apart(sight: str) -> None:
    found = [seen(color, np.array(SIGHT[sight])) for color in COLORS]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(found, 2)) >= 35
    # As lightness alone, in greyscale, they differ still.
    assert sight != "usual" or min(abs(one[0] - other[0]) for one, other in combinations(found, 2)) >= 6


def test_names_stand_beside_their_lines_clear_of_each_other() -> None:
    picture = Picture()
    (axes,) = picture.panels
    axes.set(xlim=(0, 1), ylim=(0, 1))
    picture.label_ends(axes, [(1.0, 0.01 * index, f"a name of line {index}", COLORS[0]) for index in range(5)])
    picture.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 5
    assert all(one.y1 < other.y0 for one, other in pairwise(boxes))
    assert min(box.x0 for box in boxes) > axes.bbox.x1
    assert max(box.x1 for box in boxes) <= picture.figure.bbox.x1


def test_a_stack_names_its_parts_and_shares_have_a_break_or_start_at_zero() -> None:
    picture = Picture()
    (axes,) = picture.panels
    picture.stack(
        axes, {"a": [1.0, 2.0], "b": [0.0, 3.0], "c": [0.0, 0.0]}, ["x", "y"], lambda part, bar: f"{part} {bar}"
    )
    assert {text.get_text() for text in axes.texts} == {"a", "b"}
    assert [bar.get_height() for bar in axes.containers[1]] == [0.0, 3.0]
    assert axes.get_ylim()[0] == 0
    for lowest, bottom, marks in ((10.0, 0, 0), (84.0, 70, 1)):
        (axes,) = Picture().panels
        axes.plot([0, 1], [lowest, 100.0])
        shares_axis(axes)
        assert (axes.get_ylim()[0], len(axes.lines)) == (bottom, 1 + marks)


def test_a_page_is_dark_where_the_reader_wants_it_so() -> None:
    text = page("", "", {})
    dark = text[text.index("@media (prefers-color-scheme: dark)") :]
    assert re.search(r"--ink: #[a-f]", dark)
    assert "svg { filter: invert" in dark


def test_a_page_takes_text_as_text() -> None:
    text = page("a <b>", "## h\n\n| `x` | y |\n| -: | -: |\n| <i> | **2** |\n\n![an *alt*](f)", {"f": "<svg/>"})
    assert '<h2 id="h-h">H &amp; h</h2>'.replace("h-h", anchor("H & h")) in page("", "## H & h", {})
    for part in ("<title>a &lt;b&gt;</title>", "<th><code>x</code></th>", "<td>&lt;i&gt;</td>", "<strong>2</strong>",
                 '<figure><svg/><figcaption>an alt</figcaption></figure>'):  # fmt: skip
        assert part in text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", {})
