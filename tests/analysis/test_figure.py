"""Style and output of figures, and the page that contains them."""

import struct
from pathlib import Path

import pytest

from clap_ds.analysis.figure import FigureBuilder, render_page
from clap_ds.utils.errors import UserError


def test_page_embeds_figures_and_escapes_text(tmp_path: Path) -> None:
    figure = FigureBuilder()
    figure.add_title("an answer")
    for name, start in (("s.png", b"\x89PNG\r\n\x1a\n"), ("s.svg", b"<?xml"), ("s.pdf", b"%PDF")):
        figure.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert struct.unpack(">I", (tmp_path / "s.png").read_bytes()[16:20])[0] == 200 * 6.5
    for name, problem in (("s.txt", "txt"), ("", "folder")):
        with pytest.raises(UserError, match=problem):
            figure.save(tmp_path / name)
    markdown = "| `x` |\n| -: |\n| **2** <i> |\n\n![](s.png)\n\n[out](https://a.b) <https://a.b>"
    text = render_page("a <b>", markdown, tmp_path)
    for part in ("<title>a &lt;b&gt;</title>", "<strong>2</strong> &lt;i&gt;"):
        assert part in text
    assert "href" not in text
    assert "default-src 'none'" in text
    assert text.count('src="data:image/png;base64,iVBOR') == text.count("src=") == 1
