"""Scaling figures show the table's data."""

from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.plot_scaling import answer, draw, draw_projection, read_curves
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Row, Run, Scale, by_series, read_table_runs, write_csv
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


def test_a_baseline_of_several_nodes_is_stated() -> None:
    picture = draw(curves(run(2, 200.0), run(4, 180.0)))
    assert ["relative to 2 nodes" in panel.get_ylabel() for panel in picture.panels] == [True, True]


@pytest.mark.parametrize("scales", [1, 10])
def test_no_texts_of_a_picture_overlap(scales: int) -> None:
    names = ("gradient_sync=deepspeed, a rather long name=of a setting", "compile=step", "compile=off")
    runs = [
        run(2**place, 600 * rate**place, variant=name, device="H100", precision="bf16")
        for name, rate in zip(names, (0.95, 0.96, 0.97), strict=True) for place in range(scales)
    ]  # fmt: skip
    picture = draw(curves(*runs))
    picture.figure.draw_without_rendering()
    (legend,) = picture.figure.legends
    assert legend.get_title().get_text() == "htsat-tiny-roberta-base, H100, bf16, weak scaling"
    for panel in picture.panels:
        left, right = panel.get_xlim()
        ticks = [tick for tick in panel.get_xticklabels() if left <= tick.get_position()[0] <= right]
        texts = [*(ticks if panel is picture.panels[-1] else ()), panel.xaxis.label, *legend.get_texts()]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at])
        assert all(
            picture.figure.bbox.padded(1).fully_contains(*corner) for box in boxes for corner in box.get_points()
        )
        assert ticks[0].get_text() == "4"


def test_the_command_takes_runs_beside_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, empty = (tmp_path / f"{name}.csv" for name in ("table", "empty"))
    write_csv(table, MICRO)
    write_csv(empty, [Row(1, 4, model="micro", state="failed")])
    with pytest.raises(UserError, match="no row has a rate"):
        read_curves(given(inputs=[empty]))
    command(monkeypatch, plot_scaling.main, DATA / "record_2ranks", table, "--output", tmp_path / "s.svg")
    assert {path.suffix for path in tmp_path.glob("s.*")} == {".pdf", ".svg"}
    assert "micro" in (tmp_path / "s.svg").read_text()


def test_a_projections_figure_holds_measurements_line_and_band() -> None:
    series = series_of(scaling_table(read_table_runs(TINY)))
    picture = draw_projection([series])
    (efficiency,) = picture.panels
    (points,) = (line for line in efficiency.lines if line.get_linestyle() == "None")
    assert points.get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    band = next(each for each in efficiency.collections if each.get_alpha()).get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (512, 2048)
    assert (band.y0, band.y1) == pytest.approx((series.bands([512])[512][0], series.bands([128])[128][1]))
    long = {line.get_linestyle(): line.get_xydata() for line in efficiency.lines if len(line.get_xydata()) > 2}
    assert (long["-"][-1][0], long["--"][0][0]) == (512, 512)  # extrapolation starts at the last measurement
    bottom, top = efficiency.get_ylim()
    assert bottom < 77 < 100 < top
    assert 100 in [line.get_ydata()[0] for line in efficiency.lines if line.get_label() == "ideal"]
    percents = [series.efficiency_percent(series.fit(series.select_law()).rate(nodes)) for nodes in (128, 512)]
    assert [long["--"][0][1], long["--"][-1][1]] == pytest.approx(percents)
