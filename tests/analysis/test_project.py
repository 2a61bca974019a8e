"""What projections are made of, the projection command and its figure."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.plot_scaling import draw_projection
from clap_ds.analysis.project import at_rate, engine_methods, render, what_ifs
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
    held_out = "Hold-outs: each scale from all smaller ones, and from up to 16 nodes"
    other = "htsat-base-roberta-base, GH200, amp_bf16, weak scaling"
    assert headings[1:4] == ["Fit", held_out, f"Same model on {other}"]
    calculated = [f"{what} (calculated, not measured)" for what in ("What if", "This project's loss and all-reduce")]
    assert headings[4:] == [held_out, "Projection", *calculated]
    assert "nan" not in printed.lower()
    found = re.findall(r"\| +\d+ \| +(\d+) \| +(\S+) \| +([\d.]+) \|", printed[printed.index("### Projection") :])
    assert [(gpus, known) for gpus, known, _ in found[:3]] == [("256", "91.9"), ("512", "87.3"), ("1024", "–")]
    rows = {gpus: projected for gpus, _, projected in found}
    assert list(rows) == ["256", "512", "1024", "2048", "4096"]
    assert float(rows["4096"]) == pytest.approx(TINY.efficiency_percent(TINY.fit().rate(1024)), abs=0.05)
    assert page.read_text().count("<title>") > 30
    assert "http" not in re.sub(r'xmlns[^=]*="[^"]*"', "", page.read_text())


def test_options_change_what_is_assumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--fit_nodes 16 --no_overlap --gradient_bytes 2 --loss exact_local --project_gpus 6 1024 --latency_us 5"
    machine = "--node_gbytes_per_s 20 --gpu_gbytes_per_s 100 --faster_rate 2000"
    samples.command(monkeypatch, project.main, samples.TINY, *arguments.split(), *machine.split())
    printed = capsys.readouterr().out
    for part in (f"buckets of {ClapSettings().gradient_bucket_mb:g} MB", "up to 16 nodes", "loss exact_local", "5 µs",
                 "20 GB/s into a node, 100 GB/s", "of 2 bytes, not overlapped", "2000 samples/s/GPU, delays"):  # fmt: skip
        assert part in printed
    assert re.findall(r"(\d+) GPUs \|", printed) == ["1024", "1024"]  # 6 fill no whole node
    with pytest.raises(UserError, match="--project_gpus 7: none fills whole nodes of 4 GPUs"):
        samples.command(monkeypatch, project.main, samples.TINY, "--project_gpus", "7")


def test_every_scale_is_predicted_from_smaller_ones_alone_beside_simple_fits() -> None:
    text = render(TINY)
    table = text[text.index("### Hold-outs") : text.index("### Projection")]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if re.match(r"\| +\d", line)
    ]
    scales = [(row[0], row[1]) for row in rows]
    assert scales == [
        ("2", "4"),
        ("4", "8"),
        ("8", "16"),
        ("16", "32"),
        ("32", "64"),
        ("64", "128"),
        ("16", "64"),
        ("16", "128"),
    ]
    for largest, nodes, measured, predicted, _, error, _, root, _ in rows:
        small = TINY.up_to(int(largest))
        actual = TINY.efficiency_percent(dict(TINY.rates)[int(nodes)])
        assert (float(measured), float(predicted)) == pytest.approx(
            (actual, small.efficiency_percent(small.fit().rate(int(nodes)))), abs=0.05
        )
        assert float(error) == pytest.approx(float(predicted) - float(measured), abs=0.11)
        if largest == "2":  # a + b·√n through two points, by hand
            a, b = (1 / rate for _, rate in small.rates)
            step = a + (b - a) * (4**0.5 - 1) / (2**0.5 - 1)
            assert float(root) == pytest.approx(100 * a / step - actual, abs=0.006)
    assert "The band held 7 of 7" in table  # of two scales there is none
    assert "Mean absolute (and signed) error" in table


def test_a_table_that_scales_poorly_is_projected_and_what_cannot_be_is_named_in_its_place() -> None:
    poor = replace(
        TINY, workload=replace(TINY.workload, batch_per_gpu=64), rates=((1, 600.0), (2, 480.0), (4, 400.0), (8, 330.0))
    )
    text = render(poor)
    (row,) = [line for line in text.splitlines() if "can't be" in line]
    assert "3000 samples/s/GPU, delays unchanged" in row
    assert "communication and delays alone take longer" in row
    assert "3000 samples/s/GPU, delays in proportion" in text
    assert "1 nodes" not in text


def test_a_breakdown_that_names_another_cause_than_the_fit_is_said() -> None:
    said = "Breakdown and fit disagree about the cause"
    assert said not in render(TINY)
    grown = TINY.fit().terms_s(16)["gradient all-reduce"] - TINY.fit().terms_s(1)["gradient all-reduce"]
    assert said not in render(replace(TINY, exposed=((1, 0.004), (16, 0.004 + grown))))
    text = render(replace(TINY, exposed=((1, 0.004), (16, 0.032))))
    assert f"**{said}.** From 1 node to 16 nodes exposed communication grew by +28.0 ms" in text
    assert f"the fit's gradient all-reduce by {1000 * grown:+.1f} ms" in text


def test_results_are_what_the_command_in_the_docs_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (samples.ROOT / "docs" / "numbers.md").read_text()
    (line,) = re.findall(r"^\$ python analysis/project.py (.*--markdown .*)$", page, re.MULTILINE)
    words = line.replace("results/projection/", f"{tmp_path}/").split()
    words = [str(samples.ROOT / word) if word.startswith("analysis/") else word for word in words]
    samples.command(monkeypatch, project.main, *words)
    kept, made = (
        re.split(r"([+-]?\d+\.?\d*)", (folder / "published.md").read_text())
        for folder in (samples.ROOT / "results" / "projection", tmp_path)
    )
    assert kept[::2] == made[::2]  # all words
    assert [float(number) for number in kept[1::2]] == pytest.approx(list(map(float, made[1::2])), abs=0.11, rel=1e-3)
    assert (tmp_path / "published.png").stat().st_size > 5000
    readme = (samples.ROOT / "README.md").read_text()
    claims = readme[readme.index("## How far") :].partition("![")[0]
    text = "".join(kept)
    means = re.findall(r"model (\S+) .*?log n (\S+) .*?√n (\S+) ", text)
    assert [tuple(pair) for pair in re.findall(r"(\d\.\d\d).*?(\d\.\d\d)", claims, re.DOTALL)] == [
        (means[0][place], means[1][place]) for place in (0, 2, 1)
    ]
    assert text.count("The band held 7 of 7") == claims.count("7 of 7 times each") * 2 == 2
    low, high = re.search(r"\| 4096 \| +– \| +\S+ \| (\S+)–(\S+) \|", text).groups()  # type: ignore[union-attr]
    assert f"{float(high) - float(low):.0f} points wide" in claims


def test_figure_holds_the_measurements_and_the_band_reaches_the_largest_scale() -> None:
    efficiency, losses = draw_projection([TINY]).panels
    points = next(line for line in efficiency.lines if line.get_linestyle() == "None" and line.get_alpha() is None)
    assert points.get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    band = efficiency.collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (512, 4096)
    solid = [
        line.get_xydata()[:, 0]
        for line in efficiency.lines
        if line.get_linestyle() == "-" and len(line.get_xydata()) > 1
    ]
    dashed = [
        line.get_xydata()[:, 0] for line in efficiency.lines if line.get_linestyle() == "--" and len(line.get_xydata())
    ]
    assert (max(map(max, solid)), min(map(min, dashed))) == (512, 512)  # what is measured ends where it is extrapolated
    assert [text.get_text().replace("-\n", "-").replace("\n", " ") for text in losses.texts] == sorted(
        TERMS[1:], key=lambda term: TINY.fit().terms_s(1024)[term]
    )
    assert (efficiency.get_ylim()[0], losses.get_ylim()[0]) == (0, 0)
