"""Repeats from known distributions: how often ± covers the truth."""

import math
import random
from pathlib import Path

import pytest

from clap_ds.analysis.aggregate import RunSpread, pool_spread
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from tests.analysis.samples import run, write

THREE_SCALES = [(1, 98.0), (1, 100.0), (1, 102.0), (2, 89.0), (2, 90.0), (2, 91.0), (4, 80.0)]
"""Squared deviations of the logarithms are 0.00080008 and 0.00024695; t for 4 degrees of freedom is
2.7764."""
HALF = 2.7764 * math.sqrt((0.00080008 + 0.00024695) / 4)


def test_plus_minus_is_students_t_of_the_spread_that_repeated_scales_share() -> None:
    base, row, once = scaling_table([run(nodes, rate) for nodes, rate in THREE_SCALES])
    assert (base.rate, base.repeats, row.samples_per_s, once.repeats) == (100.0, 3, 720.0, 1)
    assert base.samples_per_s_per_gpu_ci95 == pytest.approx(100 * HALF / 3**0.5, rel=1e-4)
    assert (base.scaling_efficiency_percent, base.scaling_efficiency_percent_ci95) == (100.0, 0.0)
    assert (row.scaling_efficiency_percent, row.speedup) == (
        pytest.approx(90.0),
        pytest.approx(1.8),
    )
    assert row.scaling_efficiency_percent_ci95 == pytest.approx(
        90 * HALF * (2 / 3) ** 0.5, rel=1e-4
    )
    said = "95% by Student's t, runs of one scale differ by 1.6% (of 6 runs, 4 degrees of freedom)"
    assert {each.uncertainty_from for each in (base, row)} == {said}
    assert (once.samples_per_s_per_gpu_ci95, once.scaling_efficiency_percent_ci95) == (None, None)
    assert ["not repeated" in each.notes for each in (base, row, once)] == [False, False, True]


def test_the_headline_efficiency_holds_the_truth_in_95_of_100() -> None:
    """Two repeats of four scales, and different numbers for five; 2σ of two repeats covered it in
    78."""
    generator = random.Random(8)
    held = 0
    for trial in range(600):
        counts = ((2,) * 4, (3, 1, 2, 4, 2))[trial % 2]
        rates = [600 * 0.97**place for place in range(len(counts))]
        *_, last = scaling_table([
            run(2**place, rates[place] * math.exp(generator.gauss(0, 0.01)))
            for place, count in enumerate(counts) for _ in range(count)
        ])  # fmt: skip
        wrong = abs((last.scaling_efficiency_percent or 0) - 100 * rates[-1] / rates[0])
        held += wrong <= (last.scaling_efficiency_percent_ci95 or 0)
    assert 0.93 * 600 <= held <= 0.985 * 600  # nor is it too wide


def test_a_scale_that_spreads_far_more_than_the_others_has_its_own_spread() -> None:
    quiet = [run(nodes, 100.0 + offset) for nodes in (1, 2, 4) for offset in (-0.1, 0.0, 0.1)]
    *_, noisy = scaling_table([*quiet, *(run(8, rate) for rate in (80.0, 90.0, 100.0))])
    deviation = math.sqrt(
        sum((math.log(rate) - math.log(80 * 90 * 100) / 3) ** 2 for rate in (80, 90, 100)) / 2
    )
    assert noisy.samples_per_s_per_gpu_ci95 == pytest.approx(
        90 * 4.3027 * deviation / 3**0.5, rel=1e-4
    )  # t for 2 degrees
    *_, alike = scaling_table([*quiet, *(run(8, rate) for rate in (99.9, 100.0, 100.15))])
    assert "8 degrees of freedom" in alike.uncertainty_from


def test_the_spread_is_of_what_counts() -> None:
    scale = [run(1, 98.0), run(1, 102.0), run(1, 50.0, state="failed")]
    deviation = pytest.approx(math.log(102 / 98) / 2**0.5)
    assert pool_spread([scale, [run(2, 90.0)]]) == RunSpread(deviation, 1, 2)  # type: ignore[arg-type]
    assert pool_spread([[run(1, 98.0)]]) is None


def test_the_spread_is_no_less_than_the_digits_of_a_table_resolve(tmp_path: Path) -> None:
    header = "nodes,gpus,samples_per_s_per_gpu\n"
    table = write(
        tmp_path / "t.csv", header + "1,4,600.1\n" * 3 + "2,8,590\n" * 3 + "4,16,600\n4,16,599.9\n"
    )
    runs = read_table_runs(table)
    spreads = [pool_spread([scale]) for scale in (runs[:3], runs[3:6])]
    floors = (0.05 / 600.1, 0.5 / 590)
    assert spreads == [RunSpread(pytest.approx(floor), 2, 3) for floor in floors]  # type: ignore[arg-type]
    finest = pool_spread([runs[6:]])
    assert finest
    assert finest.deviation == pytest.approx(math.log(600 / 599.9) / 2**0.5)
    exact = pool_spread([[run(1, 600.1), run(1, 600.1)]])
    assert exact
    assert 0 < exact.deviation < 1e-5


def test_memory_is_that_of_the_repeat_that_took_most() -> None:
    runs = [
        run(1, 100.0 + number, memory_peak_gib=gib) for number, gib in enumerate((60.0, 71.5, 64.0))
    ]
    assert scaling_table(runs)[0].memory_peak_gib == 71.5


def test_an_outlying_repeat_is_named() -> None:
    quiet = [run(1, rate) for rate in (99.6, 100.0, 104.9)]
    *others, row = scaling_table(
        [*quiet, run(8, 95.2), run(8, 95.0), run(8, 76.0, source="a/slow")]
    )
    assert "slow is -20.0% from the median repeat" in row.notes
    assert not any("median repeat" in each.notes for each in others)


def test_a_tables_row_keeps_its_plus_minus() -> None:
    runs = [run(nodes, rate, kind="table") for nodes, rate in THREE_SCALES]
    stated = run(
        8,
        70.0,
        kind="table",
        repeats=3,
        samples_per_s_per_gpu_ci95=1.5,
        uncertainty_from="what it says",
    )
    base, *_, row = scaling_table([*runs, stated])
    assert (row.samples_per_s_per_gpu_ci95, row.uncertainty_from) == (1.5, "what it says")
    error = 70 * math.hypot(1.5 / 70, (base.samples_per_s_per_gpu_ci95 or 0) / 100)
    assert row.scaling_efficiency_percent_ci95 == pytest.approx(error)
