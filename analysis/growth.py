"""How the part of a step that nothing explains grows with the ranks, and how far ahead a few measured scales can see.

Waiting for the slowest of P ranks costs the largest of P delays. By the generalised extreme-value law that grows as
(P^ξ - 1)/ξ, whatever the delays are: up to a bound (shape ξ < 0), as log P (ξ = 0), or as a power of P (ξ > 0; 1 is
linear). No shape is chosen beforehand: each fit weighs them all by how well they explain its own scales and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

SHAPES = tuple(round(-1 + step / 10, 1) for step in range(26))
"""All equally likely before anything is measured."""
STATED_SHARES = (0.0, 0.5, 1.0, 1.5)
"""What the stated terms of a step may really cost, of what was worked out for them."""
NOISE, NOISE_WEIGHT = 0.01, 3
"""Relative noise of a measurement as it is expected, and how many measurements that expectation weighs."""
DRIFT = 0.5
"""Relative uncertainty of growth beyond the largest scale, for a doubling: what was fitted need not go on. Chosen by
simulation (tests/analysis/test_growth.py): bands of sweeps of many kinds hold 9 in 10 of what is held out, or more."""
DRAWS = 4000

SIMPLE_FITS: dict[str, Callable[[Floats], list[Floats]]] = {
    "a + b·log n": lambda nodes: [np.ones_like(nodes), np.log2(nodes)],
    "a + b·√n": lambda nodes: [np.ones_like(nodes), np.sqrt(nodes)],
    "a + b·log n + c·n": lambda nodes: [np.ones_like(nodes), np.log2(nodes), nodes],
}
"""Of the step time, to compare with."""


def growth(ranks: Any, shape: float) -> Any:
    """Expected largest of as many delays as there are ranks, less that of one, in units of their scale."""
    return np.log(ranks) if abs(shape) < 1e-9 else (np.asarray(ranks, float) ** shape - 1) / shape


def simple_step(name: str, nodes: Sequence[int], times_s: Sequence[float], target: int) -> float | None:
    """Step time at `target` nodes by one of `SIMPLE_FITS`, least squares on relative time; None for too few scales."""
    of_nodes = SIMPLE_FITS[name]
    columns = np.stack(of_nodes(np.array(nodes, float)), axis=1) / np.array(times_s)[:, None]
    if len(columns) < columns.shape[1]:
        return None
    weights, *_ = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)
    return float(weights @ np.array([column[0] for column in of_nodes(np.array([target], float))]))


@dataclass(frozen=True)
class _Candidate:
    """A shape and a share of the stated terms, with the least-squares fit of compute and growth that belongs to them."""

    shape: float
    share: float
    log_weight: float
    coefficients: Floats
    """Seconds of compute, and of growth up to the largest measured scale."""
    spread: Floats
    """Of the coefficients: a triangular factor of their covariance over the noise's variance."""
    squares: float
    freedom: int


def _candidates(ranks: Floats, times: Floats, stated: Floats, shares: Sequence[float]) -> list[_Candidate]:
    found = []
    for shape in SHAPES:
        columns = np.stack([1 / times, _beyond_first(ranks, ranks, shape) / times], axis=1)
        normal = columns.T @ columns
        spread = np.asarray(np.linalg.cholesky(np.linalg.inv(normal)), float)
        for share in shares:
            target = 1 - share * stated / times
            coefficients = np.asarray(np.linalg.solve(normal, columns.T @ target), float)
            squares = float(((target - columns @ coefficients) ** 2).sum()) + NOISE_WEIGHT * NOISE**2
            freedom = NOISE_WEIGHT + len(times) - 2
            log_weight = -freedom / 2 * math.log(squares) - 0.5 * float(np.linalg.slogdet(normal)[1])
            found.append(_Candidate(shape, share, log_weight, coefficients, spread, squares, freedom))
    return found


def _beyond_first(at: Floats, ranks: Floats, shape: float) -> Floats:
    """Growth from the first of the measured `ranks`, as a share of that to the last."""
    first, last = growth(ranks[0], shape), growth(ranks[-1], shape)
    return np.asarray((growth(at, shape) - first) / (last - first))


def _weights(candidates: Sequence[_Candidate]) -> Floats:
    logs = np.array([candidate.log_weight for candidate in candidates])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def mean_shape(ranks: Floats, times: Floats, stated: Floats) -> float:
    """The shape to expect after measuring `times` seconds a step on these `ranks`, the stated terms taken as they are."""
    candidates = _candidates(ranks, times, stated, (1.0,))
    return float(_weights(candidates) @ np.array([candidate.shape for candidate in candidates]))


def drawn_steps(ranks: Floats, times: Floats, stated: Floats, at: Floats, stated_at: Floats) -> Floats:
    """Seconds a step that might be measured on `at` ranks, `DRAWS` × ranks; the same for the same arguments.

    They differ by all that is not known: shape, coefficients, noise, what the stated terms cost, and `DRIFT`.
    """
    generator = np.random.default_rng(0)
    candidates = _candidates(ranks, times, stated, STATED_SHARES)
    doublings = np.maximum(np.log2(at / ranks[-1]), 0.0)
    drawn = []
    for candidate, count in zip(candidates, generator.multinomial(DRAWS, _weights(candidates)), strict=True):
        noise = np.sqrt(candidate.squares / generator.chisquare(candidate.freedom, (count, 1)))
        fitted = candidate.coefficients + noise * (generator.standard_normal((count, 2)) @ candidate.spread.T)
        grown = np.maximum(fitted[:, 1:], 0.0)
        compute = fitted[:, :1] + (fitted[:, 1:] - grown)
        drift = np.exp(DRIFT * np.sqrt(doublings) * generator.standard_normal((count, 1)))
        share = _beyond_first(at, ranks, candidate.shape)
        share = np.where(doublings > 0, 1 + (share - 1) * drift, share)
        steps = compute + grown * share + candidate.share * stated_at
        drawn.append(steps * (1 + noise * generator.standard_normal(steps.shape)))
    return np.concatenate(drawn)
