"""A weak-scaling series, and the laws fitted to it: the step model's, and plain ones beside it that fit growth alone.

What foretells measured scales best from smaller ones is what a projection goes by, and its band holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.repeats import ratio_uncertainty
from clap_ds.analysis.step_model import BACKWARD_SHARE, WORKLOADS, Machine, Method, StepModel, Workload, growth
from clap_ds.analysis.table import Row, by_series, choose_series, count_of, in_doubt
from clap_ds.config.errors import UserError

STEP_MODEL = "step model"
LAWS = {"a + b·log n": 0.0, "a + b·√n": 0.5, "a + b·n": 1.0, STEP_MODEL: 0.5}
"""Of the step time on n nodes, by the shape of its growth; all but the step model have nothing stated, all fitted."""
PLAIN_LAWS = tuple(law for law in LAWS if law != STEP_MODEL)
BOUNDED = -1.0
"""The shape of a growth that ends, which bands reckon with and nothing is projected by."""
NOISE = 0.01
"""Relative noise of a measurement as it is expected, where no ± says more."""
UNEXPLAINED = 0.003
"""Relative error that no law of these gets rid of, added to each measurement's own: no scale outweighs all others."""
DRIFT = 0.5
"""Relative uncertainty of growth beyond the largest scale, for a doubling: what was fitted need not go on. Chosen by
simulation (tests/analysis/test_weak_scaling.py)."""
DRAWS = 4000
FURTHEST = 4
"""Times the largest measured scale that is projected to where nobody asks for more."""
WORST_FIT = 10.0
"""Points of efficiency by which the best law may miss what it is fitted to and still be projected."""
PUBLISHED_MACHINE, PUBLISHED_METHOD = Machine(), Method()
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Series:
    """A weak-scaling series: what it trained, how and on what, and (nodes, samples/s/GPU), smallest scale first."""

    title: str
    workload: Workload
    rates: tuple[tuple[int, float], ...]
    machine: Machine = PUBLISHED_MACHINE
    method: Method = PUBLISHED_METHOD
    errors: tuple[float, ...] = ()
    """± of each rate (95 %) as a share of it; empty where none is known."""

    @property
    def name(self) -> str:
        """Of the model alone."""
        return self.title.partition(",")[0]

    @property
    def laws(self) -> tuple[str, ...]:
        """All laws; where no batch is known, those that need none."""
        return tuple(LAWS) if self.workload.batch_per_gpu else PLAIN_LAWS

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    def first(self, count: int) -> Series:
        """Of its smallest scales."""
        return replace(self, rates=self.rates[:count], errors=self.errors[:count])

    def fit(self, law: str = STEP_MODEL) -> StepModel:
        """One of `LAWS` through the rates, of two node counts or more: least squares on relative step time, in which rates
        weigh by their ±; no parameter is negative."""
        model = self._without_fit(LAWS[law], law == STEP_MODEL)
        columns, target = self._equations(model)
        compute_s, delay_s = np.linalg.lstsq(columns, target, rcond=None)[0]
        if delay_s < 0:
            compute_s, delay_s = np.linalg.lstsq(columns[:, :1], target, rcond=None)[0][0], 0.0
        elif compute_s < 0:
            compute_s, delay_s = 0.0, max(np.linalg.lstsq(columns[:, 1:], target, rcond=None)[0][0], 0.0)
        return replace(model, compute_s=float(compute_s), delay_s=float(delay_s))

    def _without_fit(self, shape: float, stated: bool) -> StepModel:
        window_s = BACKWARD_SHARE * self.workload.step_samples / max(rate for _, rate in self.rates)
        return StepModel(self.workload, self.machine, self.method, window_s=window_s, shape=shape, stated=stated)

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
        shapes = [(BOUNDED, False), *((LAWS[law], law == STEP_MODEL) for law in self.laws)]
        models = [self._without_fit(*each) for each in shapes]
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
        return np.asarray(
            model.step_s(nodes)
            + drawn[:, 0]
            + drawn[:, 1] * inside
            + beyond * np.exp(DRIFT * math.sqrt(doublings) * drift)
        )

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
        found = {
            law: float(np.mean([abs(small.efficiency_percent(small.fit(law).rate(nodes)) - actual)
                                for small, nodes, actual in cases]))
            for law in self.laws if cases
        }  # fmt: skip
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def best_law(self) -> str:
        """What foretold the scales best; where that can't be told the step model, or √n, as which its waiting grows."""
        return next(iter(self.foretold_points()), STEP_MODEL if STEP_MODEL in self.laws else "a + b·√n")

    def doubt(self) -> str:
        """Why nothing is to be projected from these rates; empty where nothing speaks against it."""
        best, percent = self.fit(self.best_law()), self.efficiency_percent
        largest = max(abs(percent(best.rate(nodes)) - percent(rate)) for nodes, rate in self.rates)
        if largest > WORST_FIT:
            return f"the best law, {self.best_law()}, misses what was measured by up to {largest:.1f} points"
        errors = self.errors or (None,) * len(self.rates)
        for (nodes, rate), error in zip(self.rates, errors, strict=True):
            around = ratio_uncertainty(percent(rate), error and percent(rate) * error, 1.0, errors[0])
            if in_doubt(percent(rate), around):
                return (
                    f"{count_of(nodes, 'node')} have {percent(rate):.1f} % of the smallest scale's rate per GPU, more than 100 "
                    "by more than its ±: the smallest scale's runs are in doubt"
                )
        return ""

    def node_counts(self, gpus: Sequence[int] = ()) -> list[int]:
        """Measured node counts, and beyond them those that fill with so many `gpus`, or doublings to `FURTHEST` times as far;
        of a series that is in doubt the measured ones. UserError where none of the `gpus` fills whole nodes."""
        measured, per_node = [nodes for nodes, _ in self.rates], self.workload.gpus_per_node
        wanted = gpus or [measured[-1] * per_node * 2**power for power in range(1, FURTHEST.bit_length())]
        whole = [count // per_node for count in wanted if count >= per_node and count % per_node == 0]
        if not whole:
            raise UserError(f"--project_gpus {' '.join(map(str, gpus))}: none fills whole nodes of {per_node} GPUs")
        return sorted({*measured, *whole}) if not self.doubt() else measured


def read_series(
    path: Path, machine: Machine, method: Method, num_parameters: float = 0, joint_dim: int = 0, name: str | None = None
) -> Series:
    """The weak-scaling series of a table, or that of this `name` where it holds several; errors as of `series_of`. Sizes are
    for models that are not published."""
    rows: Sequence[Row] = scaling_table(read_table_runs(path))
    weak = [row for row in rows if row.rate and row.scaling != "strong"]
    if len(by_series(weak)) > 1:
        rows = choose_series(weak, name, path)
    return series_of(str(path), rows, machine, method, num_parameters, joint_dim)


def series_of(
    name: str, rows: Sequence[Row], machine: Machine, method: Method, num_parameters: float = 0, joint_dim: int = 0
) -> Series:
    """One series' rows as a weak-scaling series; `name` is what an error calls them.

    Raises UserError for fewer than two scales, or model sizes that are neither published nor given.
    """
    if all(row.scaling == "strong" for row in rows):
        raise UserError(f"{name}: strong scaling isn't projected, the model is one of a constant batch per GPU")
    rows = [row for row in rows if row.rate and row.scaling != "strong"]
    if len({row.nodes for row in rows}) < 2:
        raise UserError(f"{name}: weak scaling measured at one node count only; a projection needs at least two")
    first, known = rows[0], WORKLOADS.get(rows[0].model, Workload(0, joint_dim, num_parameters))
    gpus_per_node = {row.gpus / row.nodes for row in rows}
    if not (num_parameters or known.num_parameters) or not (joint_dim or known.joint_dim):
        raise UserError(f"{name}: sizes of {first.model!r} are not known; give --num_parameters and --joint_dim")
    batches = {row.batch_per_gpu or row.micro_batch for row in rows}
    batch = batches.pop() if len(batches) == 1 else None  # without, the plain laws alone
    if len(gpus_per_node) > 1 or not min(gpus_per_node).is_integer():
        raise UserError(f"{name}: scales have different numbers of GPUs per node; expected one")
    sizes = joint_dim or known.joint_dim, num_parameters or known.num_parameters
    workload = Workload(batch or 0, *sizes, int(min(gpus_per_node)))
    rates = tuple((row.nodes, row.rate) for row in rows if row.rate)
    errors = [half / row.rate for row in rows if (half := row.samples_per_s_per_gpu_2sigma) and row.rate]
    errors = errors if len(errors) == len(rows) else []
    return Series(first.title, workload, rates, machine, method, tuple(errors))
