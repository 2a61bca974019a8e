"""How delays grow, against exact expectations; and bands, against sweeps of many kinds that none of it was made for."""

import math
from dataclasses import replace

import numpy as np
import pytest

from clap_ds.analysis.growth import SIMPLE_FITS, growth, simple_step
from clap_ds.analysis.step_model import WORKLOADS, Series

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
WORK = WORKLOADS["htsat_tiny_roberta_base"]


def pareto(ranks: int, index: float) -> float:
    """E[max of P Pareto(a)] = Γ(P + 1)·Γ(1 - 1/a) / Γ(P + 1 - 1/a), exactly."""
    return math.exp(math.lgamma(ranks + 1) - math.lgamma(ranks + 1 - 1 / index)) * math.gamma(1 - 1 / index)


@pytest.mark.parametrize(
    ("shape", "slowest"),
    [
        (1 / 1.6, lambda ranks: pareto(ranks, 1.6)),
        (1 / 3.0, lambda ranks: pareto(ranks, 3.0)),
        (0.0, lambda ranks: sum(1 / number for number in range(1, ranks + 1))),  # exponential delays
        (-1.0, lambda ranks: ranks / (ranks + 1)),  # uniform ones
    ],
)
def test_growth_is_that_of_the_largest_of_many_delays(shape: float, slowest) -> None:  # type: ignore[no-untyped-def]
    exact = (slowest(4096) - slowest(512)) / (slowest(512) - slowest(64))
    found = (growth(4096, shape) - growth(512, shape)) / (growth(512, shape) - growth(64, shape))
    assert found == pytest.approx(exact, rel=0.02)


def test_simple_fits_find_what_they_are_made_of_and_want_enough_scales() -> None:
    for name, columns in SIMPLE_FITS.items():
        nodes = np.array([1.0, 2.0, 4.0, 8.0, 64.0])
        times = sum((2.0 + place) * column for place, column in enumerate(columns(nodes)))
        assert simple_step(name, [1, 2, 4, 8], list(times[:4]), 64) == pytest.approx(times[4])
        assert simple_step(name, [1], [1.0], 64) is None


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


@pytest.mark.parametrize("kind", KINDS)
def test_bands_hold_nine_in_ten_of_what_is_held_out(kind: str) -> None:
    generator = np.random.default_rng(list(KINDS).index(kind))
    held = []
    for noise in (0.002, 0.01, 0.02):
        for loss in (0.1, 0.5, 2.0):
            times = 1 + loss * KINDS[kind](np.array(NODES, float))
            times *= 1 + noise * generator.standard_normal(len(NODES))
            rates = tuple((nodes, WORK.batch_per_gpu / time) for nodes, time in zip(NODES, times, strict=True))
            sweep = Series("", WORK, rates)
            for scales in (3, 5, 7):
                bands = replace(sweep, rates=rates[:scales]).bands(NODES[scales:])
                percents = {nodes: sweep.efficiency_percent(rate) for nodes, rate in rates[scales:]}
                held += [low <= percents[nodes] <= high for nodes, (low, high) in bands.items()]
    assert len(held) == 9 * (5 + 3 + 1)
    assert sum(held) >= 0.9 * len(held)
