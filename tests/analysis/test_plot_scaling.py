"""Figures of scaling: the data in them is the table's."""

from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.plot_scaling import draw, read_curves
from clap_ds.analysis.table import Row, read_table, write_csv
from clap_ds.config.errors import UserError
from tests.analysis.samples import BASE, TINY, command

NAME = "htsat-tiny-roberta-base"


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


def test_the_published_curve_of_the_same_model_is_laid_over_in_its_colour(table: Path) -> None:
    gpus = {label: [row.gpus for row in rows] for label, rows in read_curves([table]).items()}
    assert gpus == {NAME: [4, 8, 16], f"{NAME} (published, GH200)": [4, 8, 16, 32, 64, 128, 256, 512]}
    assert len(read_curves([table], with_published=False)) == 1
    assert len(read_curves([TINY, BASE])) == 2
    throughput = draw(read_curves([table, BASE])).panels[0]
    tiny, base, tiny_published = (bars.lines[0].get_color() for bars in throughput.containers)
    assert tiny == tiny_published != base


def test_labels_say_what_differs_and_count_what_does_not(tmp_path: Path) -> None:
    paths = []
    for index, (tokens, scaling) in enumerate(((77, "weak"), (514, "weak"), (514, "weak"), (514, ""))):
        paths.append(tmp_path / f"{index}.csv")
        write_csv(paths[-1], [Row(1, 4, 9.0, 36.0, speedup=1.0, model="micro", text_tokens=tokens, scaling=scaling)])
    plain = "micro (514 tokens, weak scaling)"
    assert list(read_curves(paths)) == ["micro (77 tokens, weak scaling)", plain, f"{plain} [2]", "micro (514 tokens)"]


def test_panels_hold_the_tables_numbers(table: Path) -> None:
    throughput, efficiency, mfu = draw(read_curves([table], with_published=False)).panels
    (drawn,) = [container.lines[0].get_xydata().tolist() for container in throughput.containers]
    assert drawn == [[4.0, 2800.0], [8.0, 5440.0], [16.0, 10400.0]]
    assert (throughput.get_xscale(), throughput.get_yscale()) == ("log", "log")
    assert throughput.lines[0].get_xydata().tolist() == [[4, 2800], [16, 11200]]
    assert {text.get_text().replace("\n", "") for text in throughput.texts} == {"ideal", NAME}
    assert {text.get_text().replace("\n", " ") for text in mfu.texts} == {"514 tokens counted", "the work done"}
    assert efficiency.get_title(loc="right") == "error bars: 2σ over 3 repeats"
    assert mfu.get_ylim()[0] == 0
    spread = [bar[1][1] - bar[0][1] for bar in throughput.containers[0].lines[2][0].get_segments()]
    assert spread == pytest.approx([2 * 8.0 * gpus for gpus in (4, 8, 16)])
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx([100.0, 97.1, 92.9], abs=0.05)
    assert [bar[1][1] - bar[0][1] for bar in bars] == pytest.approx([3.0] * 3)
    assert len(mfu.containers) == 2


def test_markers_mean_a_series_and_error_bars_stand_side_by_side(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    write_csv(other, [replace(row, precision="fp32") for row in read_table(table)])
    curves = read_curves([table, other])
    throughput, efficiency, mfu = draw(curves).panels
    markers = [bars.lines[0].get_marker() for bars in throughput.containers]
    filled = [bars.lines[0].get_markerfacecolor() for bars in throughput.containers]
    assert (len(set(markers[:2])), markers[2], filled[2]) == (2, markers[0], "white")  # the published one is open
    assert all(bars.lines[0].get_marker() == "." for bars in mfu.containers if bars.lines[0].get_linestyle() == ":")
    first, second = (bars.lines[0].get_xdata() for bars in efficiency.containers[:2])
    assert min(second / first) > 1.1


def test_tables_without_rates_are_refused_and_one_row_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, picture = tmp_path / "t.csv", tmp_path / "s.png"
    write_csv(path, [Row(1, 4, model="micro", state="failed")])
    with pytest.raises(UserError, match="no row has a rate"):
        command(monkeypatch, plot_scaling.main, path, "--output", picture)
    write_csv(path, [Row(1, 4, 10.0, 40.0, scaling_efficiency_percent=100.0, speedup=1.0, model="micro")])
    command(monkeypatch, plot_scaling.main, path, "--output", picture)
    assert picture.stat().st_size > 5000
