"""Laws against data they made, bands against sweeps of many kinds that none of it was made for, and the published tables."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clap_ds.analysis.step_model import WORKLOADS, Machine, Method, StepModel, Workload
from clap_ds.analysis.table import Row, write_csv
from clap_ds.analysis.weak_scaling import LAWS, PLAIN_LAWS, STEP_MODEL, Series, read_series
from clap_ds.config.errors import UserError
from tests.analysis import samples

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
WORK = WORKLOADS["htsat_tiny_roberta_base"]
TRUTH = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5)
TINY, BASE = (read_series(path, Machine(), Method()) for path in (samples.TINY, samples.BASE))
GROWN: dict[str, Callable[[float], float]] = {
    "a + b·log n": math.log, "a + b·√n": math.sqrt, "a + b·n": float,
    STEP_MODEL: lambda nodes: 10 * (TRUTH.step_s(int(nodes)) - 0.95),
}  # fmt: skip
KINDS = {
    "none": lambda n: 0 * n,
    "logarithm": lambda n: np.log2(n) / 7,
    "fourth root": lambda n: (n**0.25 - 1) / (128**0.25 - 1),
    "root": lambda n: (n**0.5 - 1) / (128**0.5 - 1),
    "linear": lambda n: (n - 1) / 127,
    "more than linear": lambda n: (n**1.3 - 1) / (128**1.3 - 1),
    "saturating": lambda n: 1 - np.exp(-(n - 1) / 32),
    "logarithm and linear": lambda n: np.log2(n) / 14 + (n - 1) / 254,
    "once, from the second node on": lambda n: np.where(n > 1, 0.6 + 0.4 * np.log2(n) / 7, 0),
    "linear and its logarithm": lambda n: n * np.log2(n) / (128 * 7),
    "all but the first": lambda n: 1 - 1 / n,
    "faster beyond 16 nodes": lambda n: 0.5 * np.log2(n) / 7 + 0.5 * np.log2(np.maximum(n, 16) / 16) / 3,
}
"""Growth of the step time, 1 at 128 nodes at most."""


def series(rates: list[tuple[int, float]], errors: tuple[float, ...] = ()) -> Series:
    return Series("", WORK, tuple(rates), errors=errors)


def of_law(law: str) -> list[tuple[int, float]]:
    """Rates of steps of 0.95 s and a tenth of what has grown."""
    return [(nodes, 616 / (0.95 + 0.1 * GROWN[law](nodes))) for nodes in NODES[:6]]


def _held(kind: str) -> list[bool]:
    """Whether bands hold what was held out, of sweeps of more and less noise and growth."""
    generator = np.random.default_rng(list(KINDS).index(kind))
    held = []
    for noise in (0.002, 0.01, 0.02):
        for loss in (0.1, 0.5, 2.0):
            times = 1 + loss * KINDS[kind](np.array(NODES, float))
            times *= 1 + noise * generator.standard_normal(len(NODES))
            sweep = series([(nodes, WORK.batch_per_gpu / time) for nodes, time in zip(NODES, times, strict=True)])
            for scales in (3, 5, 7):
                bands = sweep.first(scales).bands(NODES[scales:])
                percents = {nodes: sweep.efficiency_percent(rate) for nodes, rate in sweep.rates}
                held += [low <= percents[nodes] <= high for nodes, (low, high) in bands.items()]
    assert len(held) == 9 * (5 + 3 + 1)
    return held


def test_bands_hold_what_they_are_said_to_of_what_is_held_out() -> None:
    shares = [np.mean(_held(kind)) for kind in KINDS]
    assert (round(100 * float(np.mean(shares))), round(100 * float(min(shares)))) == (93, 86)  # as projections say


def test_bands_of_the_published_tables_are_sharp_and_repeat() -> None:
    for measured, widest in ((TINY, 13.1), (BASE, 12.9)):
        widths = []
        for small, nodes, actual in measured.hold_outs():
            if bands := small.bands([nodes]):
                low, high = bands[nodes]
                assert low <= actual <= high
                widths.append(high - low)
        assert np.mean(widths) < widest
        spread = [high - low for low, high in measured.first(5).bands([32, 64, 128, 1024]).values()]
        assert spread == sorted(spread)
    assert TINY.bands([512])[512] == TINY.bands([256, 512])[512]
    assert TINY.first(2).bands([512]) == {}
    alike, known = (series(of_law("a + b·n"), errors).bands([128])[128] for errors in ((), (0.1,) * 6))
    assert known[1] - known[0] > alike[1] - alike[0]  # a table's ± widens them


@pytest.mark.parametrize("law", LAWS)
def test_fit_recovers_what_made_the_data(law: str) -> None:
    made = series(of_law(law))
    assert made.fit(law).step_s(512) == pytest.approx(
        0.95 + 0.1 * GROWN[law](512), rel=1e-3 if law == STEP_MODEL else 1e-6
    )
    assert made.best_law() == law
    # A noisy scale pulls less.
    wrong = [*made.rates[:-1], (32, 0.9 * made.rates[-1][1])]
    alike, known = (series(wrong, (*[0.01] * 5, last)).fit(law).rate(8) for last in (0.01, 0.2))
    expected, equal = made.fit(law).rate(8), series(wrong).fit(law).rate(8)
    assert alike == pytest.approx(equal)
    assert abs(known - expected) < 0.1 * abs(alike - expected)


def test_the_step_model_is_fitted_as_it_was_made() -> None:
    found = series([(nodes, TRUTH.rate(nodes)) for nodes in NODES[:6]]).fit()
    assert (found.compute_s, found.delay_s) == (pytest.approx(0.95), pytest.approx(0.004))
    assert found.efficiency_percent(1024) == pytest.approx(TRUTH.efficiency_percent(1024))


def test_hold_outs_are_fitted_on_smaller_scales_alone() -> None:
    assert [(small.rates[-1][0], nodes) for small, nodes, _ in TINY.first(5).hold_outs()] == [
        (2, 4), (4, 8), (8, 16), (2, 8), (4, 16),
    ]  # fmt: skip
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    root = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (2**0.5 - 1)  # a + b·√n through two points, by hand
    error = abs(100 / root / one - 100 * four / one)
    assert TINY.first(3).foretold_points()["a + b·√n"] == pytest.approx(error, abs=1e-6)
    assert TINY.first(2).foretold_points() == {}
    assert TINY.first(2).best_law() == STEP_MODEL


@pytest.mark.parametrize(("measured", "limit", "average"), [(TINY, 1.1, 0.4), (BASE, 3.0, 1.6)], ids=["tiny", "base"])
def test_small_scales_predict_large_ones(measured: Series, limit: float, average: float) -> None:
    cases = measured.hold_outs()
    errors = [abs(small.efficiency_percent(small.fit().rate(nodes)) - actual) for small, nodes, actual in cases]
    assert max(errors) < limit
    assert measured.foretold_points()[STEP_MODEL] == pytest.approx(sum(errors) / len(errors))
    assert sum(errors) / len(errors) < average


def test_no_fitted_time_is_negative() -> None:
    """The other is then that of least squares by itself, here worked out by hand."""
    rising = series([(1, 600.0), (2, 610.0), (4, 620.0)]).fit("a + b·n")
    speeds = np.array([600.0, 610.0, 620.0]) / 616
    assert (rising.delay_s, rising.compute_s) == (0, pytest.approx(speeds.sum() / (speeds**2).sum()))
    falling = series([(1, 600.0), (2, 100.0), (4, 30.0)]).fit("a + b·n")
    shares = np.array([3, 7, 15]) * np.array([600.0, 100.0, 30.0]) / 616  # ranks less one
    assert (falling.compute_s, falling.delay_s) == (0, pytest.approx(shares.sum() / (shares**2).sum()))


def test_what_nothing_can_be_projected_from_is_said() -> None:
    assert TINY.doubt() == BASE.doubt() == ""
    jagged = series([(1, 600.0), (2, 300.0), (4, 590.0), (8, 310.0)])
    assert "misses what was measured by up to" in jagged.doubt()
    assert jagged.node_counts() == [1, 2, 4, 8]
    above = [(1, 600.0), (2, 630.0), (4, 625.0)]
    said = "2 nodes have 105.0 % of the smallest scale's rate per GPU, more than 100 by more"
    assert series(above).doubt().startswith(said)
    assert [bool(series(above, (error,) * 3).doubt()) for error in (0.05, 0.03)] == [False, True]


def table(path: Path, *rows: Row) -> Series:
    write_csv(path / "t.csv", rows)
    return read_series(path / "t.csv", Machine(), Method())


def row(nodes: int, rate: float = 9.0, per_node: int = 4, **known: Any) -> Row:
    known = {"model": "htsat_tiny_roberta_base", "batch_per_gpu": 8} | known
    return Row(nodes, per_node * nodes, rate, per_node * nodes * rate, **known)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1)], "at least two"),
        ([row(1, model="micro"), row(2, model="micro")], "--num_parameters"),
        ([row(1), row(2, per_node=2)], "different numbers of GPUs per node"),
        ([row(n, model=f"m{n % 2}") for n in (1, 2, 3, 4)], "2 series"),
        ([row(n, batch_per_gpu=8 // n, global_batch=32) for n in (1, 2)], "strong scaling isn't projected"),
    ],
)
def test_tables_that_cannot_be_projected_are_refused(tmp_path: Path, rows: list[Row], said: str) -> None:
    with pytest.raises(UserError, match=said):
        table(tmp_path, *rows)


def test_what_a_table_tells_of_its_series(tmp_path: Path) -> None:
    weighed = table(tmp_path, *(row(n, 10.0, samples_per_s_per_gpu_2sigma=n / 10) for n in (1, 2)))
    assert weighed.errors == pytest.approx((0.01, 0.02))
    write_csv(tmp_path / "t.csv", [row(n, 9.0 - n, 2, model="micro") for n in (1, 2)])
    assert read_series(tmp_path / "t.csv", Machine(), Method(), 1e6, 64).workload == Workload(8, 64, 1e6, 2)


def test_a_table_without_a_batch_per_gpu_is_projected_by_what_it_has(tmp_path: Path) -> None:
    def found(**known: int | None) -> Series:
        return table(tmp_path, *(row(n, rate, **{"batch_per_gpu": None} | known) for n, rate in TINY.rates))

    whole, micro, bare = found(batch_per_gpu=616), found(micro_batch=616), found()
    assert (micro.workload, micro.bands([512])) == (whole.workload, whole.bands([512]))
    assert (micro.laws, bare.laws) == (tuple(LAWS), PLAIN_LAWS)
    assert bare.first(2).best_law() == "a + b·√n"
    without = {law: error for law, error in whole.foretold_points().items() if law != STEP_MODEL}
    assert bare.foretold_points() == pytest.approx(without)
    low, high = bare.bands([512])[512]
    assert low < bare.efficiency_percent(bare.fit(bare.best_law()).rate(512)) < high
