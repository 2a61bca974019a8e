"""Laws on data that follows them, bands on many kinds of simulated sweeps, and the published
tables."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from clap_ds.analysis.extrapolate import ABOUT_BAND
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import read_table_runs
from clap_ds.analysis.weak_scaling import DEFAULT_FIT, LAWS, ScalingFit, Series, make_series
from clap_ds.utils.errors import UserError
from tests.analysis import samples

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
TINY, BASE = (
    make_series(scaling_table(read_table_runs(path))) for path in (samples.TINY, samples.BASE)
)
# Kinds of growth of the step time, relative to a step without communication.
GROWTHS = {
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
    "jump at 2": lambda n: np.where(n >= 2, 0.1, 0),
    "jump at 2 and logarithm": lambda n: np.where(n >= 2, 0.1, 0) + 0.006 * np.log2(n),
    "jump at 16": lambda n: np.where(n >= 16, 0.08, 0),
    "jump at 16 and logarithm": lambda n: np.where(n >= 16, 0.05, 0) + 0.01 * np.log2(n),
    "hidden up to 8": lambda n: np.maximum(0, 0.004 * n - 0.03),
}
SWEEPS = ((1, 2, 4), (1, 4, 16), NODES[:6], NODES)
NOISES = (0.0, 0.002, 0.005, 0.01, 0.02)


def make_series_of_growth(name: str, node_counts: Sequence[int], errors: Any = 0.0) -> Series:
    times = (1 + GROWTHS[name](np.array(node_counts, float))) * (1 + errors)
    rates = (600 / times).tolist()
    return Series("", tuple(zip(node_counts, rates, strict=True)))


def simulate_bands(name: str) -> tuple[list[bool], list[float]]:
    """Return whether bands at two and four times the largest scale hold the growth's efficiency,
    and how wide they are, for sweeps of few and many scales, with more and less noise."""
    generator = np.random.default_rng(list(GROWTHS).index(name))
    is_held = []
    widths = []
    for node_counts, noise in itertools.product(SWEEPS, NOISES):
        targets = [2 * node_counts[-1], 4 * node_counts[-1]]
        truth = make_series_of_growth(name, (1, *targets))
        for _ in range(2):
            errors = noise * generator.standard_normal(len(node_counts))
            bands = make_series_of_growth(name, node_counts, errors).bands(targets)
            for nodes, rate in truth.rates[1:]:
                low, high = bands[nodes]
                is_held.append(low <= truth.efficiency_percent(rate) <= high)
                widths.append(high - low)
    return is_held, widths


def test_bands_hold_as_many_efficiencies_as_the_output_states():
    simulated = {name: simulate_bands(name) for name in GROWTHS}
    percents = {name: 100 * np.mean(is_held) for name, (is_held, _) in simulated.items()}
    worst = min(percents, key=lambda name: percents[name])
    pattern = (
        r"with (\d+) kinds of growth the band covered (\d+)% on average and (\d+)% for the worst"
    )
    stated = re.search(pattern, ABOUT_BAND)
    assert stated
    computed = [len(GROWTHS), round(np.mean([*percents.values()])), round(percents[worst])]
    assert computed == [int(number) for number in stated.groups()], worst
    assert percents[worst] >= 85
    # Wider bands would be of no use.
    assert np.mean([widths for _, widths in simulated.values()]) < 20


@pytest.mark.parametrize(
    ("law", "growth"), [("a + b·log n", 6.2383), ("a + b·√n", 43.2548), ("a + b·n", 511.0)]
)
def test_fit_recovers_the_law_of_the_data(law, growth):
    """A sample takes 1.5 ms plus 0.16 ms per unit of growth. For 512 nodes, log n is 6.2383, 2·(√n -
    1) is 43.2548, and n - 1 is 511."""
    known_fit = ScalingFit(LAWS[law], 1.5e-3, 0.16e-3)
    fit = Series("", tuple((nodes, known_fit.rate(nodes)) for nodes in NODES[:6])).fit(law)
    assert 1 / fit.rate(512) == pytest.approx(1.5e-3 + 0.16e-3 * growth, rel=1e-5)


def test_hold_outs_are_fitted_to_smaller_scales_alone():
    (_, one), (_, two), (_, four) = TINY.rates[:3]
    # a + b·√n through two points, by hand.
    time = 1 / one + (1 / two - 1 / one) * (4**0.5 - 1) / (2**0.5 - 1)
    error = abs(100 / time / one - 100 * four / one)
    ((small, nodes, measured),) = TINY.head(3).hold_outs()
    assert abs(small.percent_by(DEFAULT_FIT, nodes) - measured) == pytest.approx(error, abs=1e-6)


def make_run_series(rates: dict[int, float], **columns: Any) -> Series:
    """Return the series of runs. `columns`: functions of the number of nodes."""
    runs = []
    for nodes, rate in rates.items():
        values = {name: value(nodes) for name, value in columns.items()}
        runs.append(samples.run(nodes, rate, **values))
    return make_series(scaling_table(runs))


@pytest.mark.parametrize(
    ("rates", "columns", "message"),
    [
        ({1: 9.0}, {}, "expected weak scaling .* on 1 node, 4 GPUs"),
        (
            {1: 9.0, 2: 8.0},
            {"gpus": lambda n: 4},
            "equal nodes; .* on 1 node, 4 GPUs, 2 nodes, 4 GPUs",
        ),
        ({1: 9.0, 2: 8.0}, {"batch_per_gpu": lambda n: 8 // n}, "found strong scaling"),
        ({1: 600.0, 2: 480.0, 4: 590.0, 8: 500.0}, {}, "laws .* miss"),
        ({1: 600.0, 2: 630.0, 4: 625.0}, {}, "efficiency above 100% on 2 nodes, 8 GPUs"),
    ],
)
def test_series_without_a_projection_is_rejected(rates, columns, message):
    with pytest.raises(UserError, match=message):
        make_run_series(rates, **columns)
