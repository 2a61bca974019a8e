"""Fit growth laws to a weak-scaling series: the best one predicts larger scales, and all of them define the band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clap_ds.analysis.table import Scale
from clap_ds.config.errors import UserError

LAWS = {"a + b·log n": 0.0, "a + b·√n": 0.5, "a + b·n": 1.0}
"""Shape of the step time's growth on n nodes, by law."""
USUAL = "a + b·√n"
SHAPES: Mapping[str, float] = {"a growth that ends": -1.0, **LAWS}
"""Laws of bands. The first is never used for projection."""
NOISE = 0.01
"""Relative noise of a measurement that bands assume at least."""
DRIFT = 0.5
"""Relative uncertainty of growth beyond the largest scale, per doubling. Chosen by simulation
(tests/analysis/test_weak_scaling.py)."""
DRAWS = 4000
FURTHEST = 4
"""Projection limit as a multiple of the largest measured scale; a power of two."""
WORST_FIT = 10.0
"""Largest misfit of the best law, in points of efficiency, for a projection."""
ABOVE_ALL = "efficiency above 100%"
"""Text in the note of a scaling table's row with a doubtful baseline."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


def growth(nodes: Any, shape: float) -> Any:
    """Return the growth of the step time, 0 at one node: bounded (shape -1), log n (0), √n (0.5) or n (1)."""
    return np.log(nodes) if shape == 0 else (np.asarray(nodes, float) ** shape - 1) / shape


@dataclass(frozen=True)
class Law:
    """Seconds per sample and GPU on n nodes: `start_s` on one node, plus `slope_s` times the growth."""

    shape: float
    start_s: float
    slope_s: float

    def rate(self, nodes: int) -> float:
        return float(1 / (self.start_s + self.slope_s * growth(nodes, self.shape)))


@dataclass(frozen=True)
class Series:
    """A weak-scaling series: (nodes, samples/s/GPU), smallest scale first."""

    title: str
    rates: tuple[tuple[int, float], ...]
    gpus_per_node: int = 4

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    def percent_by(self, law: str, nodes: int) -> float:
        """Return the efficiency on `nodes` nodes by a fit of one of `LAWS`."""
        return self.efficiency_percent(self.fit(law).rate(nodes))

    def first(self, count: int) -> Series:
        return replace(self, rates=self.rates[:count])

    def fit(self, law: str) -> Law:
        """Fit one of `LAWS` to rates at two or more node counts, by least squares on relative time. Parameters are
        nonnegative."""
        columns = self._columns(SHAPES[law])
        fitted = np.linalg.pinv(columns).sum(axis=1)
        if fitted.min() < 0:
            columns[:, fitted.argmin()] = 0.0  # the least-norm solution has 0 there
            fitted = np.linalg.pinv(columns).sum(axis=1)
        return Law(SHAPES[law], *fitted.tolist())

    def _columns(self, shape: float) -> Floats:
        """Return two columns, whose combination by a law's parameters should be 1: time relative to the measured."""
        nodes, rates = np.array(self.rates).T
        return np.stack([rates, rates * growth(nodes, shape)], axis=1)

    def bands(self, node_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Return 95% bands of the efficiency that would be measured at each node count; empty with fewer than 3 scales.

        A bootstrap: every law is fitted to rates with resampled residuals, as often as its likelihood suggests. Beyond the
        largest scale, each draw's growth is scaled by a random factor (`DRIFT`).
        """
        if len(self.rates) < 3:
            return {}
        solved = [self._solved(shape) for shape in SHAPES.values()]
        logs = np.array([-len(missed) / 2 * math.log((missed**2).sum()) for *_, missed in solved])
        chances = np.exp(logs - logs.max())
        generator = np.random.default_rng(0)
        counts = generator.multinomial(DRAWS, chances / chances.sum())
        nodes, largest = np.array(node_counts, float), self.rates[-1][0]
        doublings = np.log2(np.maximum(nodes / largest, 1))
        times = []
        for shape, (inverse, fitted, missed), count in zip(SHAPES.values(), solved, counts, strict=True):
            start, slope = (fitted + generator.choice(missed, (count, len(self.rates))) @ inverse.T).T[..., None]
            drift, noise = generator.standard_normal((count, 1)), generator.choice(missed, (count, 1))
            inside = growth(np.minimum(nodes, largest), shape)
            beyond = (growth(nodes, shape) - inside) * np.exp(DRIFT * np.sqrt(doublings) * drift)
            times.append((start + slope * inside + np.maximum(slope, 0) * beyond) * (1 + noise))
        ends = np.percentile(100 / self.rates[0][1] / np.concatenate(times), (2.5, 97.5), axis=0)
        return dict(zip(node_counts, zip(*ends.tolist(), strict=True), strict=True))

    def _solved(self, shape: float) -> tuple[Floats, Floats, Floats]:
        """Return the inverse of a law's columns, its parameters and its residuals. Residuals are those of the rates, widened
        for two fitted parameters, and two of the expected noise."""
        columns = self._columns(shape)
        inverse: Floats = np.asarray(np.linalg.pinv(columns))
        fitted = inverse.sum(axis=1)
        missed = 1 - columns @ fitted
        missed = np.append(missed * math.sqrt(len(missed) / (len(missed) - 2)), [NOISE, -NOISE])
        return inverse, fitted, missed - missed.mean()

    def hold_outs(self) -> list[tuple[Series, int, float]]:
        """Return (series of smaller scales, node count, measured efficiency) of each scale. The series are all smaller scales,
        and all but the next smaller one, if these are at least two."""
        return [
            (self.first(place - back), nodes, self.efficiency_percent(rate))
            for back in (0, 1)
            for place, (nodes, rate) in enumerate(self.rates)
            if place - back >= 2
        ]

    def holdout_errors(self) -> dict[str, float]:
        """Return each law's mean absolute error over the hold-outs in points, smallest first; empty without hold-outs."""
        held = self.hold_outs()
        errors = {law: [abs(small.percent_by(law, nodes) - actual) for small, nodes, actual in held] for law in LAWS}
        means = {law: float(np.mean(found)) for law, found in errors.items() if found}
        return dict(sorted(means.items(), key=lambda item: item[1]))

    def select_law(self) -> str:
        return next(iter(self.holdout_errors()), USUAL)

    @property
    def node_counts(self) -> list[int]:
        """Measured node counts, and doublings up to `FURTHEST` times the largest."""
        measured = [nodes for nodes, _ in self.rates]
        return [*measured, *(measured[-1] * 2**power for power in range(1, FURTHEST.bit_length()))]


def series_of(rows: Sequence[Scale]) -> Series:
    """Make a `Series` from the rows of one series.

    UserError if no projection is possible: strong scaling, fewer than two node counts, nodes of different sizes, rates above
    the smallest scale's by more than their ±, or no law that fits.
    """
    title, scaling, measured = rows[0].title, rows[0].scaling, [row for row in rows if row.rate]
    per_node = {row.gpus / row.nodes for row in measured}
    if scaling == "strong" or len({row.nodes for row in measured}) < 2 or len(per_node) > 1 or max(per_node) % 1:
        found = f"found {scaling or 'unknown'} scaling on {', '.join(row.scale for row in measured) or 'no scale'}"
        raise UserError(f"{title}: expected weak scaling on at least two node counts with equal nodes; {found}")
    if above := [row.scale for row in measured if ABOVE_ALL in row.notes]:
        raise UserError(f"{title}: no projection: {ABOVE_ALL} on {above[0]} makes the smallest scale doubtful")
    rates = tuple((row.nodes, row.rate or 0.0) for row in measured)
    series = Series(title, rates, int(per_node.pop()))
    best = series.select_law()
    furthest = max(abs(series.percent_by(best, nodes) - series.efficiency_percent(rate)) for nodes, rate in rates)
    if furthest > WORST_FIT:
        told = f"the best law, {best}, misses the measurements by up to {furthest:.1f} points"
        raise UserError(f"{title}: no projection: {told}")
    return series
