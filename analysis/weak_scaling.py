"""A weak-scaling series, and the laws fitted to it: the step model's, and plain ones beside it that fit growth alone.

What foretells measured scales best from smaller ones is what a projection goes by, and its band holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.step_model import (
    BACKWARD_SHARE,
    Machine,
    Method,
    StepModel,
    Workload,
    growth,
    method_of,
    workload_of,
)
from clap_ds.analysis.table import Scale
from clap_ds.config.errors import UserError

STEP_MODEL = "step model"
LAWS = {"a + b·log n": 0.0, "a + b·√n": 0.5, "a + b·n": 1.0, STEP_MODEL: 0.5}
"""Of the step time on n nodes, by the shape of its growth; all but the step model have nothing stated, all fitted."""
BOUNDED = "a growth that ends"
"""Which bands reckon with, and nothing is projected by."""
SHAPES: Mapping[str, float] = {BOUNDED: -1.0, **LAWS}
NOISE = 0.01
"""Relative noise of a measurement as it is expected, where no ± says more."""
UNEXPLAINED = 0.003
"""Relative error that no law of these gets rid of, added to each measurement's own: no scale outweighs all others."""
DRIFT = 0.5
"""Relative uncertainty of growth beyond the largest scale, for a doubling: what was fitted need not go on. Chosen by
simulation (tests/analysis/test_weak_scaling.py)."""
DRAWS = 4000
FURTHEST = 4
"""Times the largest measured scale that is projected to; a power of two."""
WORST_FIT = 10.0
"""Points of efficiency by which the best law may miss what it is fitted to and still be projected."""
ABOVE_ALL = "efficiency above 100 %"
"""What the note of a scaling table's row says whose baseline is in doubt."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Series:
    """A weak-scaling series: what it trained, how and on what, and (nodes, samples/s/GPU), smallest scale first."""

    title: str
    workload: Workload
    rates: tuple[tuple[int, float], ...]
    machine: Machine
    method: Method
    errors: tuple[float, ...] = ()
    """± of each rate (95 %) as a share of it; empty where none is known."""

    @property
    def name(self) -> str:
        """Of the model alone."""
        return self.title.partition(",")[0]

    @property
    def laws(self) -> tuple[str, ...]:
        """All laws; where batch or sizes aren't known, those that need none."""
        return tuple(law for law in LAWS if law != STEP_MODEL or self.workload.batch_per_gpu)

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    def first(self, count: int) -> Series:
        """Of its smallest scales."""
        return replace(self, rates=self.rates[:count], errors=self.errors[:count])

    def fit(self, law: str = STEP_MODEL) -> StepModel:
        """One of `LAWS` through the rates, of two node counts or more: least squares on relative step time, in which rates
        weigh by their ±; no parameter is negative."""
        model = self._unfitted(law)
        columns, target = self._equations(model)
        fitted = np.linalg.lstsq(columns, target, rcond=None)[0]
        if fitted.min() < 0:
            alone = [0] if fitted[1] < 0 else [1]
            left = np.linalg.lstsq(columns[:, alone], target, rcond=None)[0]
            fitted = np.zeros(2)
            fitted[alone] = np.maximum(left, 0.0)
        return replace(model, compute_s=float(fitted[0]), delay_s=float(fitted[1]))

    def _unfitted(self, law: str) -> StepModel:
        window_s = BACKWARD_SHARE * self.workload.step_samples / max(rate for _, rate in self.rates)
        known = self.workload, self.machine, self.method
        return StepModel(*known, window_s=window_s, shape=SHAPES[law], stated=law == STEP_MODEL)

    def _equations(self, model: StepModel) -> tuple[Floats, Floats]:
        """What is to be solved for compute and the delays' scale: two columns and a target, in relative step time, weighted so
        that each scale's ± counts and weights are 1 on average."""
        nodes, rates = np.array(self.rates).T
        times = self.workload.step_samples / rates
        stated = np.array([model.step_s(int(count)) for count in nodes])
        variances = (np.array(self.errors) / 2) ** 2 + UNEXPLAINED**2 if self.errors else np.ones_like(times)
        weights = np.sqrt(variances.mean() / variances)
        grown = growth(nodes * self.workload.gpus_per_node, model.shape)
        columns = np.stack([np.ones_like(times), grown], axis=1) * (weights / times)[:, None]
        return columns, weights * (1 - stated / times)

    def bands(self, node_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """95 % bands of the efficiency that would be measured at each node count; empty under 3 scales, which are too few.

        A bootstrap: every law is fitted to rates that miss it as the measured ones did, drawn with replacement, as often as
        it explains these. Beyond the largest scale each draw's growth goes on by a factor of its own (`DRIFT`).
        """
        if len(self.rates) < 3:
            return {}
        models = [self._unfitted(law) for law in (BOUNDED, *self.laws)]
        solved = [self._solved(model) for model in models]
        logs = np.array([-len(missed) / 2 * math.log((missed**2).sum()) for *_, missed in solved])
        chances = np.exp(logs - logs.max())
        generator = np.random.default_rng(0)
        counts = generator.multinomial(DRAWS, chances / chances.sum())
        steps: dict[int, list[Floats]] = {nodes: [] for nodes in node_counts}
        for model, (inverse, fitted, missed), count in zip(models, solved, counts, strict=True):
            drawn = fitted + generator.choice(missed, (count, len(self.rates))) @ inverse.T
            drift, noise = generator.standard_normal(count), generator.choice(missed, count)
            for nodes in node_counts:
                steps[nodes].append(self._drawn_s(model, nodes, drawn, drift) * (1 + noise))
        largest = self.workload.step_samples / self.rates[0][1] * 100
        ends = {nodes: np.percentile(largest / np.concatenate(found), (2.5, 97.5)) for nodes, found in steps.items()}
        return {nodes: (float(low), float(high)) for nodes, (low, high) in ends.items()}

    def _solved(self, model: StepModel) -> tuple[Floats, Floats, Floats]:
        """Inverse of a law's columns, its parameters, and by how much rates miss it: as many as were measured, widened by what
        two parameters take up, and two of the noise that is known or expected."""
        columns, target = self._equations(model)
        inverse: Floats = np.asarray(np.linalg.pinv(columns))
        missed = target - columns @ inverse @ target
        noise = max(NOISE, float(np.sqrt(np.mean(np.square(self.errors or 0.0)))) / 2)
        missed = np.append(missed * math.sqrt(len(missed) / (len(missed) - 2)), [noise, -noise])
        return inverse, inverse @ target, missed - missed.mean()

    def _drawn_s(self, model: StepModel, nodes: int, drawn: Floats, drift: Floats) -> Floats:
        """Seconds a step on `nodes` by parameters that were drawn."""
        ranks, largest = (count * self.workload.gpus_per_node for count in (nodes, self.rates[-1][0]))
        doublings = max(math.log2(ranks / largest), 0.0)
        inside = growth(min(ranks, largest), model.shape)
        beyond = np.maximum(drawn[:, 1], 0.0) * (growth(ranks, model.shape) - inside)
        fitted = drawn[:, 0] + drawn[:, 1] * inside + beyond * np.exp(DRIFT * math.sqrt(doublings) * drift)
        return np.asarray(model.step_s(nodes) + fitted)

    def hold_outs(self) -> list[tuple[Series, int, float]]:
        """Each scale beside what can foretell it: the series up to the scale before, and up to the one before that, where these
        have two scales; with its node count and measured efficiency."""
        return [
            (self.first(place - back), nodes, self.efficiency_percent(rate))
            for back in (0, 1)
            for place, (nodes, rate) in enumerate(self.rates)
            if place - back >= 2
        ]

    def foretold_points(self) -> dict[str, float]:
        """Mean error of each law over the hold-outs, in points of efficiency without sign, smallest first; empty without."""
        cases = self.hold_outs()

        def mean_error(law: str) -> float:
            foretold = (small.efficiency_percent(small.fit(law).rate(nodes)) for small, nodes, _ in cases)
            return float(np.mean([abs(found - actual) for found, (*_, actual) in zip(foretold, cases, strict=True)]))

        found = {law: mean_error(law) for law in self.laws} if cases else {}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def best_law(self) -> str:
        """What foretold the scales best; where that can't be told the step model, or √n, as which its waiting grows."""
        return next(iter(self.foretold_points()), STEP_MODEL if STEP_MODEL in self.laws else "a + b·√n")

    @property
    def node_counts(self) -> list[int]:
        """Measured, and beyond them doublings to `FURTHEST` times as far."""
        measured = [nodes for nodes, _ in self.rates]
        return [*measured, *(measured[-1] * 2**power for power in range(1, FURTHEST.bit_length()))]


def read_series(path: Path) -> Series:
    """The weak-scaling series of a table that has one; errors as of `series_of`."""
    return series_of(scaling_table(read_table_runs(path)), Machine())


def series_of(rows: Sequence[Scale], machine: Machine) -> Series:
    """The rows of one series as one to be projected, trained as its runs' configuration says.

    Raises UserError where nothing can be projected from them: strong scaling, fewer than two node counts, nodes of different
    sizes, rates above the smallest scale's by more than their ±, and such as no law fits.
    """
    title, measured = rows[0].title, [row for row in rows if row.rate]
    per_node = {row.gpus / row.nodes for row in measured}
    is_even = len(per_node) == 1 and max(per_node).is_integer()
    if rows[0].scaling == "strong" or len({row.nodes for row in measured}) < 2 or not is_even:
        found = f"found {rows[0].scaling or 'unknown'} scaling on {[(row.nodes, row.gpus) for row in measured]} (nodes, GPUs)"
        raise UserError(f"{title}: expected weak scaling on two node counts or more with as many GPUs each; {found}")
    if above := [row.scale for row in measured if ABOVE_ALL in row.notes]:
        raise UserError(f"{title}: nothing is projected: {ABOVE_ALL} on {above[0]} puts the smallest scale in doubt")
    batches = {row.batch_per_gpu or row.micro_batch or 0 for row in measured}
    workload = workload_of(rows[0].model, batches.pop() if len(batches) == 1 else 0, int(per_node.pop()))
    config = next((run.config for row in rows for run in row.runs if run.config), {})
    rates = tuple((row.nodes, row.rate or 0.0) for row in measured)
    halves = [(row.samples_per_s_per_gpu_2sigma or 0.0) / (row.rate or 1.0) for row in measured]
    series = Series(title, workload, rates, machine, method_of(config), tuple(halves) if all(halves) else ())
    best = series.fit(series.best_law())
    furthest = max(abs(series.efficiency_percent(best.rate(nodes) - rate)) for nodes, rate in rates)
    if furthest > WORST_FIT:
        law = f"the best law, {series.best_law()}, misses what was measured by up to {furthest:.1f} points"
        raise UserError(f"{title}: nothing is projected: {law}")
    return series
