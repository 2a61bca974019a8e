"""What projections are made of, the projection command and its figure."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.plot_scaling import draw_projection
from clap_ds.analysis.project import answer, headline, method_of, render
from clap_ds.analysis.step_model import Machine, Method
from clap_ds.analysis.weak_scaling import LAWS, read_series
from clap_ds.config.errors import UserError
from clap_ds.config.settings import ClapSettings
from tests.analysis import samples

TINY = read_series(samples.TINY, Machine(), Method())
JAGGED = replace(TINY, rates=((1, 600.0), (2, 300.0), (4, 590.0), (8, 310.0)))


def cells(text: str, heading: str) -> list[list[str]]:
    """Of the table under a heading."""
    table = text[text.index(f"### {heading}") :].partition("\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


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
        others = [TINY.efficiency_percent(TINY.fit(law).rate(nodes)) for law in list(LAWS)[:3]]
        assert list(map(float, row[8:])) == pytest.approx(others, abs=0.051)
    assert cells(render(replace(TINY, errors=(0.01,) * 8)), "Scaling")[0][2] == "623.7 ± 6.2"
    for row, (small, nodes, actual) in zip(cells(text, "Hold-outs"), TINY.hold_outs(), strict=True):
        assert row[:3] == [str(small.rates[-1][0]), str(nodes), f"{actual:.1f}"]
        errors = [small.efficiency_percent(small.fit(law).rate(nodes)) - actual for law in LAWS]
        assert list(map(float, row[4:])) == pytest.approx(errors, abs=0.006)
    assert "The band held 9 of 9" in text  # of two scales there is none
    means = ", ".join(f"{law} {error:.2f}" for law, error in TINY.foretold_points().items())
    assert f"Mean error in points, whatever its sign: {means}." in text


def test_this_projects_loss_and_all_reduce_are_projected_beside() -> None:
    slow = replace(TINY, machine=Machine(node_bytes_per_s=5e9), method=Method(overlap=False))
    model, ours = slow.fit(), replace(slow.fit(), method=project.THIS_PROJECTS)
    assert ours.efficiency_percent(512) > model.efficiency_percent(512)
    told = [f"{100 * each.step_s(1) / each.step_s(512):.1f} % ({616 / each.step_s(512):.1f})" for each in (ours, model)]
    said = f"efficiency on 2048 GPUs of {told[0]} in place of {told[1]} (samples/s/GPU), each over its own on 1 node."
    assert said in render(slow)
    unbatched = render(replace(TINY, workload=replace(TINY.workload, batch_per_gpu=0)))
    assert "the step model left out" in unbatched
    assert "step model %" not in unbatched


def test_the_answer_names_the_law_that_foretold_best_its_error_and_its_band() -> None:
    low, high = TINY.bands([512])[512]
    percent = TINY.efficiency_percent(TINY.fit().rate(512))
    assert headline(TINY) == f"{percent:.1f} % efficiency on 2048 GPUs (95 % band {low:.1f}–{high:.1f})"
    errors = TINY.foretold_points()
    assert f"step model: it missed by {errors['step model']:.2f} points on average (a + b·√n" in answer(TINY)
    logarithmic = replace(TINY, rates=tuple((2**k, 616 / (1 + 0.02 * k)) for k in range(6)))
    assert "smaller ones, a + b·log n: it missed by 0.00 points on average (" in answer(logarithmic)
    assert headline(logarithmic).startswith(f"{100 / (1 + 0.02 * 7):.1f} % efficiency on 512 GPUs (95 % band ")
    assert answer(TINY.first(2)).endswith("32 GPUs, without a band, which needs three scales.")
    assert headline(JAGGED).startswith("nothing is projected: the best law")
    assert "Assumed" not in render(JAGGED)


def test_options_change_what_is_assumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--no_overlap --gradient_bytes 2 --loss exact_local --project_gpus 6 1024 --latency_us 5"
    machine = "--node_gbytes_per_s 20 --gpu_gbytes_per_s 100"
    samples.command(monkeypatch, project.main, samples.TINY, *arguments.split(), *machine.split())
    printed = capsys.readouterr().out
    for part in ("loss exact_local", "5 µs", "20 GB/s into a node, 100 GB/s", "of 2 bytes, not overlapped"):
        assert part in printed
    assert [row[1] for row in cells(printed, "Scaling")][-2:] == ["512", "1024"]  # 6 fill no whole node
    with pytest.raises(UserError, match="--project_gpus 7: none fills whole nodes of 4 GPUs"):
        samples.command(monkeypatch, project.main, samples.TINY, "--project_gpus", "7")


def test_method_follows_the_configuration() -> None:
    assert method_of({}).loss == "gather_with_grad"
    found = method_of({"bf16": {"enabled": True}, "clap": {"gradient_sync": "deepspeed", "gradient_bucket_mb": 5.0}})
    assert (found.overlap, found.gradient_bytes, found.feature_bytes) == (False, 2, 2)
    assert (found.loss, found.bucket_bytes) == ("exact_local", 5e6)
    assert method_of({"torch_autocast": {"enabled": True}}).feature_bytes == 2
    older = method_of({"clap": {"loss": {"features": "bf16"}}})
    assert (older.gradient_bytes, older.bucket_bytes) == (4, 1e6 * ClapSettings().gradient_bucket_mb)


def test_results_are_what_the_command_in_the_docs_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (samples.ROOT / "docs" / "numbers.md").read_text()
    (line,) = re.findall(r"^\$ python analysis/project.py (.*--markdown .*)$", page, re.MULTILINE)
    words = line.replace("results/projection/", f"{tmp_path}/").split()
    words = [str(samples.ROOT / word) if word.startswith("analysis/") else word for word in words]
    samples.command(monkeypatch, project.main, *words)
    assert capsys.readouterr().out == (tmp_path / "published.md").read_text()
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
    bands = re.findall(r"\| 2048 \|.*\| +(\S+)–(\S+) \|", text)
    assert [f"{float(low):.0f} to {float(high):.0f} %" in claims for low, high in bands] == [True, True]


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
    long = {line.get_linestyle(): line.get_xydata() for line in efficiency.lines if len(line.get_xydata()) > 2}
    assert (long["-"][-1][0], long["--"][0][0]) == (512, 512)  # measured ends where extrapolated begins
    percents = [series.efficiency_percent(series.fit(series.best_law()).rate(nodes)) for nodes in (128, 512)]
    assert [long["--"][0][1], long["--"][-1][1]] == pytest.approx(percents)
    assert [text.get_text() for text in efficiency.texts] == ["measured", "extrapolated"]
    assert any(list(line.get_xdata()) == [512, 512] for line in efficiency.lines)
    (jagged,) = draw_projection([JAGGED]).panels
    assert not jagged.collections[1:]
    assert not [line for line in jagged.lines if line.get_linestyle() == "--"]
