"""Charts show their records' numbers."""

import pytest
from charts import draw_flops, draw_gpu_step, draw_peers, draw_plan, list_bars
from redraw import ROOT

RESULTS = ROOT / "results"
PEERS = RESULTS / "cpu" / "peers"


def test_bars_are_ratios_of_the_faster_mode_with_hardware():
    figure = draw_peers([PEERS / "amx_padded.json"])
    (axes,) = figure.panels
    (bars,) = list_bars(axes)
    assert [round(width, 2) for width in bars.datavalues] == [1.71, 2.15, 2.22]
    interval = bars.errorbar.lines[2][0].get_segments()[0][:, 0]
    assert interval == pytest.approx([0.96, 1.83], abs=0.005)
    assert "Xeon" in figure.figure.get_suptitle()


def test_bars_of_flops_are_as_high_as_all_components():
    figure = draw_flops([RESULTS / "flops" / f"htsat_tiny_{tokens}.json" for tokens in (77, 514)])
    (axes,) = figure.panels
    tops = [bar.get_y() + bar.get_height() for bar in list_bars(axes)[-1]]
    assert tops == pytest.approx([27.44, 111.20], abs=0.01)


def test_parts_of_a_gpu_step_add_up_to_its_time():
    names = ("efficiencies.md", "step.md", "call1.tar.xz", "step.tar.xz")
    (axes,) = draw_gpu_step([RESULTS / "h200" / name for name in names]).panels
    parts = {bars.get_label(): bars.datavalues for bars in list_bars(axes)}
    assert sum(parts.values()) == pytest.approx([251.56, 193.30, 184.38], abs=0.01)
    assert parts["matrix products"][2] == pytest.approx(53.200 + 11.455 + 6.360 + 2.182)


def test_predictions_are_drawn_over_published_rates():
    (axes,) = draw_plan([RESULTS / "plan" / "validation.json"]).panels
    points = []
    for gpu in axes.containers:
        points += gpu.lines[0].get_xydata().round(1).tolist()
    assert [623.7, 771.5] in points
