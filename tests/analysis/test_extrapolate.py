"""Output of projections, and that the results kept are those of their command."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.analysis import extrapolate
from clap_ds.analysis.extrapolate import ABOUT_BAND, render, summarize
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import USUAL, make_series
from clap_ds.utils.errors import UserError
from tests.analysis import samples

TINY = make_series(scaling_table(read_table_runs(samples.TINY)))


def test_headline_of_a_ring_all_reduce_lies_in_its_band_with_the_law() -> None:
    times = {
        nodes: 1 + 0.1 * (1 - 1 / nodes) + 0.0005 * nodes for nodes in (1, 2, 4, 8, 16, 32, 128)
    }
    rates = tuple((nodes, round(616 / time, 1)) for nodes, time in times.items() if nodes < 128)
    text = summarize(replace(TINY, rates=rates))
    percent, low, high = map(float, re.findall(r"\d+\.\d", text))
    assert low < percent < high
    assert low < 100 * times[1] / times[128] < high
    assert "efficiency on 512 GPUs (95% band " in text


def test_headline_of_two_scales_is_the_root_without_a_band_and_without_words_on_one() -> None:
    text = render(TINY.head(2))
    assert (
        f"{TINY.head(2).percent_by(USUAL, 8):.1f}% efficiency on 32 GPUs by {USUAL}, without a band"
        in text
    )
    assert "No hold-outs: they need three scales." in text
    assert ABOUT_BAND not in text
    assert ABOUT_BAND in render(TINY)


def test_mean_errors_are_those_of_the_hold_outs() -> None:
    text = render(TINY)
    rows = [
        line.split("|")
        for line in text.partition("### Hold-outs")[2].splitlines()
        if re.match(r"\| +\d", line)
    ]
    stated = re.search(
        r"points: projection (.*), a \+ b·log n (.*), a \+ b·√n (.*), a \+ b·n (\S*)\. The band",
        text,
    )
    assert stated
    means = [sum(abs(float(row[column])) for row in rows) / len(rows) for column in (5, 6, 7, 8)]
    assert [float(mean) for mean in stated.groups()] == pytest.approx(means, abs=0.01)


def test_headline_names_a_baseline_of_more_than_one_node() -> None:
    assert "GPUs relative to 2 nodes" in summarize(replace(TINY, rates=TINY.rates[1:]))


def test_a_series_without_a_projection_is_a_warning_and_an_incomplete_run_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "nodes,gpus,samples_per_s_per_gpu,model,state\n1,4,600,a,completed\n2,8,580,a,timeout\n"
    refused = "1,4,600,b,completed\n2,8,700,b,completed\n"
    samples.command(
        monkeypatch, extrapolate.main, samples.write(tmp_path / "t.csv", table + refused)
    )
    printed = capsys.readouterr()
    assert "Includes: timeout on 2 nodes, 8 GPUs." in printed.out
    assert re.fullmatch("warning: b.*above 100%.*; skipping it\n", printed.err)
    with pytest.raises(UserError, match="above 100%"):
        samples.command(
            monkeypatch,
            extrapolate.main,
            samples.write(tmp_path / "t.csv", table.partition("1")[0] + refused),
        )


@pytest.mark.parametrize(("last_rate", "covered"), [(500.0, 8), (540.0, 9), (620.0, 7)])
def test_scales_outside_their_band_on_either_side_are_counted(
    last_rate: float, covered: int
) -> None:
    series = replace(TINY, rates=(*TINY.rates[:-1], (128, last_rate)))
    assert f"The band covered {covered} of 9." in render(series)


def test_results_are_what_the_command_in_the_docs_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (samples.ROOT / "docs" / "benchmarking.md").read_text()
    (line,) = re.findall(
        r"^\$ clap-ds extrapolate (.*) > results/projection/published.md$", page, re.MULTILINE
    )
    words = line.replace("results/projection/", f"{tmp_path}/").split()
    words = [str(samples.ROOT / word) if word.startswith("analysis/") else word for word in words]
    samples.command(monkeypatch, extrapolate.main, *words)
    texts = (
        (samples.ROOT / "results" / "projection" / "published.md").read_text(),
        capsys.readouterr().out,
    )
    kept, made = (re.split(r"([+-]?\d+\.?\d*)", text) for text in texts)
    assert kept[::2] == made[::2]  # all words
    assert [float(number) for number in kept[1::2]] == pytest.approx(
        list(map(float, made[1::2])), abs=0.11, rel=1e-3
    )
    assert (tmp_path / "published.png").stat().st_size > 5000
    text = "".join(kept)
    assert text.count("The band covered 9 of 9") == 2
    bands = re.findall(r"on 2048 GPUs \(95% band (\S+)–(\S+)\)", text)
    claims = (samples.ROOT / "docs" / "faq.md").read_text()
    assert [f"{float(low):.0f} to {float(high):.0f}%" in claims for low, high in bands] == [
        True,
        True,
    ]
