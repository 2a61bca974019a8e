"""The time of one data-parallel CLAP step as a sum of physical terms, two of which have a fitted size.

Stated, not fitted: bytes and FLOPs follow from the model and the loss; bandwidths, latency and peaks are the machine's.
Fitted: the time each rank works by itself, and the scale of the delay that waiting for the slowest rank adds.

Waiting for the slowest of P ranks costs the expected maximum of P independent delays. For delays with a power-law tail of
index a (the chance of more than t is about (s/t)^a) that is s·Γ(1 - 1/a)·P^(1/a), the mean of Fréchet's law. The index,
`TAIL_INDEX`, was chosen on the published HTSAT-tiny table alone, all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TAIL_INDEX = 2.0
BACKWARD_SHARE = 0.6
"""Share of a rank's step during which gradients can be reduced."""
LOGIT_PASSES = 8
"""Times the fp32 logits cross the GPU's memory, forward and backward."""
MATMUL_EFFICIENCY = 0.3

TERMS = ("compute", "gradient all-reduce", "feature exchange", "contrastive loss", "waiting for the slowest")
Loss = Literal["gather_with_grad", "exact_local"]


@dataclass(frozen=True)
class Workload:
    """What is trained. Sizes per GPU and step."""

    batch_per_gpu: int
    joint_dim: int
    num_parameters: float
    """Trained ones: those whose gradients are reduced."""
    gpus_per_node: int = 4


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
    """Of one hop between nodes."""
    peak_flops: float = 989e12
    memory_bytes_per_s: float = 4e12


@dataclass(frozen=True)
class Method:
    """How it is trained. The defaults are the published runs': DDP, fp32 gradients, local loss with gathered gradients."""

    overlap: bool = True
    gradient_bytes: int = 4
    """Per parameter on the network."""
    feature_bytes: int = 2
    loss: Loss = "gather_with_grad"
    bucket_bytes: float = 25e6
    """Gradients sent at a time; torch DDP's default and this project's. The last bucket is never hidden."""
    early_gather: bool = False
    """Audio features, the first to be ready, are gathered under the text tower's forward pass."""


def all_reduce_s(num_bytes: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Hierarchical all-reduce: within nodes over their GPUs, between nodes by ring or tree, whichever is quicker."""
    inside = 2 * (gpus_per_node - 1) / gpus_per_node * num_bytes / machine.gpu_bytes_per_s
    if nodes == 1:
        return inside
    hops = min(nodes - 1, math.ceil(math.log2(nodes)))
    return inside + 2 * (nodes - 1) / nodes * num_bytes / machine.node_bytes_per_s + 2 * hops * machine.latency_s


def all_gather_s(bytes_per_gpu: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Ring all-gather (or, backwards, reduce-scatter): every node takes in what all others hold."""
    inside = (gpus_per_node - 1) * bytes_per_gpu / machine.gpu_bytes_per_s
    if nodes == 1:
        return inside
    return inside + (nodes - 1) * gpus_per_node * bytes_per_gpu / machine.node_bytes_per_s


def known_terms_s(
    workload: Workload, machine: Machine, method: Method, nodes: int, window_s: float
) -> dict[str, float]:
    """Seconds a step of the terms that are not fitted.

    Args:
        nodes: node count, all of `workload.gpus_per_node` GPUs.
        window_s: time of the backward pass under which gradients can travel.
    """
    gpus = workload.gpus_per_node
    gradients = workload.num_parameters * method.gradient_bytes
    reduce = all_reduce_s(gradients, nodes, gpus, machine)
    if method.overlap:
        last = all_reduce_s(min(method.bucket_bytes, gradients), nodes, gpus, machine)
        reduce = max(last, reduce - window_s)
    batch, ranks = workload.batch_per_gpu, nodes * gpus
    features = 2 * batch * workload.joint_dim * method.feature_bytes
    exchange = all_gather_s(features, nodes, gpus, machine)
    if method.early_gather:
        text_forward_s = window_s * (1 - BACKWARD_SHARE) / BACKWARD_SHARE / 2
        exchange -= min(exchange / 2, text_forward_s)
    # Backward: gradients of all features go back to their ranks; the exact local gradient needs 2 floats a sample instead.
    backward_bytes = features if method.loss == "gather_with_grad" else 2 * batch * 4
    exchange += all_gather_s(backward_bytes, nodes, gpus, machine)
    logits = 2 * batch * batch * ranks
    flops = 3 * 2 * logits * workload.joint_dim
    loss = flops / (MATMUL_EFFICIENCY * machine.peak_flops)
    loss += LOGIT_PASSES * 4 * logits / machine.memory_bytes_per_s
    return {"gradient all-reduce": reduce, "feature exchange": exchange, "contrastive loss": loss}


def expected_slowest(ranks: int, tail_index: float = TAIL_INDEX) -> float:
    """Expected maximum of as many power-law delays as there are ranks, in units of their scale."""
    return math.gamma(1 - 1 / tail_index) * ranks ** (1 / tail_index)


@dataclass(frozen=True)
class StepModel:
    """A fitted model: step time and efficiency at any number of nodes."""

    workload: Workload
    machine: Machine
    method: Method
    compute_s: float
    delay_s: float
    """Scale of a rank's delay."""
    window_s: float
    tail_index: float = TAIL_INDEX

    def terms_s(self, nodes: int) -> dict[str, float]:
        """Seconds a step by `TERMS`."""
        known = known_terms_s(self.workload, self.machine, self.method, nodes, self.window_s)
        ranks = nodes * self.workload.gpus_per_node
        waiting = self.delay_s * expected_slowest(ranks, self.tail_index)
        return {"compute": self.compute_s, **known, "waiting for the slowest": waiting}

    def rate(self, nodes: int) -> float:
        """Samples/s/GPU."""
        return self.workload.batch_per_gpu / sum(self.terms_s(nodes).values())

    def efficiency_percent(self, nodes: int, baseline_nodes: int = 1) -> float:
        return 100 * self.rate(nodes) / self.rate(baseline_nodes)


def fit(
    workload: Workload,
    machine: Machine,
    method: Method,
    rates: Sequence[tuple[int, float]],
    tail_index: float = TAIL_INDEX,
) -> StepModel:
    """Least squares on relative step time over (nodes, samples/s/GPU); neither parameter may be negative.

    Raises:
        ValueError: fewer than two different node counts.
    """
    if len({nodes for nodes, _ in rates}) < 2:
        raise ValueError("a fit needs at least two node counts")
    times = [workload.batch_per_gpu / rate for _, rate in rates]
    window = BACKWARD_SHARE * min(times)
    sums = [0.0] * 5
    for (nodes, _), time in zip(rates, times, strict=True):
        known = sum(known_terms_s(workload, machine, method, nodes, window).values())
        one = 1 / time
        slowest = expected_slowest(nodes * workload.gpus_per_node, tail_index) / time
        rest = (time - known) / time
        products = (one * one, one * slowest, slowest * slowest, one * rest, slowest * rest)
        sums = [total + product for total, product in zip(sums, products, strict=True)]
    aa, ab, bb, ay, by = sums
    determinant = aa * bb - ab * ab
    compute, delay = (bb * ay - ab * by) / determinant, (aa * by - ab * ay) / determinant
    if delay < 0:
        compute, delay = ay / aa, 0.0
    if compute < 0:
        compute, delay = 0.0, by / bb
    return StepModel(workload, machine, method, compute, max(delay, 0.0), window, tail_index)
