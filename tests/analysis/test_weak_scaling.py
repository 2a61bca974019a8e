"""Laws on data that follows them, bands on many kinds of simulated sweeps, and the published
tables."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from clap_ds.analysis.extrapolate import ABOUT_BAND
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import LAWS, USUAL, Law, Series, make_series
from clap_ds.utils.errors import UserError
from tests.analysis import samples

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
TINY, BASE = (
    make_series(scaling_table(read_table_runs(path))) for path in (samples.TINY, samples.BASE)
)
KINDS = {
    "flat": lambda n: 0 * n,
    "logarithm": lambda n: 0.02 * np.log2(n),
    "steep logarithm": lambda n: 0.06 * np.log2(n),
    "fourth root": lambda n: 0.05 * (n**0.25 - 1),
    "root": lambda n: 0.02 * (n**0.5 - 1),
    "steep root": lambda n: 0.06 * (n**0.5 - 1),
    "n^0.75": lambda n: 0.006 * (n**0.75 - 1),
    "linear": lambda n: 0.002 * (n - 1),
    "steep linear": lambda n: 0.008 * (n - 1),
    "linear and its logarithm": lambda n: 0.0006 * n * np.log2(n),
    "congestion": lambda n: 0.001 * (n**1.3 - 1),
    "steep congestion": lambda n: 0.003 * (n**1.3 - 1),
    "ring, most of it bandwidth": lambda n: 0.1 * (1 - 1 / n) + 0.0005 * n,
    "ring": lambda n: 0.08 * (1 - 1 / n) + 0.001 * n,
    "ring, most of it latency": lambda n: 0.05 * (1 - 1 / n) + 0.002 * n,
    "slight ring": lambda n: 0.04 * (1 - 1 / n) + 0.0005 * n,
    "ring on a slow link": lambda n: 0.3 * (1 - 1 / n) + 0.0002 * n,
    "all but the first": lambda n: 0.05 * (1 - 1 / n),
    "much, all but the first": lambda n: 0.2 * (1 - 1 / n),
    "saturating": lambda n: 0.1 * (1 - np.exp(-(n - 1) / 8)),
    "tree": lambda n: 0.05 * (1 - 1 / n) + 0.012 * np.ceil(np.log2(n)),
    "logarithm and linear": lambda n: 0.01 * np.log2(n) + 0.001 * (n - 1),
    "bounded and root": lambda n: 0.06 * (1 - 1 / n) + 0.01 * (n**0.5 - 1),
    "slowest of n": lambda n: 0.03 * np.sqrt(2 * np.log(n)),
    "jump at 2": lambda n: 0.1 * (n >= 2),
    "jump at 2 and logarithm": lambda n: 0.1 * (n >= 2) + 0.006 * np.log2(n),
    "jump at 16": lambda n: 0.08 * (n >= 16),
    "jump at 16 and logarithm": lambda n: 0.05 * (n >= 16) + 0.01 * np.log2(n),
    "hidden up to 8": lambda n: np.maximum(0, 0.004 * n - 0.03),
}
"""Kinds of growth of the step time, relative to a step without communication."""
SWEEPS = ((1, 2, 4), (1, 4, 16), NODES[:6], NODES)
NOISES = (0.0, 0.002, 0.005, 0.01, 0.02)


def of_law(law: str, **changes: Any) -> Series:
    """Return a sweep in which a sample takes 1.5 ms plus 0.16 ms per unit of growth."""
    made = Law(LAWS[law], 1.5e-3, 0.16e-3)
    return Series("", tuple((nodes, made.rate(nodes)) for nodes in NODES[:6]), **changes)


def sweep_of(kind: str, node_counts: Sequence[int], errors: Any = 0.0) -> Series:
    times = (1 + KINDS[kind](np.array(node_counts, float))) * (1 + errors)
    return Series(
        "", tuple((nodes, 600 / time) for nodes, time in zip(node_counts, times, strict=True))
    )


def simulate_bands(kind: str) -> tuple[list[bool], list[float]]:
    """Return whether bands at two and four times the largest scale hold the law's efficiency, and
    how wide they are, for sweeps of few and many scales, with more and less noise."""
    generator = np.random.default_rng(list(KINDS).index(kind))
    is_held = []
    widths = []
    for node_counts in SWEEPS:
        targets = [2 * node_counts[-1], 4 * node_counts[-1]]
        truth = sweep_of(kind, (1, *targets))
        for noise in NOISES:
            for _ in range(2):
                errors = noise * generator.standard_normal(len(node_counts))
                series = sweep_of(kind, node_counts, errors)
                bands = series.bands(targets)
                for nodes, rate in truth.rates[1:]:
                    low, high = bands[nodes]
                    is_held.append(low <= truth.efficiency_percent(rate) <= high)
                    widths.append(high - low)
    return is_held, widths


def test_bands_hold_as_many_of_the_laws_efficiencies_as_the_output_says() -> None:
    simulated = {kind: simulate_bands(kind) for kind in KINDS}
    shares = {kind: 100 * np.mean(is_held) for kind, (is_held, _) in simulated.items()}
    stated = re.search(
        r"with (\d+) kinds of growth the band covered (\d+)% on average and (\d+)% for the worst",
        ABOUT_BAND,
    )
    assert stated
    worst = min(shares, key=lambda kind: shares[kind])
    computed = [len(KINDS), round(np.mean([*shares.values()])), round(shares[worst])]
    assert computed == [int(number) for number in stated.groups()], worst
    assert shares[worst] >= 85
    mean_width = np.mean([widths for _, widths in simulated.values()])
    assert mean_width < 20  # bands that are of use


@pytest.mark.parametrize("kind", KINDS)
def test_projection_of_any_law_lies_in_its_band(kind: str) -> None:
    for node_counts in SWEEPS:
        series = sweep_of(kind, node_counts)
        counts = series.node_counts
        for percent, (low, high) in zip(
            series.percents(counts), series.bands(counts).values(), strict=True
        ):
            assert low < percent < high


@pytest.mark.parametrize(
    ("law", "grown"), [("a + b·log n", 6.2383), ("a + b·√n", 43.2548), ("a + b·n", 511.0)]
)
def test_fit_recovers_what_made_the_data(law: str, grown: float) -> None:
    """For 512 nodes, log n is 6.2383, 2·(√n - 1) is 43.2548, and n - 1 is 511."""
    made = of_law(law)
    assert 1 / made.fit(law).rate(512) == pytest.approx(1.5e-3 + 0.16e-3 * grown, rel=1e-5)


def test_hold_outs_are_fitted_on_smaller_scales_alone() -> None:
    pairs = [(small.rates[-1][0], nodes) for small, nodes, _ in TINY.head(5).hold_outs()]
    assert pairs == [(2, 4), (4, 8), (8, 16), (2, 8), (4, 16)]
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    root = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (
        2**0.5 - 1
    )  # a + b·√n through two points, by hand
    error = abs(100 / root / one - 100 * four / one)
    ((small, nodes, actual),) = TINY.head(3).hold_outs()
    assert abs(small.percent_by(USUAL, nodes) - actual) == pytest.approx(error, abs=1e-6)
    assert TINY.head(2).hold_outs() == []
    assert TINY.head(2).percents([8]) == [TINY.head(2).percent_by(USUAL, 8)]


def of_runs(rates: dict[int, float], **changes: Any) -> Series:
    by_nodes = changes.pop("by_nodes", lambda nodes: {})
    runs = [samples.run(nodes, rate, **changes | by_nodes(nodes)) for nodes, rate in rates.items()]
    return make_series(scaling_table(runs))


@pytest.mark.parametrize(
    ("rates", "changes", "said"),
    [
        ({1: 9.0}, {}, "expected weak scaling .* on 1 node, 4 GPUs"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"gpus": 4}}, "equal nodes; .* on 1 node, 4 GPUs, 2 nodes, 4 GPUs"),
        ({2: 9.0, 4: 8.0}, {"by_nodes": lambda n: {"gpus": 5 * n // 2}}, "equal nodes; .* on 2 nodes, 5 GPUs"),
        ({1: 9.0, 2: 8.0}, {"by_nodes": lambda n: {"batch_per_gpu": 8 // n}}, "found strong scaling"),
        ({1: 600.0, 2: 480.0, 4: 590.0, 8: 500.0}, {}, "laws .* miss"),
        ({1: 600.0, 2: 630.0, 4: 625.0}, {}, "efficiency above 100% on 2 nodes, 8 GPUs"),
    ],
)  # fmt: skip
def test_what_nothing_can_be_projected_from_is_refused(
    rates: dict[int, float], changes: Any, said: str
) -> None:
    assert of_runs({1: 10.0, 2: 9.0}, by_nodes=lambda n: {"gpus": 8 * n}).gpus_per_node == 8
    assert of_runs({1: 600.0, 2: 500.0, 4: 590.0, 8: 500.0})  # misses by 9.4 points
    with pytest.raises(UserError, match=said):
        of_runs(rates, **changes)
