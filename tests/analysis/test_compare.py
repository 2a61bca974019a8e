"""Comparisons with known answers."""

import random
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.compare import compare, part_changes, render, verdict
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.runs import InputError, Run
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.throughput import Given, read_path

DATA = Path(__file__).parent / "data"


def run(windows: list[float], **changes: Any) -> Run:
    fields: dict[str, Any] = {"state": "completed", "model": "micro", "num_nodes": 1, "num_gpus": 2} | changes
    middle = sorted(windows)[len(windows) // 2]
    return Run("here", "record", rate=middle, windows=tuple(windows), **fields)


def test_a_faster_run_is_told_from_an_equal_one() -> None:
    generator = random.Random(0)
    slow, same, fast = ([generator.gauss(mean, 1.0) for _ in range(15)] for mean in (100.0, 100.0, 110.0))
    (faster,) = compare([run(slow)], [run(fast)])
    assert faster.ratio == pytest.approx(1.1, abs=0.02)
    assert faster.low is not None
    assert faster.low > 1.05
    assert verdict(faster).endswith("B is faster")
    assert verdict(compare([run(fast)], [run(slow)])[0]).endswith("B is slower")
    assert verdict(compare([run(slow)], [run(same)])[0]).endswith("not told apart")
    assert "bootstrap" in faster.interval_from


def test_repeats_are_compared_by_first_order_propagation() -> None:
    a = [run([rate]) for rate in (99.0, 100.0, 101.0)]
    b = [run([rate]) for rate in (108.0, 110.0, 112.0)]
    (comparison,) = compare(a, b)
    error = 1.1 * ((4 / 110) ** 2 + (2 / 100) ** 2) ** 0.5
    assert comparison.ratio == pytest.approx(1.1)
    assert (comparison.low, comparison.high) == (pytest.approx(1.1 - error), pytest.approx(1.1 + error))


def test_too_few_windows_have_no_bootstrap() -> None:
    (comparison,) = compare([run([1.0, 2.0])], [run([2.0, 4.0])])
    assert (comparison.low, comparison.high) == (None, None)
    assert "no interval" in verdict(comparison)


def test_the_part_that_changed_is_named_first() -> None:
    before = {"forward": 0.2, "backward": 0.4, "exposed_communication": 0.10, "optimizer": 0.1}
    after = {"forward": 0.21, "backward": 0.4, "exposed_communication": 0.04, "data_wait": 0.5}
    (comparison,) = compare([run([1.0] * 6, breakdown_s=before)], [run([1.1] * 6, breakdown_s=after)])
    changes = part_changes(comparison.a, comparison.b)
    assert [change.part for change in changes] == ["exposed_communication", "forward", "backward"]
    assert changes[0].change_s == pytest.approx(-0.06)
    assert "Largest change: exposed communication, -60.000 ms a step; all parts together -50.000 ms" in render(
        [comparison]
    )


def test_tables_are_compared_scale_by_scale() -> None:
    tiny = read_table_runs(PUBLISHED_DIR / "jupiter_htsat_tiny.csv")
    found = compare(tiny[:4], tiny[2:])
    assert [(comparison.a.gpus, comparison.ratio) for comparison in found] == [(16, 1.0), (32, 1.0)]


def test_nothing_in_common_is_said() -> None:
    tiny = read_table_runs(PUBLISHED_DIR / "jupiter_htsat_tiny.csv")
    with pytest.raises(InputError, match="no model and scale in common"):
        compare(tiny[:2], tiny[2:])


def test_a_run_without_a_rate_is_refused_with_its_state() -> None:
    failed = Run("here", "record", state="out_of_memory", model="micro", num_nodes=1, num_gpus=2)
    with pytest.raises(InputError, match=r"B: no rate was measured \(state: out_of_memory\)"):
        compare([run([1.0])], [failed])


def test_two_real_logs() -> None:
    logs = [read_path(DATA / f"deepspeed_{name}.log", Given()) for name in ("2ranks", "failed")]
    (comparison,) = compare(*logs)
    assert comparison.ratio > 0
    assert "exposed communication" in render([comparison])
