"""What projections print, and that those published are what their command gives."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import project
from clap_ds.analysis.project import headline, render
from clap_ds.analysis.step_model import Machine, Method
from clap_ds.analysis.table import Row, write_csv
from clap_ds.analysis.weak_scaling import LAWS, read_series
from tests.analysis import samples

TINY = read_series(samples.TINY)


def cells(text: str, heading: str) -> list[list[str]]:
    """Of the table under a heading."""
    table = text[text.index(f"### {heading}") :].partition("\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_what_is_printed_is_what_was_fitted() -> None:
    """Every number of the tables from the model's own time of a step."""
    text, model, first = render(TINY), TINY.fit(), TINY.rates[0][1]
    (low, high), percent = TINY.bands([512])[512], 100 * 616 / first / model.step_s(512)
    assert f"**{percent:.1f} % efficiency on 2048 GPUs (95 % band {low:.1f}–{high:.1f}).**" in text
    rows, plain = cells(text, "Scaling"), [TINY.fit(law) for law in list(LAWS)[:3]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512"]
    for row in rows:
        nodes, rate = int(row[0]), dict(TINY.rates).get(int(row[0]))
        assert row[1] == str(4 * nodes)
        assert row[2:4] == ([f"{rate:.1f}", f"{100 * rate / first:.1f}"] if rate else ["–", "–"])
        assert row[5] == "{:.1f}–{:.1f}".format(*TINY.bands([nodes])[nodes])
        percents = [100 * 616 / first / each.step_s(nodes) for each in (model, *plain)]
        assert [float(row[4]), *map(float, row[6:])] == pytest.approx(percents, abs=0.051)
    assert cells(render(replace(TINY, errors=(0.01,) * 8)), "Scaling")[0][2] == "623.7 ± 6.2"
    for row, (small, nodes, actual) in zip(cells(text, "Hold-outs"), TINY.hold_outs(), strict=True):
        assert row[:3] == [str(small.rates[-1][0]), str(nodes), f"{actual:.1f}"]
        errors = [small.efficiency_percent(small.fit(law).rate(nodes)) - actual for law in LAWS]
        assert list(map(float, row[4:])) == pytest.approx(errors, abs=0.006)
    means = ", ".join(f"{law} {error:.2f}" for law, error in TINY.foretold_points().items())
    assert f"by which is projected: {means}. The band held 9 of 9." in text
    assert "The band held 7 of 9." in render(replace(TINY, rates=(*TINY.rates[:-1], (128, 350.0))))


def test_what_was_assumed_and_fitted_is_said() -> None:
    slow = replace(TINY, machine=Machine(node_bytes_per_s=5e9), method=Method(overlap=False))
    found = f"{1000 * slow.fit().compute_s:.1f} ms of compute and delays of scale {1000 * slow.fit().delay_s:.2f} ms"
    for part in (
        "5 GB/s into a node of 4 GPUs",
        "156.7 M gradients of 4 bytes, not overlapped",
        "768 × 2 bytes",
        found,
    ):
        assert part in render(slow)
    unbatched = render(replace(TINY, workload=replace(TINY.workload, batch_per_gpu=0)))
    assert "the step model left out" in unbatched
    assert "step model %" not in unbatched


def test_headlines_are_by_the_law_that_foretold_best() -> None:
    logarithmic = replace(TINY, rates=tuple((2**k, 616 / (1 + 0.02 * k)) for k in range(6)))
    assert headline(logarithmic).startswith(f"{100 / (1 + 0.02 * 7):.1f} % efficiency on 512 GPUs (95 % band ")
    assert headline(TINY.first(2)).endswith("32 GPUs, without a band, which needs three scales")
    assert "No hold-out: that needs three scales." in render(TINY.first(2))


def test_the_command_projects_each_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(tmp_path / "single.csv", [Row(1, 4, 10.0, 40.0, model="micro", batch_per_gpu=8)])
    options = ["--node_gbytes_per_s", 20, "--output", tmp_path / "p.svg"]
    samples.command(monkeypatch, project.main, samples.TINY, tmp_path / "single.csv", *options)
    printed = capsys.readouterr().out
    assert printed.count("## Projection of ") == 1
    assert "20 GB/s into a node" in printed
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_results_are_what_the_command_in_the_docs_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (samples.ROOT / "docs" / "numbers.md").read_text()
    (line,) = re.findall(r"^\$ python analysis/project.py (.*) > results/projection/published.md$", page, re.MULTILINE)
    words = line.replace("results/projection/", f"{tmp_path}/").split()
    words = [str(samples.ROOT / word) if word.startswith("analysis/") else word for word in words]
    samples.command(monkeypatch, project.main, *words)
    texts = (samples.ROOT / "results" / "projection" / "published.md").read_text(), capsys.readouterr().out
    kept, made = (re.split(r"([+-]?\d+\.?\d*)", text) for text in texts)
    assert kept[::2] == made[::2]  # all words
    assert [float(number) for number in kept[1::2]] == pytest.approx(list(map(float, made[1::2])), abs=0.11, rel=1e-3)
    assert (tmp_path / "published.png").stat().st_size > 5000
    claims = (samples.ROOT / "README.md").read_text().partition("## How far")[2].partition("![")[0]
    text = "".join(kept)
    means = [dict(re.findall(r"(step model|a \+ b\S+ ?n?) (\d\.\d\d)", line)) for line in text.splitlines()
             if line.startswith("Mean error")]  # fmt: skip
    laws = ("step model", "a + b·√n", "a + b·log n")
    assert re.findall(r"\d\.\d\d", claims) == [mean[law] for law in laws for mean in means]
    assert text.count("The band held 9 of 9") == claims.count("9 of 9 times each") * 2 == 2
    bands = re.findall(r"on 2048 GPUs \(95 % band (\S+)–(\S+)\)", text)
    assert [f"{float(low):.0f} to {float(high):.0f} %" in claims for low, high in bands] == [True, True]
