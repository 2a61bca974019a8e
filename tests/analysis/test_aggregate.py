"""Repeats from known distributions: how often ± covers the truth."""

import math
from statistics import stdev

import pytest

from clap_ds.analysis.aggregate import RunSpread, pool_spread
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from tests.analysis.samples import run, write

THREE_SCALES = [(1, 98.0), (1, 100.0), (1, 102.0), (2, 89.0), (2, 90.0), (2, 91.0), (4, 80.0)]
"""Squared deviations of the logarithms are 0.00080008 and 0.00024695; t for 4 degrees of freedom is
2.7764."""
HALF = 2.7764 * math.sqrt((0.00080008 + 0.00024695) / 4)


def test_interval_is_students_t_of_the_pooled_spread():
    base, row, single = scaling_table([run(nodes, rate) for nodes, rate in THREE_SCALES])
    assert (base.rate, base.repeats, row.samples_per_s, single.repeats) == (100.0, 3, 720.0, 1)
    assert base.samples_per_s_per_gpu_ci95 == pytest.approx(100 * HALF / 3**0.5, rel=1e-4)
    assert row.scaling_efficiency_percent == pytest.approx(90.0)
    error = 90 * HALF * (2 / 3) ** 0.5
    assert row.scaling_efficiency_percent_ci95 == pytest.approx(error, rel=1e-4)
    sample = "runs of one scale differ by 1.6% (of 6 runs, 4 degrees of freedom)"
    assert base.uncertainty_from == row.uncertainty_from == f"95% by Student's t, {sample}"
    assert single.samples_per_s_per_gpu_ci95 is single.scaling_efficiency_percent_ci95 is None
    assert "not repeated" in single.notes
    assert "not repeated" not in base.notes


def test_scale_with_a_far_larger_spread_uses_its_own():
    quiet = [run(nodes, rate) for nodes in (1, 2, 4) for rate in (99.9, 100.0, 100.1)]
    noisy = scaling_table([*quiet, *(run(8, rate) for rate in (80.0, 90.0, 100.0))])[-1]
    deviation = stdev(math.log(rate) for rate in (80, 90, 100))
    # Student's t for 2 degrees of freedom.
    expected = 90 * 4.3027 * deviation / 3**0.5
    assert noisy.samples_per_s_per_gpu_ci95 == pytest.approx(expected, rel=1e-4)


def test_spread_is_at_least_half_the_last_digit_of_a_table(tmp_path):
    rows = "1,4,600.1\n" * 3
    runs = read_table_runs(write(tmp_path / "t.csv", f"nodes,gpus,samples_per_s_per_gpu\n{rows}"))
    assert pool_spread([runs]) == RunSpread(pytest.approx(0.05 / 600.1), 2, 3)  # type: ignore[arg-type]


def test_outlying_repeat_is_named():
    quiet = [run(1, rate) for rate in (99.6, 100.0, 104.9)]
    outlying = [run(8, 95.2), run(8, 95.0), run(8, 76.0, source="a/slow")]
    first, second = scaling_table([*quiet, *outlying])
    assert "median repeat" not in first.notes
    assert "slow is -20.0% from the median repeat" in second.notes


def test_row_of_a_table_keeps_its_interval():
    stated = {
        "kind": "table",
        "repeats": 3,
        "samples_per_s_per_gpu_ci95": 1.5,
        "uncertainty_from": "x",
    }
    runs = [run(nodes, rate, kind="table") for nodes, rate in THREE_SCALES]
    base, *_, row = scaling_table([*runs, run(8, 70.0, **stated)])
    assert (row.samples_per_s_per_gpu_ci95, row.uncertainty_from) == (1.5, "x")
    error = 70 * math.hypot(1.5 / 70, (base.samples_per_s_per_gpu_ci95 or 0) / 100)
    assert row.scaling_efficiency_percent_ci95 == pytest.approx(error)
