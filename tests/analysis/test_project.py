"""What projections are made of, the projection command and its figure."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.plot_scaling import draw_projection
from clap_ds.analysis.project import answer, headline, render
from clap_ds.analysis.step_model import ALL_LAWS, Machine, Method, read_series
from clap_ds.config.errors import UserError
from tests.analysis import samples

TINY = read_series(samples.TINY, Machine(), Method())


def cells(text: str, heading: str) -> list[list[str]]:
    """Of the table under a heading."""
    table = text[text.index(f"### {heading}") :].partition("\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_command_answers_for_each_table_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    markdown, page = tmp_path / "p.md", tmp_path / "p.svg"
    samples.command(monkeypatch, project.main, samples.TINY, samples.BASE, "--markdown", markdown, "--output", page)
    printed = capsys.readouterr().out
    assert printed == markdown.read_text()
    headings = re.findall(r"^#+ (.*)$", printed, re.MULTILINE)
    held_out = "Hold-outs: each scale from those up to the one before, and up to the one before that"
    parts = ["Scaling", held_out]
    titles = [f"Projection of htsat-{size}-roberta-base, GH200, amp_bf16, weak scaling" for size in ("tiny", "base")]
    assert headings == [titles[0], *parts, titles[1], *parts]
    assert "nan" not in printed.lower()
    assert page.read_text().startswith("<svg")


def test_what_is_printed_is_what_was_fitted() -> None:
    """Every number of the tables from the model's own time of a step."""
    text, model, first = render(TINY), TINY.fit(), TINY.rates[0][1]
    assert TINY.best_law() == "step model"
    rows = cells(text, "Scaling")
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512"]
    for row in rows:
        nodes, gpus = int(row[0]), int(row[1])
        percent = 100 * 616 / first / model.step_s(nodes)
        assert gpus == 4 * nodes
        assert float(row[4]) == pytest.approx(percent, abs=0.051)
        if rate := dict(TINY.rates).get(nodes):
            assert (float(row[2]), float(row[3])) == pytest.approx((rate, 100 * rate / first), abs=0.051)
            assert float(row[5]) == pytest.approx(percent - 100 * rate / first, abs=0.006)
        else:
            assert [row[2], row[3], row[5]] == ["–"] * 3
        assert row[6] == "{:.1f}–{:.1f}".format(*TINY.bands([nodes])[nodes])
        assert float(row[7]) == pytest.approx(gpus * 616 / model.step_s(nodes), abs=0.6)
        others = [TINY.efficiency_percent(TINY.fit(law).rate(nodes)) for law in ALL_LAWS[:3]]
        assert list(map(float, row[8:])) == pytest.approx(others, abs=0.051)
    noisy = cells(render(replace(TINY, errors=(0.01,) * 8)), "Scaling")
    assert noisy[0][2] == "623.7 ± 6.2"


def test_this_projects_loss_and_all_reduce_are_projected_beside() -> None:
    slow = replace(TINY, machine=Machine(node_bytes_per_s=5e9), method=Method(overlap=False))
    model, ours = slow.fit(), replace(slow.fit(), method=project.THIS_PROJECTS)
    assert ours.efficiency_percent(512) > model.efficiency_percent(512)
    told = [f"{100 * each.step_s(1) / each.step_s(512):.1f} % ({616 / each.step_s(512):.1f})" for each in (ours, model)]
    assert (
        f"efficiency on 2048 GPUs of {told[0]} in place of {told[1]} (samples/s/GPU), each over its own on 1 node."
        in render(slow)
    )


def test_the_answer_names_the_law_that_foretold_best_its_error_and_its_band() -> None:
    low, high = TINY.bands([512])[512]
    percent = TINY.efficiency_percent(TINY.fit().rate(512))
    assert headline(TINY) == f"{percent:.1f} % efficiency on 2048 GPUs (95 % band {low:.1f}–{high:.1f})"
    errors = TINY.foretold_points()
    assert f"step model: it missed by {errors['step model']:.2f} points on average (a + b·√n" in answer(TINY)
    logarithmic = replace(TINY, rates=tuple((2**k, 616 / (1 + 0.02 * k)) for k in range(6)))
    assert "smaller ones, a + b·log n: it missed by 0.00 points on average (" in answer(logarithmic)
    assert headline(logarithmic).startswith(f"{100 / (1 + 0.02 * 7):.1f} % efficiency on 512 GPUs (95 % band ")
    (efficiency,) = draw_projection([logarithmic], headline(logarithmic)).panels  # title and line are of one law
    (dashed,) = (line for line in efficiency.lines if line.get_linestyle() == "--" and len(line.get_xdata()) > 2)
    assert dashed.get_xydata()[-1].tolist() == pytest.approx([512, 100 / (1 + 0.02 * 7)])
    assert answer(TINY.first(2)).endswith("8 GPUs, without a band, which needs three scales.".replace("8", "32"))


def test_what_cannot_be_believed_is_said_and_not_projected() -> None:
    jagged = replace(TINY, rates=((1, 600.0), (2, 300.0), (4, 590.0), (8, 310.0)))
    text = render(jagged)
    assert "**Nothing is projected: the best law".lower() in text.lower()
    assert [row[0] for row in cells(text, "Scaling")] == ["1", "2", "4", "8"]
    assert "Assumed" not in text
    (efficiency,) = draw_projection([jagged], headline(jagged)).panels
    assert not efficiency.collections[1:]
    assert not [line for line in efficiency.lines if line.get_linestyle() == "--"]


def test_options_change_what_is_assumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--no_overlap --gradient_bytes 2 --loss exact_local --project_gpus 6 1024 --latency_us 5"
    machine = "--node_gbytes_per_s 20 --gpu_gbytes_per_s 100"
    samples.command(monkeypatch, project.main, samples.TINY, *arguments.split(), *machine.split())
    printed = capsys.readouterr().out
    for part in ("loss exact_local", "5 µs",
                 "20 GB/s into a node, 100 GB/s", "of 2 bytes, not overlapped"):  # fmt: skip
        assert part in printed
    assert [row[1] for row in cells(printed, "Scaling")][-2:] == ["512", "1024"]  # 6 fill no whole node
    with pytest.raises(UserError, match="--project_gpus 7: none fills whole nodes of 4 GPUs"):
        samples.command(monkeypatch, project.main, samples.TINY, "--project_gpus", "7")


def test_every_scale_is_predicted_from_smaller_ones_alone_by_every_law() -> None:
    text, printed = render(TINY), cells(render(TINY), "Hold-outs")
    for row, (small, nodes, actual) in zip(printed, TINY.hold_outs(), strict=True):
        assert row[:3] == [str(small.rates[-1][0]), str(nodes), f"{actual:.1f}"]
        errors = [small.efficiency_percent(small.fit(law).rate(nodes)) - actual for law in ALL_LAWS]
        assert list(map(float, row[4:])) == pytest.approx(errors, abs=0.006)
    assert "The band held 9 of 9" in text  # of two scales there is none
    means = ", ".join(f"{law} {error:.2f}" for law, error in TINY.foretold_points().items())
    assert f"Mean error in points, whatever its sign: {means}." in text


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
    means = [
        dict(re.findall(r"(step model|a \+ b\S+ ?n?) (\d\.\d\d)", line))
        for line in re.findall(r"^Mean error.*", text, re.M)
    ]
    assert re.findall(r"\d\.\d\d", claims) == [means[0]["step model"], means[1]["step model"], *(
        mean[law] for law in ("a + b·√n", "a + b·log n") for mean in means
    )]  # fmt: skip
    assert text.count("The band held 9 of 9") == claims.count("9 of 9 times each") * 2 == 2
    for low, high in re.findall(r"\| 2048 \|.*\| (\S+)–(\S+) \|", text):
        assert f"{float(low):.0f} to {float(high):.0f} %" in claims


def test_figure_holds_the_measurements_and_the_band_reaches_four_times_as_far() -> None:
    series = replace(TINY, errors=tuple(0.001 * nodes for nodes, _ in TINY.rates))
    picture = draw_projection([series], "The answer")
    (efficiency,) = picture.panels
    assert picture.figure.get_suptitle() == "The answer"
    (points,) = efficiency.containers
    assert points.lines[0].get_xydata()[-1].tolist() == pytest.approx([512, 87.3], abs=0.05)
    (low, high) = points.lines[2][0].get_segments()[-1]
    assert high[1] - low[1] == pytest.approx(2 * 0.128 * 87.3, abs=0.05)
    band = next(each for each in efficiency.collections if each.get_alpha()).get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (512, 2048)
    lines = {
        style: [
            line.get_xydata()[:, 0]
            for line in efficiency.lines
            if line.get_linestyle() == style and len(line.get_xydata()) > 2
        ]
        for style in ("-", "--")
    }
    assert (max(map(max, lines["-"])), min(map(min, lines["--"]))) == (
        512,
        512,
    )  # measured ends where extrapolated begins
    assert [text.get_text().strip() for text in efficiency.texts] == ["measured", "extrapolated"]
    assert any(list(line.get_xdata()) == [512, 512] for line in efficiency.lines)
