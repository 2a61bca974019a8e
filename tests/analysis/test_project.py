"""The projection command and its figure."""

import re
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.plot_projection import draw
from clap_ds.analysis.projection import Setting, fit_measured, read_measured
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.step_model import Machine, Method

TINY, BASE = (PUBLISHED_DIR / f"jupiter_htsat_{size}.csv" for size in ("tiny", "base"))


def test_command_prints_every_part_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    markdown, page = tmp_path / "p.md", tmp_path / "p.html"
    arguments = ["project.py", TINY, BASE, "--markdown", markdown, "--output", page]
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    project.main()
    printed = capsys.readouterr().out
    assert printed == markdown.read_text()
    headings = re.findall(r"^#+ (.*)$", printed, re.MULTILINE)
    assert headings[1:] == [
        "Fit", "Fitted on up to 16 nodes, tried on the rest",
        "Same model on htsat-base-roberta-base, GH200, amp_bf16, weak scaling",
        "Fitted on up to 16 nodes, tried on the rest", "Projection", "What if",
        "This project's loss and all-reduce",
    ]  # fmt: skip
    assert "nan" not in printed.lower()
    projection = printed[printed.index("### Projection") :]
    rows = dict(re.findall(r"\| +\d+ \| +(\d+) \| +([\d.]+) \|", projection))
    measured = read_measured(TINY)
    model = fit_measured(measured, Setting(Machine(), Method()))
    assert list(rows) == ["256", "512", "1024", "2048", "4096"]
    assert float(rows["4096"]) == pytest.approx(measured.efficiency_percent(model.rate(1024)), abs=0.05)
    assert page.read_text().count("<title>") > 30
    assert "http" not in re.sub(r'xmlns[^=]*="[^"]*"', "", page.read_text())


def test_figure_holds_the_measurements_and_the_band_reaches_the_largest_scale() -> None:
    measured = read_measured(TINY)
    figure, _ = draw([measured], Setting(Machine(), Method()), 16, 4096)
    efficiency, losses = figure.axes
    points = [line for line in efficiency.lines if line.get_linestyle() == "None" and line.get_alpha() is None]
    assert points[0].get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    (band,) = efficiency.collections
    assert band.get_paths()[0].get_extents().x1 == 4096
    assert {text.get_text() for text in losses.get_legend().get_texts()} == {
        "waiting for the slowest", "contrastive loss", "feature exchange", "gradient all-reduce",
    }  # fmt: skip


def test_too_few_scales_for_a_hold_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["project.py", str(TINY), "--fit_nodes", "1"])
    project.main()
    assert "No hold-out" in capsys.readouterr().out
