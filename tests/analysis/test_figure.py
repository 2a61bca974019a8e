"""How figures look and are written, and the page that holds them."""

import struct
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.text import Text

from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, Picture, log_axis, page
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
    bars = picture.panels[0].containers[1]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(1.0, 0.0), (2.0, 3.0)]  # beside the first part


@pytest.mark.parametrize("high", [5, 500, 300_000, 1e12])
def test_numbers_on_a_logarithmic_axis_dont_touch(high: float) -> None:
    picture = Picture((2.6, 1.3), share_x=True)
    axes = picture.panels[1]
    axes.plot([1, 2], [1.0, high])
    log_axis(axes)
    picture.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
    shown = sorted(
        (box for box in boxes if axes.bbox.y0 <= (box.y0 + box.y1) / 2 <= axes.bbox.y1), key=lambda box: box.y0
    )
    assert len(shown) > 1
    assert all(below.y1 <= above.y0 for below, above in pairwise(shown))


def test_formats_and_the_page_that_takes_pictures_in_and_text_as_text(tmp_path: Path, picture: Picture) -> None:
    for name, start in (("s.png", b"\x89PNG\r\n\x1a\n"), ("s.SVG", b"<?xml"), ("s.pdf", b"%PDF")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert struct.unpack(">I", (tmp_path / "s.png").read_bytes()[16:20])[0] == round(200 * COLUMN_WIDTH_INCHES)
    with pytest.raises(UserError, match=r"'txt' is not supported .*svg"):
        picture.save(tmp_path / "s.txt")
    text = page(
        "a <b>",
        "| `x` | y |\n| -: | -: |\n| 12.5 | **2** <i> |\n\n![an alt](s.png)\n\n"
        "![out](../secret.png)\n\nsee ![in](s.png) [out](https://a.b) <https://a.b>",
        tmp_path,
    )
    for part in ("<title>a &lt;b&gt;</title>", "<code>x</code>", "12.5</td>", "<strong>2</strong> &lt;i&gt;",
                 "<figcaption>an alt</figcaption>"):  # fmt: skip
        assert part in text
    assert "href" not in text
    assert "default-src 'none'" in text
    assert text.count('src="data:image/png;base64,iVBOR') == text.count("src=") == 1


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"matplotlib, which is not installed: pip install 'clap-ds\[analysis\]'"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", tmp_path)
