"""Output of projections, and of the command that made the committed one."""

import re

import pytest

from clap_ds.analysis import extrapolate
from clap_ds.analysis.extrapolate import ABOUT_BAND, render
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import DEFAULT_FIT, make_series
from clap_ds.utils.errors import UserError
from tests.analysis import samples

TINY = make_series(scaling_table(read_table_runs(samples.TINY)))


def test_two_scales_are_projected_by_the_root_without_a_band():
    pair = TINY.head(2)
    text = render(pair)
    percent = pair.percent_by(DEFAULT_FIT, 8)
    assert f"{percent:.1f}% efficiency on 32 GPUs by {DEFAULT_FIT}, without a band" in text
    assert "No hold-outs: they need three scales." in text
    assert ABOUT_BAND not in text
    assert ABOUT_BAND in render(TINY)


def test_series_without_a_projection_is_a_warning_and_alone_an_error(tmp_path, capsys):
    header = "nodes,gpus,samples_per_s_per_gpu,model,state\n"
    projected = "1,4,600,a,completed\n2,8,580,a,timeout\n"
    doubtful = "1,4,600,b,completed\n2,8,700,b,completed\n"
    table = samples.write(tmp_path / "t.csv", header + projected + doubtful)
    samples.run_main(extrapolate.main, table)
    printed = capsys.readouterr()
    assert "Includes: timeout on 2 nodes, 8 GPUs." in printed.out
    assert re.fullmatch("warning: b.*above 100%.*; skipping it\n", printed.err)
    table = samples.write(tmp_path / "t.csv", header + doubtful)
    with pytest.raises(UserError, match="above 100%"):
        samples.run_main(extrapolate.main, table)


def test_committed_projection_is_that_of_the_command_in_the_docs(monkeypatch, tmp_path, capsys):
    page = (samples.ROOT / "docs" / "benchmarking.md").read_text()
    pattern = r"^\$ clap-ds extrapolate (.*) > results/projection/published.md$"
    (line,) = re.findall(pattern, page, re.MULTILINE)
    arguments = line.replace("results/projection/", f"{tmp_path}/").split()
    monkeypatch.chdir(samples.ROOT)
    samples.run_main(extrapolate.main, *arguments)
    assert (tmp_path / "published.png").stat().st_size > 5000
    committed = (samples.ROOT / "results" / "projection" / "published.md").read_text()
    number = r"([+-]?\d+\.?\d*)"
    parts = re.split(number, committed)
    printed_parts = re.split(number, capsys.readouterr().out)
    # All words, and all numbers up to their last digit.
    assert parts[::2] == printed_parts[::2]
    numbers = [float(part) for part in printed_parts[1::2]]
    assert [float(part) for part in parts[1::2]] == pytest.approx(numbers, abs=0.11, rel=1e-3)
    assert committed.count("The band covered 9 of 9") == 2
    claims = (samples.ROOT / "docs" / "faq.md").read_text()
    bands = re.findall(r"on 2048 GPUs \(95% band (\S+)–(\S+)\)", committed)
    assert len(bands) == 2
    for low, high in bands:
        assert f"{float(low):.0f} to {float(high):.0f}%" in claims
