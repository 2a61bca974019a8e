"""Bands, against sweeps of many kinds that none of it was made for."""

import numpy as np
import pytest

from clap_ds.analysis.step_model import WORKLOADS, Series

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
WORK = WORKLOADS["htsat_tiny_roberta_base"]


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
                bands = sweep.first(scales).bands(NODES[scales:])
                percents = {nodes: sweep.efficiency_percent(rate) for nodes, rate in rates[scales:]}
                held += [low <= percents[nodes] <= high for nodes, (low, high) in bands.items()]
    assert len(held) == 9 * (5 + 3 + 1)
    assert sum(held) >= 0.9 * len(held)
