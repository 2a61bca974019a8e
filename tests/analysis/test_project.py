"""What projections are made of, the projection command and its figure."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.plot_scaling import draw_projection
from clap_ds.analysis.project import at_rate, engine_methods, what_ifs
from clap_ds.analysis.step_model import TERMS, Machine, Method, read_series
from clap_ds.config.errors import UserError
from clap_ds.config.settings import ClapSettings
from tests.analysis import samples

TINY = read_series(samples.TINY, Machine(), Method())


def test_what_ifs_go_the_way_physics_says() -> None:
    found = what_ifs(TINY.fit())
    rates = {name: model.rate(256) for name, model in found.items()}
    percents = {name: model.efficiency_percent(256) for name, model in found.items()}
    assert max(rates["without overlap of the all-reduce"], rates["links a quarter as fast"]) < rates["as fitted"]
    assert min(rates["exact local loss"], rates["compute twice as fast"]) > rates["as fitted"]
    assert percents["compute twice as fast"] < percents["as fitted"] < percents["a quarter of the delays"]
    assert found["links a quarter as fast"].rate(1) == found["as fitted"].rate(1)
    exposed = what_ifs(replace(TINY, method=Method(overlap=False)).fit())
    rates = {name: model.rate(256) for name, model in exposed.items()}
    assert min(rates["bf16 all-reduce"], rates["with overlap of the all-reduce"]) > rates["as fitted"]


@pytest.mark.parametrize("nodes", [128, 1024])
def test_exact_loss_and_overlap_each_help_and_both_help_most(nodes: int) -> None:
    model = TINY.fit()
    for step in (model, at_rate(model, 3300.0, 1, False), at_rate(model, 3300.0, 1, True)):
        rates = {name: replace(step, method=method).rate(nodes) for name, method in engine_methods().items()}
        assert rates["neither"] < min(rates["exact local loss"], rates["overlapped all-reduce"])
        assert rates["both"] > max(rates["exact local loss"], rates["overlapped all-reduce"])


def test_a_faster_step_has_the_rate_asked_for_and_scales_worse() -> None:
    model = TINY.fit()
    same, shrunk = (at_rate(model, 3300.0, 1, delays_shrink) for delays_shrink in (False, True))
    assert [same.rate(1), shrunk.rate(1)] == pytest.approx([3300, 3300])
    assert [same.delay_s, shrunk.delay_s] == pytest.approx([model.delay_s, model.delay_s * model.rate(1) / 3300])
    assert same.efficiency_percent(128) < shrunk.efficiency_percent(128) < model.efficiency_percent(128)
    with pytest.raises(UserError, match="alone take longer"):
        at_rate(model, 1e6, 1, False)


def test_command_prints_every_part_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    markdown, page = tmp_path / "p.md", tmp_path / "p.html"
    samples.command(monkeypatch, project.main, samples.TINY, samples.BASE, "--markdown", markdown, "--output", page)
    printed = capsys.readouterr().out
    assert printed == markdown.read_text()
    headings = re.findall(r"^#+ (.*)$", printed, re.MULTILINE)
    held_out, other = (
        "Fitted on up to 16 nodes, tried on the rest",
        "htsat-base-roberta-base, GH200, amp_bf16, weak scaling",
    )
    assert headings[1:4] == ["Fit", held_out, f"Same model on {other}"]
    assert headings[4:] == [held_out, "Projection", "What if", "This project's loss and all-reduce"]
    assert "nan" not in printed.lower()
    rows = dict(re.findall(r"\| +\d+ \| +(\d+) \| +([\d.]+) \|", printed[printed.index("### Projection") :]))
    assert list(rows) == ["256", "512", "1024", "2048", "4096"]
    assert float(rows["4096"]) == pytest.approx(TINY.efficiency_percent(TINY.fit().rate(1024)), abs=0.05)
    assert page.read_text().count("<title>") > 30
    assert "http" not in re.sub(r'xmlns[^=]*="[^"]*"', "", page.read_text())


def test_options_change_what_is_assumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--fit_nodes 1 --no_overlap --gradient_bytes 2 --loss exact_local --project_gpus 6 1024 --latency_us 5"
    machine = "--node_gbytes_per_s 20 --gpu_gbytes_per_s 100 --faster_rate 2000"
    samples.command(monkeypatch, project.main, samples.TINY, *arguments.split(), *machine.split())
    printed = capsys.readouterr().out
    for part in (f"buckets of {ClapSettings().gradient_bucket_mb:g} MB", "No hold-out", "loss exact_local", "5 µs",
                 "20 GB/s into a node, 100 GB/s", "of 2 bytes, not overlapped", "2000 samples/s/GPU, delays"):  # fmt: skip
        assert part in printed
    assert re.findall(r"(\d+) GPUs \|", printed) == ["1024", "1024"]  # 6 fill no whole node


def test_figure_holds_the_measurements_and_the_band_reaches_the_largest_scale() -> None:
    efficiency, losses = draw_projection([TINY]).panels
    points = next(line for line in efficiency.lines if line.get_linestyle() == "None" and line.get_alpha() is None)
    assert points.get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    assert efficiency.collections[0].get_paths()[0].get_extents().x1 == 4096
    assert losses.get_legend_handles_labels()[1] == list(TERMS[:0:-1])
