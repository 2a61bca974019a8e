"""Comparisons with known answers."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from clap_ds.analysis import compare as compare_command
from clap_ds.analysis.compare import compare, render
from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.record import interval_fields
from clap_ds.analysis.table import Run, write_csv
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, TINY, command, run


def of_windows(windows: list[float], **changes: Any) -> Run:
    return run(1, median(windows), gpus=2, **interval_fields(tuple(windows)), **changes)


def autoregressive(generator: random.Random, count: int, correlation: float) -> list[float]:
    """Windows of deviation 3 % about 100, each with this correlation to the one before."""
    values = [generator.gauss(0, 1)]
    while len(values) < count:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * generator.gauss(0, 1))
    return [100 * math.exp(0.03 * value) for value in values]


def measured(generator: random.Random, offset: float, count: int, correlation: float, speed: float = 1.0) -> Run:
    """A run of `count` windows on a machine whose runs differ by a standard deviation of `offset`."""
    factor = speed * math.exp(offset * generator.gauss(0, 1))
    return of_windows([factor * rate for rate in autoregressive(generator, count, correlation)])


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_runs_of_one_configuration_get_a_verdict_in_one_of_twenty_comparisons_at_most(repeats: int) -> None:
    """By a bootstrap over windows, 42 to 55 of 100 such comparisons of single runs had one."""
    generator = random.Random(repeats)
    told = {"repeats": 0, "spread known": 0}
    for trial in range(200):
        count, offset, correlation = (6, 10, 30)[trial % 3], (0.0, 0.02, 0.1)[trial // 3 % 3], (0.0, 0.7)[trial % 2]
        a, b = ([measured(generator, offset, count, correlation) for _ in range(repeats)] for _ in range(2))
        spreads = {"repeats": None} | ({"spread known": 100 * offset or None} if repeats == 1 else {})
        for name, spread in spreads.items():
            told[name] += not compare(a, b, spread)[0].verdict.partition(", as ")[0].endswith("not told apart")
    assert told["repeats"] <= (0 if repeats == 1 else 10)
    assert told["spread known"] <= 10


def test_a_real_difference_is_told() -> None:
    generator = random.Random(0)
    for speed, found in ((1.1, "B is faster"), (0.9, "B is slower")):
        ends = {"repeats": 0, "spread known": 0, "neither": 0}
        for _ in range(20):
            a, b = ([measured(generator, 0.01, 10, 0.3, each) for _ in range(3)] for each in (1.0, speed))
            for name, compared in (("repeats", compare(a, b)), ("spread known", compare(a[:1], b[:1], 1.0))):
                ends[name if compared[0].verdict.endswith(found) else "neither"] += 1
                assert compared[0].verdict.endswith((found, "not told apart"))
        assert ends["repeats"] >= 17
        assert ends["spread known"] >= 10


def test_what_single_runs_say_and_what_they_do_not() -> None:
    generator = random.Random(1)
    slow, fast = (of_windows([mean + generator.gauss(0, 0.1) for _ in range(10)]) for mean in (100.0, 150.0))
    (comparison,) = compare([slow], [fast])
    assert comparison.interval is not None
    assert comparison.interval[0] > 1.4
    assert re.search(r"99 % interval from 95 % interval of 10 windows and .*: not told apart, as single runs .*--run_spread",
                     comparison.verdict)  # fmt: skip
    (known,) = compare([slow], [fast], 5.0)
    assert known.verdict.endswith("B is faster")
    assert known.interval  # t of 9 degrees at 99 % is 3.250, and windows differ by little
    assert known.interval[0] == pytest.approx(1.5 * math.exp(-3.250 * 0.05 * 2**0.5), rel=1e-3)
    four = of_windows(list(slow.windows[:4]))
    for unknown in (four, run(1, 9.0)):
        assert "(no interval: not both state one of 95 %)" in compare([unknown], [fast], 5.0)[0].verdict
    assert "e+" in compare([run(1, 1.0), run(1, 1e6)], [run(1, 9.0)])[0].verdict  # 1 degree of freedom says nothing


def test_repeats_are_compared_by_what_they_differ_by(tmp_path: Path) -> None:
    """By hand: deviations of logs 0.01 and 0.0182, pooled 0.0147; t of 4 degrees 4.604; 0.0147·4.604·√(2/3) = 0.0553."""
    a, b = ([run(1, rate) for rate in rates] for rates in ((99.0, 100.0, 101.0), (108.0, 110.0, 112.0)))
    (comparison,) = compare(a, b)
    assert comparison.ratio == pytest.approx(1.1, rel=1e-3)
    assert comparison.interval == pytest.approx((1.1 * math.exp(-0.056), 1.1 * math.exp(0.056)), rel=2e-3)
    differ = r"runs of one scale differ by 1.5 %, 4 degrees of freedom\): B is faster$"
    assert re.search(f"99 % interval of 3 and 3 runs; {differ}", comparison.verdict)
    for name, runs in (("a", a), ("b", b)):
        write_csv(tmp_path / f"{name}.csv", scaling_table(runs))
    (of_tables,) = compare(*(read_table_runs(tmp_path / f"{name}.csv") for name in "ab"))
    assert of_tables.interval == pytest.approx(comparison.interval, rel=2e-3)
    assert of_tables.verdict.endswith("4 degrees of freedom): B is faster")
    (one_sided,) = compare(a, b[1:2])  # 2 degrees: t is 9.925
    half = 9.925 * 0.01 * (1 / 3 + 1) ** 0.5
    assert one_sided.interval == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=2e-3)


@pytest.mark.parametrize(("hours", "warned"), [((1, 2, 3), True), ((1, 5, 3), False)])
def test_a_warning_where_runs_were_not_taken_in_turns(hours: tuple[int, ...], warned: bool) -> None:
    a, b = ([run(1, 90.0 + hour, finished=f"2026-01-01T0{hour}") for hour in each] for each in (hours, (4, 6, 8)))
    for sides in ((a, b), (b, a)):
        assert ("not taken in turns" in compare(*sides)[0].verdict) == warned
    assert "in turns" not in compare([replace(each, finished="") for each in a], b)[0].verdict


def test_rows_of_one_variant_are_paired() -> None:
    def side(*variants: str) -> list[Run]:
        return [run(1, 10.0 * number, variant=name) for number, name in enumerate(variants, start=1)]

    found = compare(side("loss=a", "loss=b"), side("loss=b", "loss=a"))
    assert [(each.a.variant, each.b.variant) for each in found] == [("loss=a", "loss=a"), ("loss=b", "loss=b")]


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
    with pytest.raises(UserError, match=r"A has htsat_tiny_roberta_base on 1 node × 4.*no model and scale in common"):
        compare(tiny[:2], tiny[2:])
    with pytest.raises(UserError, match=r"B: no rate was measured \(state: out_of_memory\)"):
        compare(tiny, [run(1, None, state="out_of_memory")])


def test_the_command_on_two_real_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, compare_command.main, DATA / "deepspeed_2ranks.log", DATA / "deepspeed_failed.log")
    # Steps 10 to 40 of A and 10 to 20 of B, by running averages since step 2: B's 28,860 samples/s over A's 18,308.
    assert "B / A = 1.5764 (" in capsys.readouterr().out
