"""How a step gets longer with the nodes: a few laws, fitted and weighed by how well they explain what was measured.

Waiting for the slowest of P ranks grows as (P^shape - 1)/shape, after the generalised extreme-value law: up to a bound (shape
-1), as log P (0), as √P (0.5), or as P (1). Which it is cannot be told from a few scales, so a band holds them all.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

LAWS = {"a + b·log n": 0.0, "a + b·√n": 0.5, "a + b·n": 1.0}
"""Of the step time on n nodes, by shape: nothing stated, all fitted."""
SHAPES = (-1.0, *LAWS.values())
"""All equally likely before anything is measured, with what the step's terms are stated to cost and without."""
NOISE, NOISE_WEIGHT = 0.01, 3
"""Relative noise of a measurement as it is expected, and how many measurements that expectation weighs."""
UNEXPLAINED = 0.003
"""Relative error that no law of these gets rid of, added to each measurement's own: no scale outweighs all others."""
DRIFT = 0.5
"""Relative uncertainty of growth beyond the largest scale, for a doubling: what was fitted need not go on. Chosen by
simulation (tests/analysis/test_growth.py): bands of sweeps of many kinds hold 9 in 10 of what is held out, or more."""
DRAWS = 4000


def growth(ranks: Any, shape: float) -> Any:
    """Expected largest of as many delays as there are ranks, less that of one, in units of their scale."""
    return np.log(ranks) if shape == 0 else (np.asarray(ranks, float) ** shape - 1) / shape


@dataclass(frozen=True)
class Measured:
    """Scales, smallest first: ranks, seconds a step, of which the stated terms' seconds, and relative errors (95 %)."""

    ranks: Floats
    times: Floats
    stated: Floats
    errors: Floats
    """Empty where none is known."""

    @property
    def weights(self) -> Floats:
        """Of squared relative residuals, 1 on average of what they are the inverse of; known errors weigh."""
        variances = (self.errors / 2) ** 2 + UNEXPLAINED**2 if len(self.errors) else np.ones_like(self.times)
        return np.asarray(variances.mean() / variances)

    def fit(self, shape: float, share: float) -> tuple[float, float]:
        """Seconds of compute and the scale of what grows, neither negative, by weighted least squares on relative time; `share`
        of the stated terms' seconds is taken off before."""
        root = np.sqrt(self.weights)
        a, b = root / self.times, root * growth(self.ranks, shape) / self.times
        y = root * (1 - share * self.stated / self.times)
        compute_s, delay_s = np.linalg.lstsq(np.stack([a, b], axis=1), y, rcond=None)[0]
        if delay_s < 0:
            compute_s, delay_s = a @ y / (a @ a), 0.0
        if compute_s < 0:
            compute_s, delay_s = 0.0, max(b @ y / (b @ b), 0.0)
        return float(compute_s), float(delay_s)

    def drawn_steps(self, at: int, stated_at: float) -> Floats:
        """Seconds a step that might be measured on `at` ranks, `DRAWS` of them; the same for the same measurements.

        They differ by all that is not known: shape, coefficients, noise, whether the stated terms cost anything, and `DRIFT`.
        """
        generator, doublings = np.random.default_rng(0), max(math.log2(at / self.ranks[-1]), 0.0)
        candidates = list(itertools.starmap(self._explained, itertools.product(SHAPES, (0.0, 1.0))))
        logs = np.array([log_weight for log_weight, *_ in candidates])
        chances = np.exp(logs - logs.max())
        counts = generator.multinomial(DRAWS, chances / chances.sum())
        drawn = []
        for (_, coefficients, spread, squares, share, shape), count in zip(candidates, counts, strict=True):
            noise = np.sqrt(squares / generator.chisquare(self._freedom, count))
            fitted = coefficients + noise[:, None] * (generator.standard_normal((count, 2)) @ spread.T)
            grown = np.maximum(fitted[:, 1], 0.0)
            drift = np.exp(DRIFT * math.sqrt(doublings) * generator.standard_normal(count))
            far = float(self._grown(at, shape))
            steps = (
                fitted.sum(axis=1) - grown + grown * (1 + (far - 1) * drift if doublings else far) + share * stated_at
            )
            drawn.append(steps * (1 + noise * generator.standard_normal(count)))
        return np.concatenate(drawn)

    @property
    def _freedom(self) -> int:
        return NOISE_WEIGHT + len(self.times) - 2

    def _grown(self, at: Any, shape: float) -> Floats:
        """Growth from the first of the measured ranks, as a share of that to the last."""
        first, last = growth(self.ranks[0], shape), growth(self.ranks[-1], shape)
        return np.asarray((growth(at, shape) - first) / (last - first))

    def _explained(self, shape: float, share: float) -> tuple[float, Floats, Floats, float, float, float]:
        """How well a shape and a share of the stated terms explain what was measured: logarithm of their weight; seconds of
        compute and of growth to the largest scale, with a triangular factor of their covariance over the noise's variance;
        squares of residuals; share and shape."""
        noise = max(NOISE, math.sqrt(float(((self.errors / 2) ** 2).mean())) if len(self.errors) else 0.0)
        columns = np.stack([1 / self.times, self._grown(self.ranks, shape) / self.times], axis=1)
        normal, target = columns.T @ (self.weights[:, None] * columns), 1 - share * self.stated / self.times
        coefficients = np.asarray(np.linalg.solve(normal, columns.T @ (self.weights * target)))
        squares = float((self.weights * (target - columns @ coefficients) ** 2).sum()) + NOISE_WEIGHT * noise**2
        log_weight = -self._freedom / 2 * math.log(squares) - 0.5 * float(np.linalg.slogdet(normal)[1])
        return log_weight, coefficients, np.asarray(np.linalg.cholesky(np.linalg.inv(normal))), squares, share, shape
