"""Comparisons with known answers, and how often programs of equal speed are told apart."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import describe_significance, pair_rows, ratio_interval
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.table import Run, Scale, read_table_runs
from clap_ds.utils.errors import UserError
from tests.analysis.samples import TINY, command, given, run, write

HEADER = "nodes,gpus,samples_per_s_per_gpu"


def make_runs(*rates: float) -> list[Run]:
    return [run(1, rate) for rate in rates]


def compare_rates(a: list[float], b: list[float]) -> str:
    (pair,) = pair_rows(make_runs(*a), make_runs(*b))
    return describe_significance(*pair)


def test_interval_is_welchs_with_the_larger_spread_on_both_sides() -> None:
    """By hand: deviations of logs a = 0.0100 and b = 0.0182. Degrees are (a² + b²)² / ((a⁴ + b⁴) /
    2) = 3.12, at most 1.5·2, for which t is 5.841. Half the interval of the logarithm is
    5.841·b·√(2/3) = 0.0867."""
    ((a, b),) = pair_rows(make_runs(99.0, 100.0, 101.0), make_runs(108.0, 110.0, 112.0))
    assert ratio_interval(a, b) == pytest.approx(
        (1.1 * math.exp(-0.0867), 1.1 * math.exp(0.0867)), rel=1e-3
    )


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        ([99.5, 100.0, 100.5], [109.5, 110.0, 110.5], "B is faster"),
        ([109.5, 110.0, 110.5], [99.5, 100.0, 100.5], "B is slower"),
        ([98.0, 100.0, 102.0], [99.0, 101.0, 103.0], "no significant difference"),
        ([99.0, 101.0, 103.0], [98.0, 100.0, 102.0], "no significant difference"),
        ([100.0, 100.0, 100.0], [100.0, 100.0, 100.0], "no significant difference"),
        ([99.9, 100.0, 100.1], [108.0, 90.0, 120.0], "no significant difference"),
    ],
)
def test_verdict_follows_from_where_the_interval_lies(
    a: list[float], b: list[float], answer: str
) -> None:
    assert compare_rates(a, b).endswith(f": {answer}")


@pytest.mark.parametrize(
    "single", [([100.0], [150.0]), ([99.0, 100.0, 101.0], [150.0]), ([150.0], [99.0, 101.0])]
)
def test_single_runs_on_either_side_get_no_verdict(single: tuple[list[float], list[float]]) -> None:
    assert "significance unknown" in compare_rates(*single)


def compute_verdict_share(
    counts: tuple[int, int], noises: tuple[float, float], draws: int, gain: float = 0.0
) -> float:
    """Return the percentage of comparisons with a verdict, for two programs of which B is faster by
    a share `gain`."""
    generator = np.random.default_rng([*counts, int(1000 * noises[0]), int(1000 * noises[1])])
    verdicts = 0
    for _ in range(draws):
        sides = []
        for count, noise, log_rate in zip(counts, noises, (0.0, math.log1p(gain)), strict=True):
            rates = 100 * np.exp(log_rate + noise * generator.standard_normal(count))
            runs = tuple(run(8, float(rate)) for rate in rates)
            sides.append(Scale(runs=runs, samples_per_s_per_gpu=float(rates.mean())))
        ends = ratio_interval(*sides)
        assert ends
        verdicts += not ends[0] <= 1 <= ends[1]
    return 100 * verdicts / draws


UNEQUAL = [((3, 3), (0.003, 0.03)), ((5, 3), (0.003, 0.03)), ((6, 2), (0.003, 0.03)), ((10, 3), (0.003, 0.03)),
           ((6, 2), (0.01, 0.03)), ((10, 3), (0.01, 0.03)), ((5, 3), (0.005, 0.02)), ((2, 6), (0.03, 0.003))]  # fmt: skip
EQUAL = [
    ((count, count), (noise, noise))
    for count, noise in ((2, 0.01), (3, 0.003), (3, 0.04), (5, 0.01))
]


@pytest.mark.parametrize(("counts", "noises"), [*UNEQUAL, *EQUAL])
def test_programs_of_equal_speed_are_told_apart_in_one_of_a_hundred_at_most(
    counts: tuple[int, int], noises: tuple[float, float]
) -> None:
    assert compute_verdict_share(counts, noises, 1000) <= 1.5


def test_power_is_what_the_page_states() -> None:
    shares = [
        compute_verdict_share(counts, (0.01, 0.01), 500, gain=0.05) for counts in ((3, 3), (5, 5))
    ]
    assert shares == [pytest.approx(36, abs=6), pytest.approx(99, abs=1.5)]


def test_a_quiet_scale_is_judged_by_its_own_repeats() -> None:
    noisy = [run(8, rate) for rate in (90.0, 100.0, 110.0)]
    found = pair_rows(
        [*make_runs(99.9, 100.0, 100.1), *noisy], [*make_runs(101.9, 102.0, 102.1), *noisy]
    )
    assert [describe_significance(*pair).rpartition(": ")[2] for pair in found] == [
        "B is faster",
        "no significant difference",
    ]


@pytest.mark.parametrize(("a", "b"), [("600.1", "600.2"), ("600", "600.01"), ("600", "601")])
def test_rates_whose_last_digits_differ_get_no_verdict(tmp_path: Path, a: str, b: str) -> None:
    first = write(tmp_path / "a.csv", "\n".join([HEADER, *[f"1,4,{a}"] * 3]))
    second = write(tmp_path / "b.csv", "\n".join([HEADER, *[f"1,4,{b}"] * 3]))
    (pair,) = pair_rows(read_table_runs(first), read_table_runs(second))
    assert describe_significance(*pair).endswith("no significant difference")


def test_tables_without_a_model_are_paired_with_each_other_and_with_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(
        tmp_path / "before.csv", f"{HEADER},state\n1,4,600.1\n1,4,600.9\n2,8,580.2,timeout\n"
    )
    after = write(tmp_path / "after.csv", f"{HEADER}\n1,4,700.1\n1,4,700.9\n2,8,590.2\n")
    command(monkeypatch, compare_command.main, before, after)
    printed = capsys.readouterr().out
    assert "### before, 1 node, 4 GPUs and after, 1 node, 4 GPUs" in printed
    assert printed.count("B / A = ") == 2
    assert re.findall("In .*", printed) == ["In A: timeout on 2 nodes, 8 GPUs."]
    runs = read_table_runs(before)
    assert [(a.gpus, b.gpus) for a, b in pair_rows(runs, [run(2, 9.0, model="micro")])] == [(8, 8)]


def test_rows_are_paired_by_scale_and_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = read_table_runs(TINY)
    assert [(a.gpus, b.gpus) for a, b in pair_rows(tiny[:4], tiny[2:])] == [(16, 16), (32, 32)]
    sides = [
        [run(1, 9.0 + number, variant=name) for number, name in enumerate(names)]
        for names in ("pq", "qp")
    ]
    assert [(a.variant, b.variant) for a, b in pair_rows(*sides)] == [("p", "p"), ("q", "q")]
    command(monkeypatch, compare_command.main, TINY, TINY)
    assert capsys.readouterr().out.count("B / A = 1.0000") == 8


def test_rows_without_a_partner_are_listed_with_what_they_are(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", f"{HEADER},model\n1,4,600.1,mine\n")
    others = [run(1, 9.0, model="micro"), run(2, 8.0, model="micro")]
    with pytest.raises(
        UserError,
        match=r"A: mine on 1 node, 4 GPUs\. B: micro.* on 1 node, 4 GPUs, .* on 2 nodes, 8 GPUs",
    ):
        pair_rows(read_runs([table], given()), others)
