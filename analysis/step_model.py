"""The time of one data-parallel CLAP step as a sum of physical terms, two of which have a fitted size.

Stated, not fitted: bytes and FLOPs follow from the model and the loss; bandwidths, latency and peaks are the machine's.
Fitted: the time each rank works by itself, and the scale of the delay that waiting for the slowest rank adds. Whatever else
grows and isn't stated is counted there.

Beside it stand laws without any physics (`clap_ds.analysis.growth`): what foretells measured scales best from smaller ones is
what a projection goes by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.growth import LAWS, Measured, growth
from clap_ds.analysis.repeats import ratio_uncertainty
from clap_ds.analysis.table import Row, by_series, choose_series, count_of, in_doubt
from clap_ds.config.errors import UserError

BACKWARD_SHARE = 0.6
"""Share of a rank's step during which gradients can be reduced."""
LOSS_PASSES = {"gather_with_grad": (12.5, 17.2), "exact_local": (5.0, 3.4)}
"""Times that fp32 logits and everybody's features cross the GPU's memory, forward and backward (`benchmarks.loss_trace`)."""
MATMUL_EFFICIENCY = 0.3

STEP_MODEL = "step model"
ALL_LAWS = (*LAWS, STEP_MODEL)
FURTHEST = 4
"""Times the largest measured scale that is projected to where nobody asks for more."""
WORST_FIT = 10.0
"""Points of efficiency by which the best law may miss what it is fitted to and still be projected."""

TERMS = ("compute", "gradient all-reduce", "feature exchange", "contrastive loss", "waiting for the slowest")


@dataclass(frozen=True)
class Workload:
    """What is trained: sizes per GPU and step. Parameters are those whose gradients are reduced."""

    batch_per_gpu: int
    joint_dim: int
    num_parameters: float
    gpus_per_node: int = 4

    @property
    def step_samples(self) -> int:
        """Of a GPU; 1 where its batch isn't known (0), so that the seconds of a step are those of a sample."""
        return self.batch_per_gpu or 1


WORKLOADS = {
    "htsat_tiny_roberta_base": Workload(616, 512, 156.20e6),
    "htsat_base_roberta_base": Workload(416, 1024, 199.10e6),
}
"""The published models: parameters as open_clip counts them, less the frozen STFT and mel matrices."""


@dataclass(frozen=True)
class Machine:
    """What it runs on. The defaults are a Jupiter node: 4 GH200 with an NDR200 port each, at 80 % of line rate."""

    node_bytes_per_s: float = 80e9
    """Into (or out of) one node over all its links."""
    gpu_bytes_per_s: float = 150e9
    """Between GPUs of a node."""
    latency_s: float = 10e-6
    """Of a hop between nodes."""
    peak_flops: float = 989e12
    memory_bytes_per_s: float = 4e12


@dataclass(frozen=True)
class Method:
    """How it is trained. The defaults are the published runs': DDP, fp32 gradients, local loss with gathered gradients."""

    overlap: bool = True
    gradient_bytes: int = 4
    """Per parameter on the network."""
    feature_bytes: int = 2
    loss: Literal["gather_with_grad", "exact_local"] = "gather_with_grad"
    bucket_bytes: float = 25e6
    """Gradients sent at a time; torch DDP's default. The last bucket is never hidden."""
    early_gather: bool = False
    """Audio features, the first to be ready, are gathered under the text tower's forward pass."""


def all_reduce_s(num_bytes: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Hierarchical all-reduce: within nodes over their GPUs, between nodes by ring or tree, whichever is quicker."""
    inside = 2 * (gpus_per_node - 1) / gpus_per_node * num_bytes / machine.gpu_bytes_per_s
    hops = math.ceil(math.log2(nodes))
    return inside + 2 * (nodes - 1) / nodes * num_bytes / machine.node_bytes_per_s + 2 * hops * machine.latency_s


def all_gather_s(bytes_per_gpu: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Ring all-gather (or, backwards, reduce-scatter): every node takes in what all others hold."""
    inside = (gpus_per_node - 1) * bytes_per_gpu / machine.gpu_bytes_per_s
    return inside + (nodes - 1) * gpus_per_node * bytes_per_gpu / machine.node_bytes_per_s


@dataclass(frozen=True)
class StepModel:
    """Step time and efficiency at any number of nodes; zero of what is fitted where nothing has been."""

    workload: Workload
    machine: Machine
    method: Method
    compute_s: float = 0.0
    delay_s: float = 0.0
    """Scale of a rank's delay, and `shape` of its growth: as √ranks, which is between the laws without physics."""
    window_s: float = 0.0
    """Time of the backward pass under which gradients can travel."""
    shape: float = 0.5
    stated: bool = True
    """Whether the stated terms cost what they are stated to; of a law without physics they cost nothing."""

    def known_terms_s(self, nodes: int) -> dict[str, float]:
        """Seconds a step of the terms that are not fitted, on all GPUs of the nodes."""
        if not self.stated:
            return dict.fromkeys(TERMS[1:-1], 0.0)
        workload, machine, method, gpus = self.workload, self.machine, self.method, self.workload.gpus_per_node
        gradients = workload.num_parameters * method.gradient_bytes
        reduce = all_reduce_s(gradients, nodes, gpus, machine)
        if method.overlap:
            last = all_reduce_s(min(method.bucket_bytes, gradients), nodes, gpus, machine)
            reduce = max(last, reduce - self.window_s)
        batch = workload.batch_per_gpu
        features = 2 * batch * workload.joint_dim * method.feature_bytes
        exchange = all_gather_s(features, nodes, gpus, machine)
        if method.early_gather:
            text_forward_s = self.window_s * (1 - BACKWARD_SHARE) / BACKWARD_SHARE / 2
            exchange -= min(exchange / 2, text_forward_s)
        # Backward: gradients of all features go back to their ranks; the exact local gradient needs 2 floats a sample.
        exchange += all_gather_s(features if method.loss == "gather_with_grad" else 2 * batch * 4, nodes, gpus, machine)
        logits = 2 * batch * batch * nodes * gpus
        loss = 3 * 2 * logits * workload.joint_dim / (MATMUL_EFFICIENCY * machine.peak_flops)
        logit_passes, feature_passes = LOSS_PASSES[method.loss]
        loss += (logit_passes * 4 * logits + feature_passes * features * nodes * gpus) / machine.memory_bytes_per_s
        return {"gradient all-reduce": reduce, "feature exchange": exchange, "contrastive loss": loss}

    def terms_s(self, nodes: int) -> dict[str, float]:
        """Seconds a step by `TERMS`."""
        waiting = self.delay_s * float(growth(nodes * self.workload.gpus_per_node, self.shape))
        return {"compute": self.compute_s, **self.known_terms_s(nodes), "waiting for the slowest": waiting}

    def step_s(self, nodes: int) -> float:
        return sum(self.terms_s(nodes).values())

    def rate(self, nodes: int) -> float:
        """Samples/s/GPU."""
        return self.workload.step_samples / self.step_s(nodes)

    def efficiency_percent(self, nodes: int, baseline_nodes: int = 1) -> float:
        return 100 * self.rate(nodes) / self.rate(baseline_nodes)

    def with_step(self, step_s: float, nodes: int) -> StepModel:
        """The same, computing for as long as makes a step of `step_s` on that many nodes (negative: it can't)."""
        return replace(self, compute_s=step_s - replace(self, compute_s=0.0).step_s(nodes))


@dataclass(frozen=True)
class Series:
    """A weak-scaling series: what it trained, how and on what, and (nodes, samples/s/GPU), smallest scale first."""

    title: str
    workload: Workload
    rates: tuple[tuple[int, float], ...]
    machine: Machine = Machine()
    method: Method = Method()
    exposed: tuple[tuple[int, float], ...] = ()
    """(nodes, seconds a step) of exposed communication, where a breakdown was measured."""
    errors: tuple[float, ...] = ()
    """± of each rate (95 %) as a share of it; empty where none is known."""

    @property
    def name(self) -> str:
        """Of the model alone."""
        return self.title.partition(",")[0]

    @property
    def laws(self) -> tuple[str, ...]:
        """`ALL_LAWS`; where no batch is known, those that need none."""
        return ALL_LAWS if self.workload.batch_per_gpu else tuple(LAWS)

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    def first(self, count: int) -> Series:
        """Of its smallest scales."""
        return replace(self, rates=self.rates[:count], errors=self.errors[:count])

    def errors_points(self, model: StepModel) -> list[float]:
        """Model minus measurement at every scale, percentage points of efficiency (both over the measured baseline)."""
        percent = self.efficiency_percent
        return [percent(model.rate(nodes)) - percent(rate) for nodes, rate in self.rates]

    def fit(self, law: str = STEP_MODEL) -> StepModel:
        """One of `ALL_LAWS` through the rates, of two node counts or more: least squares on relative step time, in which rates
        weigh by their ±; no parameter is negative."""
        model, measured = self._measured()
        shape, stated = LAWS.get(law, model.shape), law == STEP_MODEL
        compute_s, delay_s = measured.fit(shape, float(stated))
        return replace(model, compute_s=compute_s, delay_s=delay_s, shape=shape, stated=stated)

    def _measured(self) -> tuple[StepModel, Measured]:
        """The step model without what is fitted, and what its fit is to."""
        node_counts, rates = (np.array(values) for values in zip(*self.rates, strict=True))
        times = self.workload.step_samples / rates
        window_s, stated = BACKWARD_SHARE * float(times.min()), STEP_MODEL in self.laws
        model = StepModel(self.workload, self.machine, self.method, window_s=window_s, stated=stated)
        stated_s = np.array([model.step_s(int(nodes)) for nodes in node_counts])
        return model, Measured(node_counts * self.workload.gpus_per_node, times, stated_s, np.array(self.errors))

    def bands(self, node_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """95 % bands of the efficiency that would be measured at each node count; empty under 3 scales, which are too few."""
        if len(self.rates) < 3:
            return {}
        model, measured = self._measured()
        found = {}
        for nodes in node_counts:
            steps = measured.drawn_steps(nodes * self.workload.gpus_per_node, model.step_s(nodes))
            low, high = np.percentile(100 * measured.times[0] / steps, (2.5, 97.5))
            found[nodes] = float(low), float(high)
        return found

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
            law: sum(
                abs(small.efficiency_percent(small.fit(law).rate(nodes)) - actual) for small, nodes, actual in cases
            )
            for law in self.laws
        }
        return {law: found[law] / len(cases) for law in sorted(found, key=lambda law: found[law])} if cases else {}

    def best_law(self) -> str:
        """What foretold the scales best; where that can't be told the step model, or √n, as which its waiting grows."""
        return next(iter(self.foretold_points()), STEP_MODEL if STEP_MODEL in self.laws else "a + b·√n")

    def doubt(self) -> str:
        """Why nothing is to be projected from these rates; empty where nothing speaks against it."""
        largest = max(map(abs, self.errors_points(self.fit(self.best_law()))))
        if largest > WORST_FIT:
            return f"the best law, {self.best_law()}, misses what was measured by up to {largest:.1f} points"
        errors = self.errors or (None,) * len(self.rates)
        for (nodes, rate), error in zip(self.rates, errors, strict=True):
            percent = self.efficiency_percent(rate)
            around = ratio_uncertainty(percent, error and percent * error, 1.0, errors[0])
            if in_doubt(percent, around):
                return (
                    f"{count_of(nodes, 'node')} have {percent:.1f} % of the smallest scale's rate per GPU, more than 100 by "
                    "more than its ±: the smallest scale's runs are in doubt"
                )
        return ""


def band_text(bands: Mapping[int, tuple[float, float]], nodes: int) -> str:
    return "{:.1f}–{:.1f}".format(*bands[nodes]) if bands else ""


def node_counts(series: Series, gpus: Sequence[int] = ()) -> list[int]:
    """Measured node counts, and beyond them those that fill with so many `gpus`, or doublings to `FURTHEST` times as far; of a
    series that is in doubt the measured ones. UserError where none of the `gpus` fills whole nodes."""
    measured, per_node = [nodes for nodes, _ in series.rates], series.workload.gpus_per_node
    wanted = gpus or [measured[-1] * per_node * 2**power for power in range(1, FURTHEST.bit_length())]
    whole = [count // per_node for count in wanted if count >= per_node and count % per_node == 0]
    if not whole:
        raise UserError(f"--project_gpus {' '.join(map(str, gpus))}: none fills whole nodes of {per_node} GPUs")
    return sorted({*measured, *whole}) if not series.doubt() else measured


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
    exposed = tuple((row.nodes, seconds) for row in rows if (seconds := row.exposed_communication_s) is not None)
    errors = [half / row.rate for row in rows if (half := row.samples_per_s_per_gpu_2sigma) and row.rate]
    errors = errors if len(errors) == len(rows) else []
    return Series(first.title, workload, rates, machine, method, exposed, tuple(errors))
