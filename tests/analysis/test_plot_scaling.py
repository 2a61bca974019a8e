"""Scaling figures show the table's data."""

from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.plot_scaling import answer, draw, draw_projection, read_curves
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Row, Run, Scale, by_series, read_table_runs, write_csv
from clap_ds.analysis.weak_scaling import series_of
from tests.analysis.samples import DATA, TINY, command, given, run

MICRO = [
    Row(nodes, 4 * nodes, rate, rate * 4 * nodes, samples_per_s_per_gpu_ci95=8.0, uncertainty_from="2σ of 3", repeats=3,
        model="micro", scaling="weak", state="completed")
    for nodes, rate in ((1, 700.0), (2, 680.0), (4, 650.0))
]  # fmt: skip


def curves(*runs: Run) -> dict[str, list[Scale]]:
    return {rows[0].title: rows for rows in by_series(scaling_table(runs))}


def test_panels_hold_the_tables_numbers(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [*MICRO, Row(8, 32, model="micro", scaling="weak", state="failed")])
    found = read_curves(given(inputs=[tmp_path / "t.csv"]))
    picture = draw(found)
    efficiency, speedup = picture.panels
    error = 100 * 650 / 700 * ((8 / 650) ** 2 + (8 / 700) ** 2) ** 0.5
    assert [answer(rows) for rows in found.values()] == [
        f"92.9 ± {error:.2f}% efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU"
    ]
    (drawn,) = [container.lines[0].get_xydata().tolist() for container in speedup.containers]
    assert drawn == [[4.0, 1.0], [8.0, pytest.approx(5440 / 2800)], [16.0, pytest.approx(10400 / 2800)]]
    assert (speedup.get_xscale(), speedup.get_yscale()) == ("log", "log")
    assert speedup.lines[0].get_xydata().tolist() == [[4, 1], [8, 2], [16, 4]]  # ideal
    spread = [bar[1][1] - bar[0][1] for bar in speedup.containers[0].lines[2][0].get_segments()]
    assert spread[-1] == pytest.approx(2 * error / 100 * 4)
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx([100.0, 97.14, 92.86], abs=0.01)
    assert bars[2][1][1] - bars[2][0][1] == pytest.approx(2 * error, abs=0.01)
    named = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert named == ["ideal", "micro: 92.9%, 3.71× of 4×"]


def test_a_legend_has_what_distinguishes_series() -> None:
    names = ("gradient_sync=deepspeed", "compile=off")
    picture = draw(curves(*(run(2**place, 600.0, variant=name) for name in names for place in range(1, 10))))
    assert ["relative to 2 nodes" in panel.get_ylabel() for panel in picture.panels] == [True, True]
    picture.figure.draw_without_rendering()
    (legend,) = picture.figure.legends
    assert legend.get_title().get_text() == "htsat-tiny-roberta-base, weak scaling"
    assert [text.get_text().partition(":")[0] for text in legend.get_texts()] == ["ideal", *names]


def test_the_command_takes_runs_beside_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(tmp_path / "table.csv", MICRO)
    command(
        monkeypatch, plot_scaling.main, DATA / "record_2ranks", tmp_path / "table.csv", "--output", tmp_path / "s.svg"
    )
    assert {path.suffix for path in tmp_path.glob("s.*")} == {".pdf", ".svg"}
    assert "micro" in (tmp_path / "s.svg").read_text()


def test_a_projections_figure_holds_measurements_line_and_band() -> None:
    series = series_of(scaling_table(read_table_runs(TINY)))
    (efficiency,) = draw_projection([series]).panels
    lines = {line.get_linestyle(): line.get_xydata() for line in efficiency.lines if len(line.get_xydata()) > 2}
    assert lines["None"][-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    assert (lines["-"][-1][0], lines["--"][0][0]) == (512, 512)  # extrapolation starts at the last measurement
    percents = [series.efficiency_percent(series.fit(series.select_law()).rate(nodes)) for nodes in (128, 512)]
    assert [lines["--"][0][1], lines["--"][-1][1]] == pytest.approx(percents)
    band = next(each for each in efficiency.collections if each.get_alpha()).get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (512, 2048)
    assert (band.y0, band.y1) == pytest.approx((series.bands([512])[512][0], series.bands([128])[128][1]))
