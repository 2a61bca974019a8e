"""Laws against data they made, bands against sweeps of many kinds that none of it was made for, and the published tables."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.step_model import WORKLOADS, Machine, Method, StepModel
from clap_ds.analysis.weak_scaling import LAWS, STEP_MODEL, Series, read_series, series_of
from clap_ds.config.errors import UserError
from tests.analysis import samples

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
WORK = WORKLOADS["htsat_tiny_roberta_base"]
TRUTH = StepModel(WORK, Machine(), Method(), 0.95, 0.004, window_s=0.5)
TINY, BASE = (read_series(path) for path in (samples.TINY, samples.BASE))
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
    return Series("", WORK, tuple(rates), Machine(), Method(), errors)


def of_law(law: str) -> list[tuple[int, float]]:
    """Rates of steps of 0.95 s and a tenth of what has grown."""
    return [(nodes, 616 / (0.95 + 0.1 * GROWN[law](nodes))) for nodes in NODES[:6]]


def held(kind: str) -> list[bool]:
    """Whether bands hold what was held out, of sweeps of more and less noise and growth."""
    generator = np.random.default_rng(list(KINDS).index(kind))
    found = []
    for noise in (0.002, 0.01, 0.02):
        for loss in (0.1, 0.5, 2.0):
            times = 1 + loss * KINDS[kind](np.array(NODES, float))
            times *= 1 + noise * generator.standard_normal(len(NODES))
            sweep = series([(nodes, WORK.batch_per_gpu / time) for nodes, time in zip(NODES, times, strict=True)])
            for scales in (3, 5, 7):
                bands = sweep.first(scales).bands(NODES[scales:])
                percents = {nodes: sweep.efficiency_percent(rate) for nodes, rate in sweep.rates}
                found += [low <= percents[nodes] <= high for nodes, (low, high) in bands.items()]
    assert len(found) == 9 * (5 + 3 + 1)
    return found


def test_bands_hold_what_they_are_said_to_of_what_is_held_out() -> None:
    shares = [np.mean(held(kind)) for kind in KINDS]
    assert (round(100 * float(np.mean(shares))), round(100 * float(min(shares)))) == (93, 86)  # as projections say


def test_bands_of_the_published_tables_are_sharp_and_repeat() -> None:
    for measured, widest in ((TINY, 13.1), (BASE, 12.9)):
        found = [(*small.bands([nodes])[nodes], actual) for small, nodes, actual in measured.hold_outs()
                 if len(small.rates) > 2]  # fmt: skip
        assert all(low <= actual <= high for low, high, actual in found)
        assert np.mean([high - low for low, high, _ in found]) < widest
        spread = [high - low for low, high in measured.first(5).bands([32, 64, 128, 1024]).values()]
        assert spread == sorted(spread)
    assert TINY.first(3).node_counts == [1, 2, 4, 8, 16]
    assert TINY.bands([512])[512] == TINY.bands([256, 512])[512]
    assert TINY.first(2).bands([512]) == {}
    alike, known = (series(of_law("a + b·n"), errors).bands([128])[128] for errors in ((), (0.1,) * 6))
    assert known[1] - known[0] > alike[1] - alike[0]  # a table's ± widens them


@pytest.mark.parametrize("law", LAWS)
def test_fit_recovers_what_made_the_data(law: str) -> None:
    made, tolerance = series(of_law(law)), 1e-3 if law == STEP_MODEL else 1e-6
    assert made.fit(law).step_s(512) == pytest.approx(0.95 + 0.1 * GROWN[law](512), rel=tolerance)
    assert made.best_law() == law


def test_scales_weigh_by_their_standard_error_and_what_no_law_explains() -> None:
    nodes, rates, errors = np.array([1, 2, 4, 8]), np.array([600.0, 560, 540, 470]), np.array([0.004, 0.02, 0.01, 0.03])
    weights = rates / 616 / np.sqrt((errors / 2) ** 2 + 0.003**2)
    slope, start = np.polyfit(4 * nodes - 1, 616 / rates, 1, w=weights)
    found = series([(1, 600.0), (2, 560.0), (4, 540.0), (8, 470.0)], tuple(errors)).fit("a + b·n")
    assert (found.delay_s, found.compute_s) == pytest.approx((slope, start))


def test_the_step_model_is_fitted_as_it_was_made_and_no_fitted_time_is_negative() -> None:
    """Where one would be, the other is that of least squares by itself, here worked out by hand."""
    found = series([(nodes, TRUTH.rate(nodes)) for nodes in NODES[:6]]).fit()
    assert (found.compute_s, found.delay_s) == (pytest.approx(0.95), pytest.approx(0.004))
    rising = series([(1, 600.0), (2, 610.0), (4, 620.0)]).fit("a + b·n")
    speeds = np.array([600.0, 610.0, 620.0]) / 616
    assert (rising.delay_s, rising.compute_s) == (0, pytest.approx(speeds.sum() / (speeds**2).sum()))
    falling = series([(1, 600.0), (2, 100.0), (4, 30.0)]).fit("a + b·n")
    shares = np.array([3, 7, 15]) * np.array([600.0, 100.0, 30.0]) / 616  # ranks less one
    assert (falling.compute_s, falling.delay_s) == (0, pytest.approx(shares.sum() / (shares**2).sum()))


def test_hold_outs_are_fitted_on_smaller_scales_alone() -> None:
    pairs = [(small.rates[-1][0], nodes) for small, nodes, _ in TINY.first(5).hold_outs()]
    assert pairs == [(2, 4), (4, 8), (8, 16), (2, 8), (4, 16)]
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    root = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (2**0.5 - 1)  # a + b·√n through two points, by hand
    error = abs(100 / root / one - 100 * four / one)
    assert TINY.first(3).foretold_points()["a + b·√n"] == pytest.approx(error, abs=1e-6)
    assert TINY.first(2).foretold_points() == {}
    assert TINY.first(2).best_law() == STEP_MODEL
    for measured, limit in ((TINY, 1.1), (BASE, 3.0)):
        cases = measured.hold_outs()
        errors = [abs(small.efficiency_percent(small.fit().rate(nodes)) - actual) for small, nodes, actual in cases]
        assert max(errors) < limit
        assert measured.foretold_points()[STEP_MODEL] == pytest.approx(np.mean(errors))


def of_runs(rates: dict[int, float], **changes: Any) -> Series:
    by_nodes = changes.pop("by_nodes", lambda nodes: {})
    runs = [samples.run(nodes, rate, **changes | by_nodes(nodes)) for nodes, rate in rates.items()]
    return series_of(scaling_table(runs), Machine(5e9))


def test_what_rows_tell_of_their_series() -> None:
    config = {"bf16": {"enabled": True}, "clap": {"gradient_sync": "deepspeed"}}
    found = of_runs({1: 10.0, 2: 9.0}, config=config, by_nodes=lambda n: {"interval": (9 - n, 9 + n)})
    assert (found.rates, found.errors) == (((1, 10.0), (2, 9.0)), pytest.approx((1 / 10, 2 / 9)))
    assert (found.machine.node_bytes_per_s, found.method.overlap) == (5e9, False)
    assert found.workload == replace(WORK, batch_per_gpu=8)
    sizes: list[dict[str, Any]] = [{"batch_per_gpu": 616}, {"batch_per_gpu": None, "micro_batch": 616}]
    sizes += [{"batch_per_gpu": None}, {"model": "micro"}]
    whole, micro, bare, other = (of_runs(dict(TINY.rates), **known) for known in sizes)
    assert micro.bands([512]) == whole.bands([512])
    plain = ("a + b·log n", "a + b·√n", "a + b·n")
    assert (micro.laws, bare.laws, other.laws) == (tuple(LAWS), plain, plain)
    without = {law: error for law, error in whole.foretold_points().items() if law != STEP_MODEL}
    assert bare.foretold_points() == other.foretold_points() == pytest.approx(without)
    assert bare.first(2).best_law() == "a + b·√n"


@pytest.mark.parametrize(
    ("rates", "changes", "said"),
    [
        ({1: 9.0}, {}, r"expected weak scaling on two node counts or more .*\[\(1, 4\)\]"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"gpus": 4}}, r"as many GPUs each.*\[\(1, 4\), \(2, 4\)\]"),
        ({2: 9.0, 4: 8.0}, {"by_nodes": lambda n: {"gpus": 5 * n // 2}}, r"as many GPUs each.*\[\(2, 5\), \(4, 10\)\]"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"batch_per_gpu": 8 // n}}, "found strong scaling"),
        ({1: 600.0, 2: 300.0, 4: 590.0, 8: 310.0}, {}, "the best law, .*, misses what was measured by up to"),
        ({1: 600.0, 2: 630.0, 4: 625.0}, {}, "efficiency above 100 % on 2 nodes, 8 GPUs puts the smallest scale in doubt"),
    ],
)  # fmt: skip
def test_what_nothing_can_be_projected_from_is_refused(rates: dict[int, float], changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        of_runs(rates, **changes)
