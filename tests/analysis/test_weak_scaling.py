"""Laws on data that follows them, bands on many kinds of simulated sweeps, and the published tables."""

import re
from typing import Any

import numpy as np
import pytest

from clap_ds.analysis.extrapolate import ABOUT_BAND
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import LAWS, USUAL, Law, Series, series_of
from clap_ds.config.errors import UserError
from tests.analysis import samples

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
TINY, BASE = (series_of(scaling_table(read_table_runs(path))) for path in (samples.TINY, samples.BASE))
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
"""Kinds of growth of the step time, at most 1 at 128 nodes."""


def of_law(law: str, **changes: Any) -> Series:
    """Return a sweep in which a sample takes 1.5 ms plus 0.16 ms per unit of growth."""
    made = Law(LAWS[law], 1.5e-3, 0.16e-3)
    return Series("", tuple((nodes, made.rate(nodes)) for nodes in NODES[:6]), **changes)


def held(kind: str) -> list[bool]:
    """Return whether bands cover held-out scales, for sweeps with more and less noise and growth."""
    generator = np.random.default_rng(list(KINDS).index(kind))
    found = []
    for noise in (0.002, 0.01, 0.02):
        for loss in (0.1, 0.5, 2.0):
            times = 1 + loss * KINDS[kind](np.array(NODES, float))
            times *= 1 + noise * generator.standard_normal(len(NODES))
            sweep = Series("", tuple((nodes, 600 / time) for nodes, time in zip(NODES, times, strict=True)))
            for scales in (3, 5, 7):
                bands = sweep.first(scales).bands(NODES[scales:])
                percents = {nodes: sweep.efficiency_percent(rate) for nodes, rate in sweep.rates}
                found += [low <= percents[nodes] <= high for nodes, (low, high) in bands.items()]
    assert len(found) == 9 * (5 + 3 + 1)
    return found


def test_bands_hold_what_they_are_said_to_of_what_is_held_out() -> None:
    shares = [100 * np.mean(held(kind)) for kind in KINDS]
    said = re.search(r"it covered (\d+)% on average and (\d+)% for the worst kind", ABOUT_BAND)
    assert said
    assert [round(float(each)) for each in (np.mean(shares), min(shares))] == [int(each) for each in said.groups()]


@pytest.mark.parametrize(("law", "grown"), [("a + b·log n", 6.2383), ("a + b·√n", 43.2548), ("a + b·n", 511.0)])
def test_fit_recovers_what_made_the_data(law: str, grown: float) -> None:
    """For 512 nodes, log n is 6.2383, 2·(√n - 1) is 43.2548, and n - 1 is 511."""
    made = of_law(law)
    assert 1 / made.fit(law).rate(512) == pytest.approx(1.5e-3 + 0.16e-3 * grown, rel=1e-5)
    assert made.select_law() == law


def test_hold_outs_are_fitted_on_smaller_scales_alone() -> None:
    pairs = [(small.rates[-1][0], nodes) for small, nodes, _ in TINY.first(5).hold_outs()]
    assert pairs == [(2, 4), (4, 8), (8, 16), (2, 8), (4, 16)]
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    root = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (2**0.5 - 1)  # a + b·√n through two points, by hand
    error = abs(100 / root / one - 100 * four / one)
    assert TINY.first(3).holdout_errors()[USUAL] == pytest.approx(error, abs=1e-6)
    assert TINY.first(2).holdout_errors() == {}
    assert TINY.first(2).select_law() == USUAL


def of_runs(rates: dict[int, float], **changes: Any) -> Series:
    by_nodes = changes.pop("by_nodes", lambda nodes: {})
    runs = [samples.run(nodes, rate, **changes | by_nodes(nodes)) for nodes, rate in rates.items()]
    return series_of(scaling_table(runs))


@pytest.mark.parametrize(
    ("rates", "changes", "said"),
    [
        ({1: 9.0}, {}, "expected weak scaling .* on 1 node, 4 GPUs"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"gpus": 4}}, "equal nodes; .* on 1 node, 4 GPUs, 2 nodes, 4 GPUs"),
        ({2: 9.0, 4: 8.0}, {"by_nodes": lambda n: {"gpus": 5 * n // 2}}, "equal nodes; .* on 2 nodes, 5 GPUs"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"batch_per_gpu": 8 // n}}, "found strong scaling"),
        ({1: 600.0, 2: 300.0, 4: 590.0, 8: 310.0}, {}, "the best law, .*, misses"),
        ({1: 600.0, 2: 630.0, 4: 625.0}, {}, "efficiency above 100% on 2 nodes, 8 GPUs"),
    ],
)  # fmt: skip
def test_what_nothing_can_be_projected_from_is_refused(rates: dict[int, float], changes: Any, said: str) -> None:
    assert of_runs({1: 10.0, 2: 9.0}, by_nodes=lambda n: {"gpus": 8 * n}).gpus_per_node == 8
    with pytest.raises(UserError, match=said):
        of_runs(rates, **changes)
