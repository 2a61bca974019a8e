"""Figures of scaling: the data in them is the table's."""

import re
from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.plot_scaling import curves_of, draw, read_curves
from clap_ds.analysis.record import read_record
from clap_ds.analysis.table import Row, by_series, write_csv
from clap_ds.config.errors import UserError
from tests.analysis.samples import BASE, DATA, TINY, command, run

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


def test_the_published_curve_of_the_same_model_is_laid_under_in_grey(table: Path) -> None:
    gpus = {label: [row.gpus for row in rows] for label, rows in read_curves([table]).items()}
    assert gpus == {NAME: [4, 8, 16], f"{NAME} (published, GH200)": [4, 8, 16, 32, 64, 128, 256, 512]}
    assert len(read_curves([table], with_published=False)) == 1
    efficiency = draw(read_curves([table, BASE])).panels[0]
    tiny, tiny_published, base = (bars.lines[0] for bars in efficiency.containers)
    assert tiny_published.get_color() == base.get_color() == "0.6" != tiny.get_color()
    assert tiny_published.get_marker() != base.get_marker()
    published_alone = draw(read_curves([TINY, BASE])).panels[0].containers
    assert "0.6" not in [bars.lines[0].get_color() for bars in published_alone]


def test_labels_say_what_differs_and_count_what_does_not(tmp_path: Path) -> None:
    paths = []
    for index, (tokens, scaling) in enumerate(((77, "weak"), (514, "weak"), (514, "weak"), (514, ""))):
        paths.append(tmp_path / f"{index}.csv")
        write_csv(paths[-1], [Row(1, 4, 9.0, 36.0, speedup=1.0, model="micro", text_tokens=tokens, scaling=scaling)])
    plain = "micro (514 tokens, weak scaling)"
    assert list(read_curves(paths)) == ["micro (77 tokens, weak scaling)", plain, f"{plain} [2]", "micro (514 tokens)"]


def test_panels_hold_the_tables_numbers_and_the_title_the_answer(table: Path) -> None:
    picture = draw(read_curves([table], with_published=False))
    efficiency, throughput, mfu = picture.panels
    assert picture.figure.get_suptitle().replace("\n", " ") == (
        "92.9 ± 1.50\xa0% efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU"
    )
    (drawn,) = [container.lines[0].get_xydata().tolist() for container in throughput.containers]
    assert drawn == [[4.0, 2800.0], [8.0, 5440.0], [16.0, 10400.0]]
    assert (throughput.get_xscale(), throughput.get_yscale()) == ("log", "log")
    assert throughput.lines[0].get_xydata().tolist() == [[4, 2800], [16, 11200]]
    named = [text.get_text().replace("\n", " ") for text in picture.figure.legends[0].get_texts()]
    assert sorted(named) == [NAME, "±: 2σ over 3 repeats"]
    spread = [bar[1][1] - bar[0][1] for bar in throughput.containers[0].lines[2][0].get_segments()]
    assert spread == pytest.approx([2 * 8.0 * gpus for gpus in (4, 8, 16)])
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx([100.0, 97.1, 92.9], abs=0.05)
    assert [bar[1][1] - bar[0][1] for bar in bars] == pytest.approx([3.0] * 3)
    assert [list(line.get_ydata()) for line in mfu.lines] == [[20.0] * 3, [5.0] * 3]
    assert mfu.get_ylim()[0] == 0


def test_an_answer_above_100_percent_is_doubted_in_the_title_too() -> None:
    for last, error, doubted in ((590.0, 0.0, True), (590.0, 30.0, True), (590.0, 60.0, False), (505.0, 0.0, False)):
        intervals = [error and (rate - error, rate + error) for rate in (500.0, last)]
        rows = scaling_table([run(1, 500.0, interval=intervals[0]), run(4, last, interval=intervals[1])])
        assert ("in doubt: a scale is above 100 %" in plot_scaling.answer(rows)) == doubted
    of_two = scaling_table([run(1, 500.0), run(2, 400.0), run(4, 390.0)], 2)
    assert "in doubt" not in plot_scaling.answer(of_two)
    ideal = draw(curves_of(by_series(of_two), with_published=False)).panels[1].lines[0]
    assert ideal.get_xydata().tolist() == [[4, 1600], [16, 6400]]  # as many from each as at the baseline
    doubtful = draw(curves_of(by_series(scaling_table([run(1, 500.0), run(2, 560.0), run(4, 495.0)])))).figure
    assert "(in doubt: a scale is above 100 % by more" in " ".join(doubtful.get_suptitle().split())


def test_each_repeat_is_a_dot_beside_its_mean() -> None:
    rows = scaling_table([run(1, 198.0), run(1, 202.0), run(2, 180.0), run(2, 160.0), run(4, 140.0)])
    picture = draw(curves_of(by_series(rows), with_published=False))
    dots = [line.get_ydata().tolist() for line in picture.panels[0].lines if line.get_marker() == "."]
    assert dots == [pytest.approx([99.0, 101.0]), pytest.approx([90.0, 80.0])]
    assert len(picture.panels) == 2  # none of MFU, which isn't known


def test_runs_are_drawn_as_tables_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, plot_scaling.main, DATA / "record_2ranks", TINY, "--output", tmp_path / "s.svg")
    rate, words = read_record(DATA / "record_2ranks").cell("samples_per_s_per_gpu"), (tmp_path / "s.svg").read_text()
    assert re.search(rf"{rate} ± \S+ samples/s/rank on 1 node, 2 ranks", " ".join(words.split()))


def test_tables_without_rates_are_refused_and_one_row_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, picture = tmp_path / "t.csv", tmp_path / "s.png"
    write_csv(path, [Row(1, 4, model="micro", state="failed")])
    with pytest.raises(UserError, match="no row has a rate"):
        command(monkeypatch, plot_scaling.main, path, "--output", picture)
    write_csv(path, [Row(1, 4, 10.0, 40.0, scaling_efficiency_percent=100.0, speedup=1.0, model="micro")])
    command(monkeypatch, plot_scaling.main, path, "--output", picture)
    assert picture.stat().st_size > 5000
