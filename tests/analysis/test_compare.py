"""Comparisons with known answers."""

import math
import re

import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import interval, pairs, verdict
from clap_ds.analysis.table import Run, read_table_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import TINY, command, run


def compared(a: list[Run], b: list[Run]) -> str:
    (pair,) = pairs(a, b)
    return verdict(*pair)


def test_repeats_are_compared_by_what_they_differ_by() -> None:
    """By hand: deviations of logs 0.01 and 0.0182, pooled 0.0147; t for 4 degrees 4.604; 0.0147·4.604·√(2/3) = 0.0553."""
    a_runs, b_runs = ([run(1, rate) for rate in rates] for rates in ((99.0, 100.0, 101.0), (108.0, 110.0, 112.0)))
    ((a, b, spread),) = pairs(a_runs, b_runs)
    assert spread
    assert interval(a, b, spread) == pytest.approx((1.1 * math.exp(-0.056), 1.1 * math.exp(0.056)), rel=2e-3)
    assert verdict(a, b, spread).startswith("B / A = 1.100")
    assert re.search(r"differ by 1\.5%, 4 degrees.*: B is faster$", verdict(a, b, spread))
    assert compared(b_runs, a_runs).endswith("B is slower")
    ((a, b, spread),) = pairs(a_runs, b_runs[1:2])  # 2 degrees: t is 9.925
    assert spread
    half = 9.925 * 0.01 * (1 / 3 + 1) ** 0.5
    assert interval(a, b, spread) == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=2e-3)


def test_single_runs_are_not_told_apart() -> None:
    assert "1.5000: significance unknown" in compared([run(1, 10.0)], [run(1, 15.0)])


def test_rows_are_paired_by_scale_and_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = read_table_runs(TINY)
    assert [(a.gpus, b.gpus) for a, b, _ in pairs(tiny[:4], tiny[2:])] == [(16, 16), (32, 32)]
    sides = [[run(1, 9.0 + number, variant=name) for number, name in enumerate(names)] for names in ("pq", "qp")]
    assert [(a.variant, b.variant) for a, b, _ in pairs(*sides)] == [("p", "p"), ("q", "q")]
    with pytest.raises(UserError, match="no model and scale"):
        pairs(tiny[:2], tiny[2:])
    command(monkeypatch, compare_command.main, TINY, TINY)
    assert capsys.readouterr().out.count("B / A = 1.0000") == 8
