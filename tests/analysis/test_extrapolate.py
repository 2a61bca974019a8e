"""Output of projections, and that the results kept are those of their command."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import extrapolate
from clap_ds.analysis.extrapolate import headline, render
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import series_of
from tests.analysis import samples

TINY = series_of(scaling_table(read_table_runs(samples.TINY)))


def test_headlines_are_by_the_law_that_foretold_best() -> None:
    logarithmic = replace(TINY, rates=tuple((2**k, 616 / (1 + 0.02 * k)) for k in range(6)))
    assert headline(logarithmic).startswith(f"{100 / (1 + 0.02 * 7):.1f}% efficiency on 512 GPUs (95% band ")
    assert headline(TINY.first(2)).endswith("32 GPUs, without a band, which needs three scales")
    assert "No hold-outs: they need three scales." in render(TINY.first(2))
    assert "GPUs relative to 2 nodes" in headline(replace(TINY, rates=TINY.rates[1:]))
    assert "The band covered 8 of 9." in render(replace(TINY, rates=(*TINY.rates[:-1], (128, 400.0))))


def test_results_are_what_the_command_in_the_docs_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (samples.ROOT / "docs" / "benchmarking.md").read_text()
    (line,) = re.findall(r"^\$ clap-ds extrapolate (.*) > results/projection/published.md$", page, re.MULTILINE)
    words = line.replace("results/projection/", f"{tmp_path}/").split()
    words = [str(samples.ROOT / word) if word.startswith("analysis/") else word for word in words]
    samples.command(monkeypatch, extrapolate.main, *words)
    texts = (samples.ROOT / "results" / "projection" / "published.md").read_text(), capsys.readouterr().out
    kept, made = (re.split(r"([+-]?\d+\.?\d*)", text) for text in texts)
    assert kept[::2] == made[::2]  # all words
    assert [float(number) for number in kept[1::2]] == pytest.approx(list(map(float, made[1::2])), abs=0.11, rel=1e-3)
    assert (tmp_path / "published.png").stat().st_size > 5000
    text = "".join(kept)
    assert text.count("The band covered 9 of 9") == 2
    bands = re.findall(r"on 2048 GPUs \(95% band (\S+)–(\S+)\)", text)
    claims = (samples.ROOT / "docs" / "faq.md").read_text()
    assert [f"{float(low):.0f} to {float(high):.0f}%" in claims for low, high in bands] == [True, True]
