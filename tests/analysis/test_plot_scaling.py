"""Figures of scaling: the data in them is the table's."""

from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.plot_scaling import draw, draw_projection, read_curves
from clap_ds.analysis.record import read_record
from clap_ds.analysis.table import Row, Run, Scale, by_series, write_csv
from clap_ds.analysis.weak_scaling import series_of
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, TINY, command, given, run

MICRO = [
    Row(nodes, 4 * nodes, rate, rate * 4 * nodes, samples_per_s_per_gpu_2sigma=8.0, uncertainty_from="2σ of 3", repeats=3,
        model="micro", scaling="weak", state="completed")
    for nodes, rate in ((1, 700.0), (2, 680.0), (4, 650.0))
]  # fmt: skip


def curves(*runs: Run) -> dict[str, list[Scale]]:
    return {rows[0].title: rows for rows in by_series(scaling_table(runs))}


def test_panels_hold_the_tables_numbers_and_the_title_the_answer(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [*MICRO, Row(8, 32, model="micro", scaling="weak", state="failed")])
    picture = draw(read_curves(given(inputs=[tmp_path / "t.csv"])))
    efficiency, throughput = picture.panels
    error = 100 * 650 / 700 * ((8 / 650) ** 2 + (8 / 700) ** 2) ** 0.5
    assert picture.figure.get_suptitle().replace("\n", " ") == (
        f"92.9 ± {error:.2f} % efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU"
    )
    (drawn,) = [container.lines[0].get_xydata().tolist() for container in throughput.containers]
    assert drawn == [[4.0, 2800.0], [8.0, 5440.0], [16.0, 10400.0]]
    assert (throughput.get_xscale(), throughput.get_yscale()) == ("log", "log")
    assert throughput.lines[0].get_xydata().tolist() == [[4, 2800], [16, 11200]]  # ideal
    spread = [bar[1][1] - bar[0][1] for bar in throughput.containers[0].lines[2][0].get_segments()]
    assert spread == pytest.approx([2 * 8.0 * gpus for gpus in (4, 8, 16)])
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx([100.0, 97.14, 92.86], abs=0.01)
    assert bars[2][1][1] - bars[2][0][1] == pytest.approx(2 * error, abs=0.01)
    named = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert named == ["micro"]


def test_a_baseline_of_several_nodes_is_stated() -> None:
    picture = draw(curves(run(2, 200.0), run(4, 180.0)))
    assert "90.0 % efficiency on 16 GPUs relative to 2 nodes" in picture.figure.get_suptitle().replace("\n", " ")
    assert "relative to 2 nodes" in picture.panels[0].get_ylabel()


def test_the_command_takes_runs_beside_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, empty = (tmp_path / f"{name}.csv" for name in ("table", "empty"))
    write_csv(table, MICRO)
    write_csv(empty, [Row(1, 4, model="micro", state="failed")])
    with pytest.raises(UserError, match="no row has a rate"):
        read_curves(given(inputs=[empty]))
    command(monkeypatch, plot_scaling.main, DATA / "record_2ranks", table, "--output", tmp_path / "s.svg")
    rate = read_record(DATA / "record_2ranks").cell("samples_per_s_per_gpu")
    assert f"{rate}" in (tmp_path / "s.svg").read_text()


def test_a_projections_figure_holds_measurements_line_and_band() -> None:
    series = replace(
        series_of(scaling_table(read_table_runs(TINY))),
        errors=tuple(0.001 * nodes for nodes in (1, 2, 4, 8, 16, 32, 64, 128)),
    )
    picture = draw_projection([series], "The answer")
    (efficiency,) = picture.panels
    assert picture.figure.get_suptitle() == "The answer"
    (points,) = efficiency.containers
    assert points.lines[0].get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    (low, high) = points.lines[2][0].get_segments()[-1]
    assert high[1] - low[1] == pytest.approx(2 * 0.128 * 87.3, abs=0.05)
    band = next(each for each in efficiency.collections if each.get_alpha()).get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (512, 2048)
    assert (band.y0, band.y1) == pytest.approx((series.bands([512])[512][0], series.bands([128])[128][1]))
    long = {line.get_linestyle(): line.get_xydata() for line in efficiency.lines if len(line.get_xydata()) > 2}
    assert (long["-"][-1][0], long["--"][0][0]) == (512, 512)  # measured ends where extrapolated begins
    percents = [series.efficiency_percent(series.fit(series.best_law()).rate(nodes)) for nodes in (128, 512)]
    assert [long["--"][0][1], long["--"][-1][1]] == pytest.approx(percents)
