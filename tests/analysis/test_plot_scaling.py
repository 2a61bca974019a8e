"""Scaling figures show the table's data; pages contain figures."""

import struct
from typing import Any

import pytest

from clap_ds.analysis.figure import FigureBuilder, render_page
from clap_ds.analysis.plot_scaling import draw_projection, draw_scaling, read_curves, summarize
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Row, Run, group_by_series, read_table_runs, write_csv
from clap_ds.analysis.weak_scaling import make_series
from clap_ds.utils.errors import UserError
from tests.analysis.samples import BASE, TINY, make_options, run

MICRO = [
    Row(
        nodes,
        4 * nodes,
        rate,
        rate * 4 * nodes,
        samples_per_s_per_gpu_ci95=8.0,
        uncertainty_from="2σ of 3",
        repeats=3,
        model="micro",
        scaling="weak",
        state="completed",
    )
    for nodes, rate in ((1, 700.0), (2, 680.0), (4, 650.0))
]


def draw_runs(*runs: Run) -> FigureBuilder:
    return draw_scaling({rows[0].title: rows for rows in group_by_series(scaling_table(runs))})


def legend_labels(figure: FigureBuilder) -> list[str]:
    (legend,) = figure.figure.legends
    return [text.get_text().replace("\n", " ") for text in legend.get_texts()]


def curve_points(axes: Any) -> list[list[list[float]]]:
    """Return the points of each curve with error bars."""
    return [container.lines[0].get_xydata().tolist() for container in axes.containers]


def bar_ends(axes: Any) -> list[Any]:
    """Return the lower and upper ends of the error bars of the only curve."""
    (container,) = axes.containers
    return [(bar[0][1], bar[1][1]) for bar in container.lines[2][0].get_segments()]


def band_extents(axes: Any) -> Any:
    band = next(area for area in axes.collections if area.get_alpha())
    return band.get_paths()[0].get_extents()


def test_panels_have_the_numbers_of_the_table(tmp_path):
    failed = Row(8, 32, model="micro", scaling="weak", state="failed")
    write_csv(tmp_path / "t.csv", [*MICRO, failed])
    curves = read_curves(make_options(inputs=[tmp_path / "t.csv"]))
    # 100 · 650/700 · √((8/650)² + (8/700)²)
    error = 1.56
    summary = "92.9 ± 1.56% efficiency on 16 GPUs: 650.0 ± 8.0 samples/s/GPU"
    assert [summarize(rows) for rows in curves.values()] == [summary]
    figure = draw_scaling(curves)
    assert legend_labels(figure) == ["ideal (linear)", f"micro, {summary}"]
    efficiency, throughput = figure.panels
    assert curve_points(throughput) == [[[4, 2800], [8, 5440], [16, 10400]]]
    assert throughput.lines[-1].get_xydata().tolist() == [[0, 0], [16, 11200]]
    assert bar_ends(efficiency)[-1] == pytest.approx((92.86 - error, 92.86 + error), abs=0.01)


def test_published_tables_are_drawn_with_source_band_and_scales():
    figure = draw_runs(*read_table_runs(TINY), *read_table_runs(BASE))
    title = "LAION's published runs, GH200, amp_bf16, weak scaling, 4–512 GPUs"
    assert figure.figure.get_suptitle() == title
    efficiency, throughput = figure.panels
    assert sorted(efficiency.get_xticks()) == [2**power for power in range(2, 10)]
    # On the linear axis, only some labels fit.
    assert {4, 512} < set(throughput.get_xticks())
    band = band_extents(efficiency)
    bands = make_series(scaling_table(read_table_runs(TINY))).bands([1, 128])
    assert (band.x0, band.x1) == (4, 512)
    assert (band.y0, band.y1) == pytest.approx((bands[128][0], bands[1][1]))


def test_axis_names_all_units_and_starts_at_0_or_50_percent():
    on_cpu = run(1, 3.0, gpus=2, device="Intel(R) Xeon(R) Processor")
    slow = [run(nodes, 600.0 / nodes, device="NVIDIA H100") for nodes in (1, 4)]
    for runs, start, label in (([on_cpu, *slow], 0, "ranks or GPUs"), ([on_cpu], 50, "ranks")):
        efficiency, throughput = draw_runs(*runs).panels
        assert (efficiency.get_ylim()[0], efficiency.get_xlabel()) == (start, label)
        assert throughput.get_xlim()[0] == 0


def test_series_of_one_scale_has_a_rate_and_no_efficiency():
    efficiency, throughput = draw_runs(run(1, 300.0)).panels
    assert curve_points(throughput) == [[[4, 1200]]]
    assert [text.get_text() for text in efficiency.texts] == ["needs two scales"]


def test_legend_names_scales_that_did_not_complete_or_exceed_100_percent():
    figure = draw_runs(run(1, 600.0), run(2, 640.0), run(4, 500.0, state="timeout"))
    _, label = legend_labels(figure)
    assert "above 100% on 2 nodes, 8 GPUs" in label
    assert "timeout on 4 nodes, 16 GPUs" in label


def test_legend_has_only_the_differences_between_series():
    runs = [run(2**power, 600.0, variant="gradient_sync=deepspeed") for power in range(1, 10)]
    runs += [run(2**power, 600.0, variant="compile=off") for power in range(2, 10)]
    figure = draw_runs(*runs)
    title = "htsat-tiny-roberta-base, weak scaling, 8–2,048 GPUs"
    assert figure.figure.get_suptitle() == title
    labels = legend_labels(figure)
    names = ["ideal (linear)", "gradient_sync=deepspeed", "compile=off"]
    assert [label.partition(",")[0] for label in labels] == names
    assert ["relative to 2 nodes" in label for label in labels] == [False, True, False]


def test_projection_has_measurements_line_and_band():
    series = make_series(scaling_table(read_table_runs(TINY)))
    (axes,) = draw_projection([series]).panels
    labeled = {line.get_label().rpartition(", ")[2].partition(":")[0]: line for line in axes.lines}
    measured, fitted, projected = (labeled[name] for name in ("measured", "fitted", "projected"))
    assert measured.get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    # The extrapolation starts at the last measurement.
    assert fitted.get_xydata()[-1].tolist() == projected.get_xydata()[0].tolist()
    ends = series.percents([128, 512])
    assert projected.get_xydata()[[0, -1]].tolist() == [[512, ends[0]], [2048, ends[1]]]
    bands = series.bands([128, 512])
    extents = band_extents(axes)
    assert (extents.x0, extents.x1) == (512, 2048)
    assert (extents.y0, extents.y1) == pytest.approx((bands[512][0], bands[128][1]))


def test_page_embeds_figures_and_escapes_text(tmp_path):
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
