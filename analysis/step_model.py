"""The time of one data-parallel CLAP step as a sum of physical terms, two of which have a fitted size.

Stated, not fitted: bytes and FLOPs follow from the model and the loss; bandwidths, latency and peaks are the machine's.
Fitted: the time each rank works by itself, and the scale of the delay that waiting for the slowest rank adds. Whatever else
grows and isn't stated is counted there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from clap_ds.analysis.record import positive, section
from clap_ds.config.settings import ClapSettings

BACKWARD_SHARE = 0.6
"""Share of a rank's step during which gradients can be reduced."""
LOSS_PASSES = {"gather_with_grad": (12.5, 17.2), "exact_local": (5.0, 3.4)}
"""Times that fp32 logits and everybody's features cross the GPU's memory, both ways, as traced for a GPU."""
MATMUL_EFFICIENCY = 0.3


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
    "htsat_tiny_roberta_base": Workload(616, 768, 156.66e6),
    "htsat_base_roberta_base": Workload(416, 1024, 199.10e6),
}
"""The published models: parameters as open_clip counts them, less the frozen STFT and mel matrices."""


def workload_of(model: str, batch_per_gpu: int, gpus_per_node: int) -> Workload:
    """A published model's with this batch; without sizes or batch where either isn't known."""
    found = WORKLOADS.get(model) if batch_per_gpu else None
    known = replace(found, batch_per_gpu=batch_per_gpu) if found else Workload(0, 0, 0)
    return replace(known, gpus_per_node=gpus_per_node)


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
    """With `exact_local` audio features, the first to be ready, are gathered under the text tower's forward pass."""
    bucket_bytes: float = 25e6
    """Gradients sent at a time; torch DDP's default. The last bucket is never hidden."""


DEFAULT_BUCKET_MB: float = ClapSettings.model_fields["gradient_bucket_mb"].default


def method_of(config: Mapping[str, Any]) -> Method:
    """How a run was trained, from its configuration; without one, as the published runs were."""
    if not config:
        return Method()
    clap = section(config, "clap")
    bf16, fp16, autocast = (bool(section(config, name).get("enabled")) for name in ("bf16", "fp16", "torch_autocast"))
    features = section(clap, "loss").get("features") or ("bf16" if bf16 or autocast else "fp32")
    return Method(
        overlap=clap.get("gradient_sync", "overlapped") == "overlapped",
        gradient_bytes=2 if bf16 or fp16 or config.get("communication_data_type") in ("bf16", "fp16") else 4,
        feature_bytes=2 if features == "bf16" else 4,
        loss="exact_local",
        bucket_bytes=1e6 * (positive(clap.get("gradient_bucket_mb")) or DEFAULT_BUCKET_MB),
    )


def all_reduce_s(num_bytes: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Hierarchical all-reduce: within nodes over their GPUs, between nodes by ring or tree, whichever is quicker."""
    inside = 2 * (gpus_per_node - 1) / gpus_per_node * num_bytes / machine.gpu_bytes_per_s
    hops = math.ceil(math.log2(nodes))
    return inside + 2 * (nodes - 1) / nodes * num_bytes / machine.node_bytes_per_s + 2 * hops * machine.latency_s


def all_gather_s(bytes_per_gpu: float, nodes: int, gpus_per_node: int, machine: Machine) -> float:
    """Ring all-gather (or, backwards, reduce-scatter): every node takes in what all others hold."""
    inside = (gpus_per_node - 1) * bytes_per_gpu / machine.gpu_bytes_per_s
    return inside + (nodes - 1) * gpus_per_node * bytes_per_gpu / machine.node_bytes_per_s


def growth(ranks: Any, shape: float) -> Any:
    """How waiting for the slowest grows with the ranks, none for one: up to a bound (shape -1), as log P (0), as √P (0.5) or
    as P (1)."""
    return np.log(ranks) if shape == 0 else (np.asarray(ranks, float) ** shape - 1) / shape


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
        workload, machine, method, gpus = self.workload, self.machine, self.method, self.workload.gpus_per_node
        gradients = workload.num_parameters * method.gradient_bytes
        reduce = all_reduce_s(gradients, nodes, gpus, machine)
        if method.overlap:
            last = all_reduce_s(min(method.bucket_bytes, gradients), nodes, gpus, machine)
            reduce = max(last, reduce - self.window_s)
        batch = workload.batch_per_gpu
        features = 2 * batch * workload.joint_dim * method.feature_bytes
        exchange = all_gather_s(features, nodes, gpus, machine)
        # Backward: gradients of all features go back to their ranks; the exact local gradient needs 2 floats a sample.
        if method.loss == "gather_with_grad":
            exchange += all_gather_s(features, nodes, gpus, machine)
        else:
            text_forward_s = self.window_s * (1 - BACKWARD_SHARE) / BACKWARD_SHARE / 2
            exchange -= min(exchange / 2, text_forward_s)
            exchange += all_gather_s(2 * batch * 4, nodes, gpus, machine)
        logits = 2 * batch * batch * nodes * gpus
        loss = 3 * 2 * logits * workload.joint_dim / (MATMUL_EFFICIENCY * machine.peak_flops)
        logit_passes, feature_passes = LOSS_PASSES[method.loss]
        loss += (logit_passes * 4 * logits + feature_passes * features * nodes * gpus) / machine.memory_bytes_per_s
        return {"gradient all-reduce": reduce, "feature exchange": exchange, "contrastive loss": loss}

    def step_s(self, nodes: int) -> float:
        stated = self.known_terms_s(nodes).values() if self.stated else ()
        waiting = self.delay_s * float(growth(nodes * self.workload.gpus_per_node, self.shape))
        return sum([self.compute_s, *stated, waiting])

    def rate(self, nodes: int) -> float:
        """Samples/s/GPU."""
        return self.workload.step_samples / self.step_s(nodes)
