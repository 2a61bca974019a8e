"""Comparisons with known answers, and how often programs of equal speed differ."""

import math
import re

import numpy as np
import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import describe_significance, pair_rows, ratio_interval
from clap_ds.analysis.table import Scale, read_table_runs
from clap_ds.utils.errors import UserError
from tests.analysis.samples import run, run_main, write

HEADER = "nodes,gpus,samples_per_s_per_gpu"


def pair_rates(a_rates: list[float], b_rates: list[float]) -> tuple[Scale, Scale]:
    """Return the only pair of rows of runs with these rates."""
    a_runs, b_runs = ([run(1, rate) for rate in rates] for rates in (a_rates, b_rates))
    (pair,) = pair_rows(a_runs, b_runs)
    return pair


def test_interval_is_welchs_with_the_larger_spread_on_both_sides():
    """By hand: deviations of logs a = 0.0100 and b = 0.0182. Degrees are (a² + b²)² / ((a⁴ + b⁴) /
    2) = 3.12, at most 1.5·2, for which t is 5.841. Half the interval of the logarithm is
    5.841·b·√(2/3) = 0.0867."""
    pair = pair_rates([99.0, 100.0, 101.0], [108.0, 110.0, 112.0])
    expected = (1.1 * math.exp(-0.0867), 1.1 * math.exp(0.0867))
    assert ratio_interval(*pair) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "conclusion"),
    [
        ([99.5, 100.0, 100.5], [109.5, 110.0, 110.5], "B is faster"),
        ([109.5, 110.0, 110.5], [99.5, 100.0, 100.5], "B is slower"),
        ([100.0, 100.0, 100.0], [100.0, 100.0, 100.0], "no significant difference"),
        ([99.0, 101.0], [150.0], "significance unknown"),
    ],
)
def test_conclusion_follows_from_the_interval(a, b, conclusion):
    assert conclusion in describe_significance(*pair_rates(a, b))


def compute_significant_percent(
    counts: tuple[int, int], noises: tuple[float, float], draws: int, gain: float = 0.0
) -> float:
    """Return the percentage of comparisons with a significant difference, for two programs of which
    B is faster by a fraction `gain`."""
    generator = np.random.default_rng([*counts, int(1000 * noises[0]), int(1000 * noises[1])])
    significant = 0
    for _ in range(draws):
        sides = []
        for count, noise, log_rate in zip(counts, noises, (0.0, math.log1p(gain)), strict=True):
            rates = 100 * np.exp(log_rate + noise * generator.standard_normal(count))
            runs = tuple(run(8, float(rate)) for rate in rates)
            sides.append(Scale(runs=runs, samples_per_s_per_gpu=float(rates.mean())))
        interval = ratio_interval(*sides)
        assert interval
        significant += not interval[0] <= 1 <= interval[1]
    return 100 * significant / draws


@pytest.mark.parametrize(("counts", "noises"), [((3, 3), (0.003, 0.03)), ((2, 6), (0.03, 0.003))])
def test_programs_of_equal_speed_differ_in_one_of_a_hundred_comparisons_at_most(counts, noises):
    assert compute_significant_percent(counts, noises, 1000) <= 1.5


def test_power_is_that_of_the_page():
    """`docs/benchmarking.md` states that 5% are found in 36% and 99% of comparisons."""
    for count, percent, tolerance in ((3, 36, 6), (5, 99, 1.5)):
        power = compute_significant_percent((count, count), (0.01, 0.01), 500, gain=0.05)
        assert power == pytest.approx(percent, abs=tolerance)


def test_tables_without_a_model_match_each_other_and_any_run(tmp_path, capsys):
    a_lines = "1,4,600.1\n1,4,600.9\n2,8,580.2,timeout\n"
    a_table = write(tmp_path / "before.csv", f"{HEADER},state\n{a_lines}")
    b_table = write(tmp_path / "after.csv", f"{HEADER}\n1,4,700.1\n1,4,700.9\n2,8,590.2\n")
    run_main(compare_command.main, a_table, b_table)
    printed = capsys.readouterr().out
    assert "### before, 1 node, 4 GPUs and after, 1 node, 4 GPUs" in printed
    assert printed.count("B / A = ") == 2
    assert re.findall("In .*", printed) == ["In A: timeout on 2 nodes, 8 GPUs."]
    pairs = pair_rows(read_table_runs(a_table), [run(2, 9.0, model="micro")])
    assert [(a.gpus, b.gpus) for a, b in pairs] == [(8, 8)]


def test_rows_are_paired_by_scale_and_variant():
    p_run = run(1, 9.0, variant="p")
    q_run = run(1, 10.0, variant="q")
    pairs = pair_rows([p_run, q_run], [q_run, p_run])
    assert [(a.variant, b.variant) for a, b in pairs] == [("p", "p"), ("q", "q")]


def test_rows_without_a_partner_are_listed(tmp_path):
    a_runs = read_table_runs(write(tmp_path / "a.csv", f"{HEADER},model\n1,4,600.1,mine\n"))
    b_runs = [run(1, 9.0, model="micro"), run(2, 8.0, model="micro")]
    b_rows = r"B: micro.* on 1 node, 4 GPUs, .* on 2 nodes, 8 GPUs"
    with pytest.raises(UserError, match=rf"A: mine on 1 node, 4 GPUs\. {b_rows}"):
        pair_rows(a_runs, b_runs)
