"""Figures: the data in them is the table's, each format is what it says, and the page needs nothing else."""

import re
import struct
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import COLUMN_WIDTH_INCHES, SERIES_STYLES
from clap_ds.analysis.plot_scaling import draw, read_curves
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.runs import InputError
from clap_ds.analysis.table import Row, write_csv

TINY, BASE = (PUBLISHED_DIR / f"jupiter_htsat_{size}.csv" for size in ("tiny", "base"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [
        Row(nodes, 4 * nodes, rate, rate * 4 * nodes, 20.0, rate / 7, 8.0, 1.5, "2σ over 3 repeats", 3, rate * nodes / 700,
            mfu_model_percent=5.0, model="htsat_tiny_roberta_base", scaling="weak", state="completed")
        for nodes, rate in ((1, 700.0), (2, 680.0), (4, 650.0))
    ]  # fmt: skip
    failed = Row(8, 32, model="htsat_tiny_roberta_base", scaling="weak", state="failed")
    write_csv(tmp_path / "mine.csv", [*rows, failed])
    return tmp_path / "mine.csv"


def test_the_published_curve_of_the_same_model_is_laid_over(table: Path) -> None:
    curves = read_curves([table])
    assert [(curve.label, curve.is_published, curve.gpus) for curve in curves] == [
        ("htsat-tiny-roberta-base", False, [4, 8, 16]),
        ("htsat-tiny-roberta-base (published, GH200)", True, [4, 8, 16, 32, 64, 128, 256, 512]),
    ]
    assert len(read_curves([table], with_published=False)) == 1
    assert len(read_curves([TINY, BASE])) == 2


def test_panels_hold_the_tables_numbers(table: Path) -> None:
    figure, _ = draw(read_curves([table], with_published=False))
    throughput, efficiency, mfu = figure.axes
    drawn = [list(container.lines[0].get_xydata().tolist()) for container in throughput.containers]
    assert drawn == [[[4.0, 2800.0], [8.0, 5440.0], [16.0, 10400.0]]]
    assert (throughput.get_xscale(), throughput.get_yscale()) == ("log", "log")
    ideal = next(line for line in throughput.lines if line.get_label() == "ideal")
    assert ideal.get_xydata().tolist() == [[4, 2800], [16, 11200]]
    spread = [bar[1][1] - bar[0][1] for bar in throughput.containers[0].lines[2][0].get_segments()]
    assert spread == pytest.approx([2 * 8.0 * gpus for gpus in (4, 8, 16)])
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx([100.0, 97.1, 92.9], abs=0.05)
    assert [bar[1][1] - bar[0][1] for bar in bars] == pytest.approx([3.0] * 3)
    assert len(mfu.containers) == 2
    assert figure.get_size_inches()[0] == COLUMN_WIDTH_INCHES


def test_every_text_is_at_least_7_points(table: Path) -> None:
    figure, _ = draw(read_curves([table]))
    figure.draw_without_rendering()
    from matplotlib.text import Text

    sizes = {text.get_fontsize() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()}
    assert min(sizes) >= 7


def test_series_differ_without_colour() -> None:
    assert len({(style.marker, str(style.line)) for style in SERIES_STYLES}) == len(SERIES_STYLES)
    assert len({style.marker for style in SERIES_STYLES}) == len(SERIES_STYLES)

    def lightness(color: str) -> float:
        red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    first, second = (lightness(style.color) for style in SERIES_STYLES[:2])
    assert abs(first - second) > 50


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["plot_scaling.py", *map(str, arguments)])
    plot_scaling.main()


def test_png_is_a_column_wide_at_print_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(monkeypatch, TINY, BASE, "--output", tmp_path / "s.png")
    content = (tmp_path / "s.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20])[0] == round(300 * COLUMN_WIDTH_INCHES)


def test_svg_is_xml_and_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.svg", "b.svg"):
        run_command(monkeypatch, TINY, "--output", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_html_is_self_contained_and_every_point_has_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(monkeypatch, TINY, "--output", tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()

    class Links(HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.found += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    parser = Links()
    parser.feed(page)
    assert all(link.startswith("#") for link in parser.found)
    assert "@import" not in page
    titles = re.findall(r'<g id="hover-\d+" class="hover"><title>([^<]*)</title>', page)
    assert len(titles) == 3 * 8
    assert any("128 nodes, 512 GPUs\n278833 samples/s\n544.6 samples/s/GPU" in title for title in titles)
    assert any("87.3 %" in title for title in titles)


def test_bad_outputs_and_tables_without_rates_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"expected a name ending in \.png, \.svg, \.html"):
        run_command(monkeypatch, TINY, "--output", tmp_path / "s.pdf")
    with pytest.raises(InputError, match="can't be written"):
        run_command(monkeypatch, TINY, "--output", tmp_path / "no" / "s.png")
    write_csv(tmp_path / "none.csv", [Row(1, 4, model="micro", state="failed")])
    with pytest.raises(InputError, match="no row has a rate"):
        run_command(monkeypatch, tmp_path / "none.csv", "--output", tmp_path / "s.png")


def test_one_row_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(
        tmp_path / "one.csv", [Row(1, 4, 10.0, 40.0, scaling_efficiency_percent=100.0, speedup=1.0, model="micro")]
    )
    run_command(monkeypatch, tmp_path / "one.csv", "--output", tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 5000
