"""Fit laws of growth to a weak-scaling series, and project it to larger scales with a band.

A law is a formula of the step time on n nodes. Projection and band are quantiles of draws from all
laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clap_ds.analysis.table import GOOD_STATES, Scale, plain_text
from clap_ds.utils.errors import UserError, count_of

# Shape of the step time's growth on n nodes, by law.
LAWS = {"a + b·log n": 0.0, "a + b·√n": 0.5, "a + b·n": 1.0}
DEFAULT_FIT = "a + b·√n"
# Laws of projections and their bands, each a sum of growths.
SHAPES: Mapping[str, tuple[float, ...]] = {
    **{law: (shape,) for law, shape in LAWS.items()},
    "a + b·(1 − 1/√n)": (-0.5,),
    "a + b·(1 − 1/n)": (-1.0,),
    "a + b·(1 − 1/n) + c·n": (-1.0, 1.0),  # bandwidth and latency of a ring all-reduce
    "a + b from the second node on": (-8.0,),
}
# Expected relative noise of a measurement, which counts as much as `NOISE_DEGREES` measurements
# beside the residuals.
NOISE = 0.01
NOISE_DEGREES = 3
# Relative uncertainty of growth beyond the largest scale, per doubling. Chosen by simulation, as
# are the other constants (tests/analysis/test_weak_scaling.py).
DRIFT = 0.25
# Weight of a law, at least, whose residuals are at most `ACCEPTED` times those of the best law, or
# of `NOISE`.
LEAST_WEIGHT = 0.1
ACCEPTED = 1.5
DRAWS = 4000
# Projection limit as a multiple of the largest measured scale; a power of two.
MAX_EXTRAPOLATION = 4
# Largest misfit at a measured scale, in points of efficiency, for a projection.
MAX_MISFIT = 10.0
# Text in the note of a scaling table's row with a doubtful baseline.
ABOVE_100 = "efficiency above 100%"
Floats = np.ndarray[Any, np.dtype[np.float64]]


def growth(nodes: Any, shape: float) -> Any:
    """Return the growth of the step time, 0 at one node.

    It is like log n with shape 0, √n with 0.5, n with 1, and 1 − 1/n with -1.
    """
    if shape == 0:
        return np.log(nodes)
    return (np.asarray(nodes, float) ** shape - 1) / shape


@dataclass(frozen=True)
class ScalingFit:
    """Seconds per sample and GPU on n nodes: `start_s` on one node, plus `slope_s` times the
    growth."""

    shape: float
    start_s: float
    slope_s: float

    def rate(self, nodes: int) -> float:
        return float(1 / (self.start_s + self.slope_s * growth(nodes, self.shape)))


@dataclass(frozen=True)
class Fit:
    """A least-squares fit of one of `SHAPES` to relative times, without a bound of its
    parameters."""

    # Maps relative errors of the measurements to those of the parameters.
    inverse: Floats
    parameters: Floats
    # Sum of squared residuals and of those that `NOISE` stands for.
    squares: float
    degrees: int


def weigh_laws(fits: Sequence[Fit], measured: int) -> Floats:
    """Return each law's probability by its likelihood for `measured` scales, with a floor for laws
    that fit well."""
    squares = np.array([fit.squares for fit in fits])
    noises = np.sqrt(squares / [fit.degrees for fit in fits])
    likelihoods = (squares.min() / squares) ** (measured / 2)
    weights = likelihoods / likelihoods.sum()
    is_accepted = noises <= ACCEPTED * max(noises.min(), NOISE)
    weights = np.where(is_accepted, np.maximum(weights, LEAST_WEIGHT), weights)
    return weights / weights.sum()


@dataclass(frozen=True)
class Series:
    """A weak-scaling series: (nodes, samples/s/GPU), smallest scale first."""

    title: str
    rates: tuple[tuple[int, float], ...]
    gpus_per_node: int = 4

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    @property
    def relative(self) -> str:
        """` relative to 2 nodes`, or empty if efficiencies are relative to one node."""
        nodes = self.rates[0][0]
        return "" if nodes == 1 else f" relative to {count_of(nodes, 'node')}"

    def percent_by(self, law: str, nodes: int) -> float:
        """Return the efficiency on `nodes` nodes by a fit of one of `LAWS`."""
        return self.efficiency_percent(self.fit(law).rate(nodes))

    def head(self, count: int) -> Series:
        """Return the series of the `count` smallest scales."""
        return replace(self, rates=self.rates[:count])

    def fit(self, law: str) -> ScalingFit:
        """Fit one of `LAWS` to rates at two or more node counts, by least squares on relative time.
        Parameters are nonnegative."""
        columns = self._columns(LAWS[law])
        parameters = np.linalg.pinv(columns).sum(axis=1)
        if parameters.min() < 0:
            # The least-norm solution has 0 where a column is 0.
            columns[:, parameters.argmin()] = 0.0
            parameters = np.linalg.pinv(columns).sum(axis=1)
        return ScalingFit(LAWS[law], *parameters.tolist())

    def _columns(self, *shapes: float) -> Floats:
        """Return columns whose combination by a law's parameters should be 1: time relative to the
        measured."""
        nodes, rates = np.array(self.rates).T
        return np.stack([rates, *(rates * growth(nodes, shape) for shape in shapes)], axis=1)

    def percents(self, node_counts: Sequence[int]) -> list[float]:
        """Return the projected efficiency at each node count: the median of the draws whose
        quantiles are the band, or a fit of `DEFAULT_FIT` with fewer than 3 scales."""
        if len(self.rates) < 3:
            return [self.percent_by(DEFAULT_FIT, nodes) for nodes in node_counts]
        return [*map(float, np.median(self._draw_percents(node_counts), axis=0))]

    def bands(self, node_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Return 95% bands of the efficiency that would be measured at each node count; empty with
        fewer than 3 scales."""
        if len(self.rates) < 3:
            return {}
        ends = np.percentile(self._draw_percents(node_counts), (2.5, 97.5), axis=0)
        return dict(zip(node_counts, zip(*ends.tolist(), strict=True), strict=True))

    def _draw_percents(self, node_counts: Sequence[int]) -> Floats:
        """Draw efficiencies at each node count, of shape (`DRAWS`, node counts), from all laws, as
        often as they are likely.

        A draw is from a law's posterior with noise of unknown size: noise by scaled inverse χ², and
        parameters around the least-squares fit. Growth beyond the largest scale isn't negative, and
        has a random factor (`DRIFT`).
        """
        nodes = np.array(node_counts, float)
        largest = self.rates[-1][0]
        doublings = np.log2(np.maximum(nodes / largest, 1))
        generator = np.random.default_rng(0)
        fits = [self._solve(*shapes) for shapes in SHAPES.values()]
        counts = generator.multinomial(DRAWS, weigh_laws(fits, len(self.rates)))
        times = []
        for shapes, fit, count in zip(SHAPES.values(), fits, counts, strict=True):
            # Columns have one value per draw.
            noise = np.sqrt(fit.squares / generator.chisquare(fit.degrees, (count, 1)))
            errors = noise * generator.standard_normal((count, len(self.rates)))
            time, *slopes = (fit.parameters + errors @ fit.inverse.T).T[..., None]
            drift = np.exp(DRIFT * np.sqrt(doublings) * generator.standard_normal((count, 1)))
            for shape, slope in zip(shapes, slopes, strict=True):
                inside = growth(np.minimum(nodes, largest), shape)
                beyond = growth(nodes, shape) - inside
                time = time + slope * inside + np.maximum(slope, 0) * beyond * drift
            # A new measurement has noise, too.
            times.append(time * (1 + noise * generator.standard_normal((count, 1))))
        return 100 / self.rates[0][1] / np.concatenate(times)

    def _solve(self, *shapes: float) -> Fit:
        columns = self._columns(*shapes)
        inverse = np.asarray(np.linalg.pinv(columns))
        # All relative times are 1.
        parameters = inverse.sum(axis=1)
        residuals = 1 - columns @ parameters
        squares = residuals @ residuals + NOISE_DEGREES * NOISE**2
        degrees = len(self.rates) - len(parameters) + NOISE_DEGREES
        return Fit(inverse, parameters, squares, degrees)

    def hold_outs(self) -> list[tuple[Series, int, float]]:
        """Return (series of smaller scales, node count, measured efficiency) of each scale.

        The series are all smaller scales, and all but the next smaller one, if these are at least
        two.
        """
        cases = []
        for skipped in (0, 1):
            for index, (nodes, rate) in enumerate(self.rates):
                if index - skipped >= 2:
                    percent = self.efficiency_percent(rate)
                    cases.append((self.head(index - skipped), nodes, percent))
        return cases

    @property
    def node_counts(self) -> list[int]:
        """Measured node counts, and doublings up to `MAX_EXTRAPOLATION` times the largest."""
        counts = [nodes for nodes, _ in self.rates]
        limit = MAX_EXTRAPOLATION * counts[-1]
        while counts[-1] < limit:
            counts.append(2 * counts[-1])
        return counts


def list_doubts(rows: Sequence[Scale]) -> list[str]:
    """Return which scales of a series have runs that didn't complete, or efficiencies above
    100%."""
    incomplete = [row for row in rows if row.state not in GOOD_STATES]
    doubts = [f"{plain_text(row.state)} on {row.scale}" for row in incomplete]
    return doubts + [f"{ABOVE_100} on {row.scale}" for row in rows if ABOVE_100 in row.notes]


def make_series(rows: Sequence[Scale]) -> Series:
    """Make a `Series` from the rows of one series.

    UserError if no projection is possible: strong scaling, fewer than two node counts, nodes of
    different sizes, rates above the smallest scale's by more than their ±, or no law that fits.
    """
    title = rows[0].title
    scaling = rows[0].scaling
    measured = [row for row in rows if row.rate]
    node_counts = {row.nodes for row in measured}
    gpus_per_node = {row.gpus / row.nodes for row in measured}
    are_nodes_equal = len(gpus_per_node) == 1 and max(gpus_per_node) % 1 == 0
    if scaling == "strong" or len(node_counts) < 2 or not are_nodes_equal:
        scales = ", ".join(row.scale for row in measured) or "no scale"
        expected = "expected weak scaling on at least two node counts with equal nodes"
        raise UserError(f"{title}: {expected}; found {scaling or 'unknown'} scaling on {scales}")
    if above := [row.scale for row in measured if ABOVE_100 in row.notes]:
        reason = f"{ABOVE_100} on {above[0]} makes the smallest scale doubtful"
        raise UserError(f"{title}: no projection: {reason}")
    rates = tuple((row.nodes, row.rate or 0.0) for row in measured)
    series = Series(title, rates, int(gpus_per_node.pop()))
    projected = np.array(series.percents([nodes for nodes, _ in rates]))
    misfit = np.abs(projected - [series.efficiency_percent(rate) for _, rate in rates]).max()
    if misfit > MAX_MISFIT:
        reason = f"all laws together miss the measurements by up to {misfit:.1f} points"
        raise UserError(f"{title}: no projection: {reason}")
    return series
