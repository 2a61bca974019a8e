"""Comparisons with known answers."""

import math
import random
import re

import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import interval, pairs, verdict
from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.table import Run
from clap_ds.config.errors import UserError
from tests.analysis.samples import TINY, command, run

A, B = ([run(1, rate) for rate in rates] for rates in ((99.0, 100.0, 101.0), (108.0, 110.0, 112.0)))


def measured(generator: random.Random, offset: float, speed: float = 1.0) -> list[Run]:
    """Three runs on a machine whose runs differ by this standard deviation."""
    return [run(1, 100 * speed * math.exp(offset * generator.gauss(0, 1))) for _ in range(3)]


def compared(a: list[Run], b: list[Run]) -> str:
    (pair,) = pairs(a, b)
    return verdict(*pair)


def test_runs_of_one_configuration_get_a_verdict_in_one_of_fifty_comparisons_at_most() -> None:
    generator = random.Random(1)
    sides = [[measured(generator, (0.005, 0.02, 0.1)[trial % 3]) for _ in "AB"] for trial in range(300)]
    assert sum(not compared(*each).endswith("not told apart") for each in sides) <= 6


@pytest.mark.parametrize(("speed", "found"), [(1.1, "B is faster"), (0.9, "B is slower")])
def test_a_real_difference_is_told(speed: float, found: str) -> None:
    generator = random.Random(0)
    verdicts = [compared(measured(generator, 0.01), measured(generator, 0.01, speed)) for _ in range(20)]
    assert sum(each.endswith(found) for each in verdicts) >= 17
    assert all(each.endswith((found, "not told apart")) for each in verdicts)


def test_repeats_are_compared_by_what_they_differ_by() -> None:
    """By hand: deviations of logs 0.01 and 0.0182, pooled 0.0147; t of 4 degrees 4.604; 0.0147·4.604·√(2/3) = 0.0553."""
    ((a, b, spread),) = pairs(A, B)
    assert spread
    assert interval(a, b, spread) == pytest.approx((1.1 * math.exp(-0.056), 1.1 * math.exp(0.056)), rel=2e-3)
    differ = r"runs of one scale differ by 1.5 %, 4 degrees of freedom\): B is faster$"
    assert re.match(
        rf"B / A = 1.100\d \(1.04.*–1.16.*, 99 % interval, of 3 and 3 runs; {differ}", verdict(a, b, spread)
    )
    ((a, b, spread),) = pairs(A, B[1:2])  # 2 degrees: t is 9.925
    assert spread
    half = 9.925 * 0.01 * (1 / 3 + 1) ** 0.5
    assert interval(a, b, spread) == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=2e-3)
    assert "e+" in compared([run(1, 1.0), run(1, 1e6)], [run(1, 9.0)])  # 1 degree of freedom says nothing


def test_single_runs_are_not_told_apart_whatever_their_windows_say() -> None:
    stated = {"interval": (9.9, 10.1), "uncertainty_from": "95 % interval of 10 windows of 1 run"}
    told = compared([run(1, 10.0, **stated)], [run(1, 15.0, **stated)])
    assert told.startswith("B / A = 1.5000: not told apart, as nothing was repeated")


def test_rows_are_paired_by_scale_and_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = read_table_runs(TINY)
    assert [(a.gpus, b.gpus) for a, b, _ in pairs(tiny[:4], tiny[2:])] == [(16, 16), (32, 32)]
    assert [(a.gpus, b.gpus) for a, b, _ in pairs(tiny[:1], tiny[7:])] == [
        (4, 512)
    ]  # two single ones, whatever they are
    sides = [[run(1, 9.0 + number, variant=name) for number, name in enumerate(names)] for names in ("pq", "qp")]
    assert [(a.variant, b.variant) for a, b, _ in pairs(*sides)] == [("p", "p"), ("q", "q")]
    failed, where = run(1, None, state="failed"), r"A has .*base on 1 node, 4 GPUs \(published\).*B has .*"
    for b, why in (
        (tiny[2:], r"on 4 nodes.*no model and scale in common"),
        ([failed], r"\(failed\).*that have a rate"),
    ):
        with pytest.raises(UserError, match=where + why):
            pairs(tiny[:2], b)
    command(monkeypatch, compare_command.main, TINY, TINY)
    assert capsys.readouterr().out.count("B / A = 1.0000") == 8
