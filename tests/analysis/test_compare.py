"""Comparisons with known answers."""

import random
import re
from statistics import median
from typing import Any

import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import bootstrap_ratio, compare, render
from clap_ds.analysis.table import Run, read_table_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, TINY, command, run


def with_windows(windows: list[float], **changes: Any) -> Run:
    return run(1, median(windows), windows=tuple(windows), gpus=2, **changes)


def test_a_faster_run_is_told_from_an_equal_one_given_enough_windows() -> None:
    generator = random.Random(0)
    slow, same, fast = ([generator.gauss(mean, 1.0) for _ in range(15)] for mean in (100.0, 100.0, 110.0))
    (faster,) = compare([with_windows(slow)], [with_windows(fast)])
    assert (faster.ratio, faster.interval) == (pytest.approx(1.1, abs=0.02), bootstrap_ratio(fast, slow))
    assert re.search(r"95 % bootstrap.*B is faster$", faster.verdict)
    assert compare([with_windows(fast)], [with_windows(slow)])[0].verdict.endswith("B is slower")
    assert compare([with_windows(slow)], [with_windows(same)])[0].verdict.endswith("not told apart")
    assert "no interval" in compare([with_windows(slow[:2])], [with_windows(fast[:2])])[0].verdict


def test_repeats_are_compared_by_first_order_propagation() -> None:
    a_rates, b_rates = (99.0, 100.0, 101.0), (108.0, 110.0, 112.0)
    (comparison,) = compare([run(1, rate) for rate in a_rates], [run(1, rate) for rate in b_rates])
    error = 1.1 * ((4 / 110) ** 2 + (2 / 100) ** 2) ** 0.5
    assert comparison.ratio == pytest.approx(1.1)
    assert comparison.interval == (pytest.approx(1.1 - error), pytest.approx(1.1 + error))


def test_bootstrap_interval_narrows_with_more_windows_and_repeats() -> None:
    generator = random.Random(2)
    top = [generator.gauss(1.1, 0.02) for _ in range(80)]
    found = {count: bootstrap_ratio(top[:count], [1.0] * count, 500) for count in (80, 20, 5)}
    assert all(low <= median(top[:count]) <= high for count, (low, high) in found.items())
    assert (widths := [high - low for low, high in found.values()]) == sorted(widths)
    assert bootstrap_ratio(top, [1.0], 100) == bootstrap_ratio(top, [1.0], 100)


def test_the_part_that_changed_is_named_first() -> None:
    before = {"forward_s": 0.2, "backward_s": 0.4, "exposed_communication_s": 0.10, "optimizer_s": 0.1}
    after = {"forward_s": 0.21, "backward_s": 0.4, "exposed_communication_s": 0.04, "data_wait_s": 0.5}
    (comparison,) = compare([run(1, 1.0, **before)], [run(1, 1.1, **after)])
    assert [part for part, _, _ in comparison.part_changes] == ["exposed_communication", "forward", "backward"]
    text = render([comparison])
    assert "Largest change: exposed communication, -60.000 ms a step; all parts together -50.000 ms" in text
    assert re.search(r"\| exposed communication \| +100.000 \| +40.000 \| +-60.000 \| +-60.0 \|", text)
    assert "No part of the step changed" in render(compare([run(1, 1.0, **before)], [run(1, 1.1, **before)]))
    assert "not both have a breakdown" in render(compare([run(1, 1.0)], [run(1, 1.1, **before)]))


def test_tables_are_compared_scale_by_scale() -> None:
    tiny = read_table_runs(TINY)
    found = compare(tiny[:4], tiny[2:])
    assert [(comparison.a.gpus, comparison.ratio) for comparison in found] == [(16, 1.0), (32, 1.0)]
    with pytest.raises(UserError, match=r"A has htsat_tiny_roberta_base on 1 nodes × 4.*no model and scale in common"):
        compare(tiny[:2], tiny[2:])
    with pytest.raises(UserError, match=r"B: no rate was measured \(state: out_of_memory\)"):
        compare(tiny, [run(1, None, state="out_of_memory")])


def test_the_command_on_two_real_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, compare_command.main, DATA / "deepspeed_2ranks.log", DATA / "deepspeed_failed.log")
    printed = capsys.readouterr().out
    assert "B / A = 1.4892 (" in printed
    assert "exposed communication" in printed
