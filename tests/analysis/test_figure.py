"""How figures look and are written, and the page that holds them."""

import struct
import sys
from pathlib import Path

import pytest
from matplotlib.text import Text

from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, Picture, page
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
    texts = [text for text in picture.figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    assert {"a", "b", "a name of line 4"} <= {text.get_text() for text in texts}
    for legend in picture.figure.legends:
        box = legend.get_window_extent()
        assert box.y1 < picture.panels[1].bbox.y0
        assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= picture.figure.bbox.x1) == (True, True, True)
    bars = picture.panels[0].containers[1]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(1.0, 0.0), (2.0, 3.0)]  # beside the first part


def test_formats_and_the_page_that_takes_pictures_in_and_text_as_text(tmp_path: Path, picture: Picture) -> None:
    for name, start in (("s.png", b"\x89PNG\r\n\x1a\n"), ("s.svg", b"<?xml"), ("s.pdf", b"%PDF")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert struct.unpack(">I", (tmp_path / "s.png").read_bytes()[16:20])[0] == round(200 * COLUMN_WIDTH_INCHES)
    with pytest.raises(UserError, match="txt"):
        picture.save(tmp_path / "s.txt")
    markdown = "| `x` |\n| -: |\n| **2** <i> |\n\n![an alt](s.png)\n\n![out](../secret.png)\n\n[out](https://a.b) <https://a.b>"
    text = page("a <b>", markdown, tmp_path)
    for part in ("<title>a &lt;b&gt;</title>", "<strong>2</strong> &lt;i&gt;", "<figcaption>an alt</figcaption>"):
        assert part in text
    assert ("href" not in text, "default-src 'none'" in text) == (True, True)
    assert text.count('src="data:image/png;base64,iVBOR') == text.count("src=") == 1


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib"):
        Picture()
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(UserError, match="markdown-it-py"):
        page("", "", tmp_path)
