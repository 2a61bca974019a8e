"""What `project.py` works out: fits, hold-outs, transfers, bands and what-ifs of `clap_ds.analysis.step_model`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2, sqrt
from pathlib import Path

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.runs import InputError
from clap_ds.analysis.step_model import BACKWARD_SHARE, TAIL_INDEX, WORKLOADS, Machine, Method, StepModel, Workload, fit
from clap_ds.analysis.table import Row, read_table_runs, series_title

BAND_TAILS = (1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0, 4.0)
RESAMPLES = 400


@dataclass(frozen=True)
class Measured:
    """One weak-scaling series: what it trained and (nodes, samples/s/GPU), smallest scale first."""

    title: str
    workload: Workload
    rates: tuple[tuple[int, float], ...]

    def efficiency_percent(self, rate: float) -> float:
        return 100 * rate / self.rates[0][1]

    def up_to(self, nodes: int) -> Measured:
        return replace(self, rates=tuple(point for point in self.rates if point[0] <= nodes))


@dataclass(frozen=True)
class Setting:
    """Machine and method that a series ran with."""

    machine: Machine
    method: Method


def read_measured(path: Path, num_parameters: float | None = None, joint_dim: int | None = None) -> Measured:
    """The weak-scaling series of a table.

    Raises:
        InputError: several models in it, fewer than two scales, or model sizes that neither the table nor the options give.
    """
    rows = scaling_table(read_table_runs(path))
    series = list(dict.fromkeys(row.series for row in rows if row.samples_per_s_per_gpu and row.scaling != "strong"))
    if len(series) > 1:
        raise InputError(f"{path}: holds {len(series)} series ({', '.join(map(series_title, rows))}); give one each")
    return measured_of(str(path), rows, num_parameters, joint_dim)


def measured_of(
    name: str, rows: Sequence[Row], num_parameters: float | None = None, joint_dim: int | None = None
) -> Measured:
    """One series' rows as a weak-scaling series; `name` is what an error calls them.

    Raises:
        InputError: fewer than two scales, or model sizes that neither the rows nor the options give.
    """
    rows = [row for row in rows if row.samples_per_s_per_gpu and row.scaling != "strong"]
    if len({row.nodes for row in rows}) < 2:
        raise InputError(f"{name}: weak scaling measured at one node count only; a projection needs at least two")
    return Measured(
        series_title(rows[0]), _workload(name, rows, num_parameters, joint_dim),
        tuple((row.nodes, row.samples_per_s_per_gpu) for row in rows if row.samples_per_s_per_gpu),
    )  # fmt: skip


def _workload(path: str, rows: Sequence[Row], num_parameters: float | None, joint_dim: int | None) -> Workload:
    known = WORKLOADS.get(rows[0].model)
    parameters = num_parameters or (known.num_parameters if known else None)
    dim = joint_dim or (known.joint_dim if known else None)
    batch = rows[0].batch_per_gpu
    per_node = {row.gpus / row.nodes for row in rows}
    if parameters is None or dim is None:
        raise InputError(f"{path}: sizes of {rows[0].model!r} are not known; give --num_parameters and --joint_dim")
    if batch is None:
        raise InputError(f"{path}: no batch_per_gpu; a step's time can't be told from its rate")
    if len(per_node) > 1 or not next(iter(per_node)).is_integer():
        raise InputError(f"{path}: scales have different numbers of GPUs per node; expected one")
    return Workload(batch, dim, parameters, int(next(iter(per_node))))


def errors_points(model: StepModel, measured: Measured) -> list[float]:
    """Model minus measurement at every scale, percentage points of efficiency (both over the measured baseline)."""
    return [
        measured.efficiency_percent(model.rate(nodes)) - measured.efficiency_percent(rate)
        for nodes, rate in measured.rates
    ]


def fit_measured(measured: Measured, setting: Setting, tail_index: float = TAIL_INDEX) -> StepModel:
    return fit(measured.workload, setting.machine, setting.method, measured.rates, tail_index)


def transfer(model: StepModel, measured: Measured, setting: Setting) -> StepModel:
    """Another series described with this model's delays: only its smallest scale's speed is its own."""
    nodes, rate = measured.rates[0]
    window = model.window_s * (measured.workload.batch_per_gpu / rate) / (
        model.workload.batch_per_gpu / model.rate(nodes)
    )  # fmt: skip
    empty = StepModel(measured.workload, setting.machine, setting.method, 0.0, model.delay_s, window, model.tail_index)
    return replace(empty, compute_s=measured.workload.batch_per_gpu / rate - sum(empty.terms_s(nodes).values()))


def log_linear_efficiency(measured: Measured, nodes: int) -> float:
    """The plain rival: step time = a + b·log2(nodes) + c·nodes by least squares, as efficiency in percent at `nodes`."""
    import numpy as np

    times = np.array([1 / rate for _, rate in measured.rates])
    columns = np.array([[1.0, log2(count), count] for count, _ in measured.rates]) / times[:, None]
    weights, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    return measured.efficiency_percent(float(1 / (weights @ np.array([1.0, log2(nodes), nodes]))))


def prediction_bands(
    measured: Measured, setting: Setting, node_counts: Sequence[int], seed: int = 0
) -> dict[int, tuple[float, float]]:
    """95 % bands of efficiency at each node count, by refitting to the fitted table with its residuals' noise put back.

    Each refit also chooses the tail index anew among `BAND_TAILS`. So the bands hold the parameters' and the index's
    uncertainty and one measurement's noise, but not the choice of terms. Empty where a table has too few scales (under 4)
    to tell noise from parameters.
    """
    if len(measured.rates) < 4:
        return {}
    model = fit_measured(measured, setting)
    noise = sqrt(_squares(model, measured) / (len(measured.rates) - 2))
    generator = random.Random(seed)
    repeats = {nodes: random.Random(f"{seed} {nodes}") for nodes in node_counts}
    drawn: dict[int, list[float]] = {nodes: [] for nodes in node_counts}
    for _ in range(RESAMPLES):
        rates = tuple((nodes, model.rate(nodes) * (1 + generator.gauss(0, noise))) for nodes, _ in measured.rates)
        again = replace(measured, rates=rates)
        best = min(
            (fit_measured(again, setting, tail) for tail in BAND_TAILS), key=lambda found: _squares(found, again)
        )
        for nodes in node_counts:
            drawn[nodes].append(measured.efficiency_percent(best.rate(nodes) * (1 + repeats[nodes].gauss(0, noise))))
    cut = RESAMPLES // 40
    return {nodes: (sorted(values)[cut], sorted(values)[-cut - 1]) for nodes, values in drawn.items()}


def _squares(model: StepModel, measured: Measured) -> float:
    """Sum of squared relative residuals."""
    return sum((rate / model.rate(nodes) - 1) ** 2 for nodes, rate in measured.rates)


def what_ifs(model: StepModel) -> dict[str, StepModel]:
    """The model with one thing changed at a time."""
    machine, method = model.machine, model.method
    half = replace(model, compute_s=model.compute_s / 2, window_s=model.window_s / 2)
    slow = replace(machine, node_bytes_per_s=machine.node_bytes_per_s / 4)
    overlapped = "without overlap of the all-reduce" if method.overlap else "with overlap of the all-reduce"
    return {
        "as fitted": model,
        overlapped: replace(model, method=replace(method, overlap=not method.overlap)),
        "exact local loss": replace(model, method=replace(method, loss="exact_local", early_gather=True)),
        "bf16 all-reduce": replace(model, method=replace(method, gradient_bytes=2)),
        "compute twice as fast": half,
        "links a quarter as fast": replace(model, machine=slow),
        "a quarter of the delays": replace(model, delay_s=model.delay_s / 4),
    }


def engine_methods() -> dict[str, Method]:
    """This project's loss and all-reduce, each with and without, bf16 on the wire throughout."""
    without = Method(overlap=False, gradient_bytes=2, feature_bytes=2, loss="gather_with_grad")
    exact = replace(without, loss="exact_local", early_gather=True)
    return {
        "neither": without,
        "exact local loss": exact,
        "overlapped all-reduce": replace(without, overlap=True),
        "both": replace(exact, overlap=True),
    }


def at_rate(model: StepModel, rate: float, nodes: int, delays_shrink: bool) -> StepModel:
    """The model with compute so short that it reaches `rate` samples/s/GPU on `nodes` nodes.

    Args:
        delays_shrink: delays shorten with the step (work that varies), instead of staying (what the machine does).

    Raises:
        InputError: so fast that what is not compute alone takes longer.
    """
    step_s = model.workload.batch_per_gpu / rate
    share = step_s / sum(model.terms_s(nodes).values())
    delay = model.delay_s * share if delays_shrink else model.delay_s
    faster = replace(model, compute_s=0.0, window_s=BACKWARD_SHARE * step_s, delay_s=delay)
    compute = step_s - sum(faster.terms_s(nodes).values())
    if compute <= 0:
        raise InputError(f"{rate:g} samples/s/GPU on {nodes} nodes: communication and delays alone take longer")
    return replace(faster, compute_s=compute)


def node_counts_of(measured: Measured, gpus: Sequence[int]) -> list[int]:
    per_node = measured.workload.gpus_per_node
    return [count // per_node for count in gpus if count >= per_node and count % per_node == 0]
