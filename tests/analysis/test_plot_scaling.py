"""Scaling figures show the table's data."""

from pathlib import Path

import pytest

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.plot_scaling import draw_projection, draw_scaling, read_curves, summarize
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Row, Run, Scale, group_by_series, read_table_runs, write_csv
from clap_ds.analysis.weak_scaling import make_series
from clap_ds.utils.errors import UserError
from tests.analysis.samples import BASE, DATA, TINY, command, given, run

MICRO = [
    Row(nodes, 4 * nodes, rate, rate * 4 * nodes, samples_per_s_per_gpu_ci95=8.0, uncertainty_from="2σ of 3", repeats=3,
        model="micro", scaling="weak", state="completed")
    for nodes, rate in ((1, 700.0), (2, 680.0), (4, 650.0))
]  # fmt: skip


def curves(*runs: Run) -> dict[str, list[Scale]]:
    return {rows[0].title: rows for rows in group_by_series(scaling_table(runs))}


def test_panels_hold_the_tables_numbers(tmp_path: Path) -> None:
    write_csv(
        tmp_path / "t.csv", [*MICRO, Row(8, 32, model="micro", scaling="weak", state="failed")]
    )
    found = read_curves(given(inputs=[tmp_path / "t.csv"]))
    picture = draw_scaling(found)
    efficiency, throughput = picture.panels
    error = 100 * 650 / 700 * ((8 / 650) ** 2 + (8 / 700) ** 2) ** 0.5
    assert [summarize(rows) for rows in found.values()] == [
        f"92.9 ± {error:.2f}% efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU"
    ]
    (drawn,) = [container.lines[0].get_xydata().tolist() for container in throughput.containers]
    assert drawn == [[4, 2800], [8, 5440], [16, 10400]]
    assert throughput.lines[-1].get_xydata().tolist() == [[0, 0], [16, 11200]]  # ideal
    spread = [bar[1][1] - bar[0][1] for bar in throughput.containers[0].lines[2][0].get_segments()]
    assert spread == pytest.approx([2 * 8 * gpus for gpus in (4, 8, 16)])
    bars = efficiency.containers[0].lines[2][0].get_segments()
    assert [(bar[0][1] + bar[1][1]) / 2 for bar in bars] == pytest.approx(
        [100.0, 97.14, 92.86], abs=0.01
    )
    assert bars[2][1][1] - bars[2][0][1] == pytest.approx(2 * error, abs=0.01)
    named = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert named == [
        "ideal (linear)",
        f"micro, 92.9 ± {error:.2f}% efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU",
    ]


def test_published_tables_are_drawn_with_source_band_and_measured_scales() -> None:
    picture = draw_scaling(curves(*read_table_runs(TINY), *read_table_runs(BASE)))
    efficiency, throughput = picture.panels
    assert (
        picture.figure.get_suptitle()
        == "LAION's published runs, GH200, amp_bf16, weak scaling, 4–512 GPUs"
    )
    counts = [2**power for power in range(2, 10)]
    assert sorted(efficiency.get_xticks()) == counts
    labeled = set(throughput.get_xticks())
    assert {4, 512} < labeled
    assert sorted(labeled | set(throughput.get_xticks(minor=True))) == counts
    band = efficiency.collections[0].get_paths()[0].get_extents()
    series = make_series(scaling_table(read_table_runs(TINY)))
    assert (band.x0, band.x1) == (4, 512)
    assert (band.y0, band.y1) == pytest.approx(
        (series.bands([128])[128][0], series.bands([1])[1][1])
    )


def test_an_axis_names_all_units_and_starts_at_0_or_50_percent() -> None:
    on_cpu = run(1, 3.0, gpus=2, device="Intel(R) Xeon(R) Processor")
    slow = [run(nodes, 600.0 / nodes, device="NVIDIA H100") for nodes in (1, 4)]
    (efficiency, throughput), (lone, _) = (
        draw_scaling(curves(on_cpu, *slow)).panels,
        draw_scaling(curves(on_cpu)).panels,
    )
    assert [efficiency.get_ylim()[0], lone.get_ylim()[0], throughput.get_xlim()[0]] == [0, 50, 0]
    assert [efficiency.get_xlabel(), lone.get_xlabel()] == ["ranks or GPUs", "ranks"]


def test_a_series_of_one_scale_has_a_rate_and_no_efficiency() -> None:
    pair = [run(nodes, 600.0, variant="pair") for nodes in (1, 2)]
    picture = draw_scaling(curves(run(1, 300.0, variant="lone"), *pair))
    efficiency, throughput = picture.panels
    assert [line.lines[0].get_xydata().tolist() for line in efficiency.containers] == [
        [],
        [[4, 100], [8, 100]],
    ]
    assert [line.lines[0].get_xydata().tolist() for line in throughput.containers] == [
        [[4, 1200]],
        [[4, 2400], [8, 4800]],
    ]
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert ["lone" in label for label in labels] == [False, True, False]
    lone, _ = draw_scaling(curves(run(1, 300.0))).panels
    assert [text.get_text() for text in lone.texts] == ["needs two scales"]


def test_a_legend_names_scales_that_did_not_complete_or_exceed_100_percent() -> None:
    runs = [run(1, 600.0), run(2, 640.0), run(4, 500.0, state="timeout")]
    (legend,) = draw_scaling(curves(*runs)).figure.legends
    (_, label) = (text.get_text().replace("\n", " ") for text in legend.get_texts())
    assert "above 100% on 2 nodes, 8 GPUs" in label
    assert "timeout on 4 nodes, 16 GPUs" in label


def test_rates_below_one_have_ticks_that_differ() -> None:
    _, throughput = draw_scaling(curves(run(1, 0.3, gpus=2), run(2, 0.25, gpus=4))).panels
    labels = throughput.yaxis.get_major_formatter().format_ticks(throughput.get_yticks())
    assert len({*labels}) == len(labels)


def test_picture_whose_path_is_a_folder_is_refused_and_missing_folders_are_made(
    tmp_path: Path,
) -> None:
    picture = draw_scaling(curves(run(1, 0.3, gpus=2)))
    with pytest.raises(UserError, match="folder"):
        picture.save(tmp_path)
    picture.save(tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").exists()


def test_an_ideal_is_the_smallest_scales_also_if_more_nodes_have_fewer_gpus() -> None:
    _, throughput = draw_scaling(curves(run(1, 600.0, gpus=8), run(2, 500.0, gpus=4))).panels
    assert throughput.containers[0].lines[0].get_xydata().tolist() == [[4, 2000], [8, 4800]]
    assert throughput.lines[-1].get_xydata().tolist() == [[0, 0], [8, 4800]]


def test_a_legend_has_what_distinguishes_series() -> None:
    names = ("gradient_sync=deepspeed", "compile=off")
    first_nodes = {"gradient_sync=deepspeed": 1, "compile=off": 2}
    runs = [
        run(2**place, 600.0, variant=name)
        for name in names
        for place in range(first_nodes[name], 10)
    ]
    picture = draw_scaling(curves(*runs))
    picture.figure.draw_without_rendering()
    (legend,) = picture.figure.legends
    assert picture.figure.get_suptitle() == "htsat-tiny-roberta-base, weak scaling, 8–2,048 GPUs"
    labels = [text.get_text() for text in legend.get_texts()]
    assert [label.partition(",")[0] for label in labels] == ["ideal (linear)", *names]
    assert ["relative to 2 nodes" in label for label in labels] == [False, True, False]


def test_the_command_takes_runs_beside_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(tmp_path / "table.csv", MICRO)
    command(
        monkeypatch,
        plot_scaling.main,
        DATA / "record_2ranks",
        tmp_path / "table.csv",
        "--output",
        tmp_path / "s.svg",
    )
    assert {path.suffix for path in tmp_path.glob("s.*")} == {".pdf", ".svg"}
    assert "micro" in (tmp_path / "s.svg").read_text()


def test_a_projections_figure_holds_measurements_line_and_band() -> None:
    series = make_series(scaling_table(read_table_runs(TINY)))
    (efficiency,) = draw_projection([series]).panels
    lines = {
        line.get_linestyle(): line.get_xydata()
        for line in efficiency.lines
        if len(line.get_xydata()) > 2
    }
    assert lines["None"][-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    assert all(
        line.get_markerfacecolor() == "none"
        for line in efficiency.lines
        if line.get_marker() == "o"
    )
    labels = [line.get_label() for line in efficiency.lines if not line.get_label().startswith("_")]
    assert [label.rpartition(", ")[2].partition(" ")[0] for label in labels] == [
        "ideal",
        "measured",
        "fitted",
        "projected:",
    ]
    assert (lines["-"][-1][0], lines["--"][0][0]) == (
        512,
        512,
    )  # extrapolation starts at the last measurement
    assert [lines["--"][0][1], lines["--"][-1][1]] == pytest.approx(series.percents([128, 512]))
    band = (
        next(each for each in efficiency.collections if each.get_alpha())
        .get_paths()[0]
        .get_extents()
    )
    assert (band.x0, band.x1) == (512, 2048)
    assert (band.y0, band.y1) == pytest.approx(
        (series.bands([512])[512][0], series.bands([128])[128][1])
    )


def test_a_projection_without_a_band_names_none_and_a_baseline_of_two_nodes() -> None:
    pair = make_series(scaling_table(read_table_runs(TINY)[1:3]))
    picture = draw_projection([pair])
    picture.figure.draw_without_rendering()
    texts = [text.get_text() for legend in picture.figure.legends for text in legend.get_texts()]
    titles = [legend.get_title().get_text() for legend in picture.figure.legends]
    assert "relative to 2 nodes" in " ".join(texts).replace("\n", " ")
    assert "band" not in " ".join(titles)


def test_the_seventh_series_has_other_markers_than_the_first() -> None:
    runs = [run(nodes, 600.0, variant=f"v{number}") for number in range(7) for nodes in (1, 2)]
    lines = [container.lines[0] for container in draw_scaling(curves(*runs)).panels[0].containers]
    assert lines[0].get_color() == lines[6].get_color()
    assert lines[0].get_markerfacecolor() != lines[6].get_markerfacecolor()
