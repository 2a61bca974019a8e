"""Predict what communication adds to a step, by latencies and bandwidths of the planned cluster.

Gradients are reduced during the backward pass, and audio features are gathered during the text
tower's forward pass. What remains is exposed: the gradients that are complete last, and the text
features. Meanwhile NCCL's kernels occupy processors. Jitter of nodes isn't included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Fraction of the data sheet's bandwidths that large messages reach (assumed), by estimate.
BANDWIDTH_SHARE = {"low": 0.7, "middle": 0.85, "high": 0.95}
# Latencies per message between GPUs of a node and between nodes (assumed).
LINK_LATENCY_S = 1e-6
NETWORK_LATENCY_S = 5e-6
# Fraction of the processors that NCCL's kernels occupy: 16 to 32 channels of 132 (assumed).
OCCUPIED = 0.15


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. Bandwidths are one way."""

    num_nodes: int
    gpus_per_node: int
    # Of a GPU to the others of its node.
    link_gbytes_per_s: float
    # Of a node to the others, all adapters together.
    network_gbytes_per_s: float

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step, and the computation that hides it.

    Attributes:
        gradient_bytes: all gradients.
        last_gradient_bytes: those that are complete only at the end of the backward pass.
        last_backward_s: the backward pass after the others are complete.
        feature_bytes: a rank's features of one tower, gathered `num_gathers` times.
        text_forward_s: the text tower's forward pass, which hides the gather of audio features.
        columns_s: the part of the loss that needs no text features of other ranks.
    """

    gradient_bytes: float
    last_gradient_bytes: float
    last_backward_s: float
    feature_bytes: float
    num_gathers: int
    text_forward_s: float
    columns_s: float


def all_reduce_s(num_bytes: float, cluster: Cluster, share: float) -> float:
    """Return the time of an all-reduce: within nodes, between them by a tree, and back."""
    gpus = cluster.gpus_per_node
    nodes = cluster.num_nodes
    link_s = 2 * (gpus - 1) / gpus * num_bytes / (1e9 * share * cluster.link_gbytes_per_s)
    network_s = 2 * (nodes - 1) / nodes * num_bytes / (1e9 * share * cluster.network_gbytes_per_s)
    latency_s = 2 * (gpus - 1) * LINK_LATENCY_S
    latency_s += 2 * math.ceil(math.log2(nodes)) * NETWORK_LATENCY_S
    return link_s + network_s + latency_s


def all_gather_s(num_bytes: float, cluster: Cluster, share: float) -> float:
    """Return the time in which every GPU receives `num_bytes` from each, around a ring in which
    each node's part enters every other node once."""
    gpus = cluster.num_gpus
    nodes = cluster.num_nodes
    received_bytes = (gpus - 1) * num_bytes
    entering_bytes = (gpus - cluster.gpus_per_node) * num_bytes
    link_s = received_bytes / (1e9 * share * cluster.link_gbytes_per_s)
    network_s = entering_bytes / (1e9 * share * cluster.network_gbytes_per_s)
    latency_s = (gpus - nodes) * LINK_LATENCY_S + (nodes - 1) * NETWORK_LATENCY_S
    # Data moves through both at the same time.
    return max(link_s, network_s) + latency_s


def communication_s(traffic: Traffic, cluster: Cluster, estimate: str) -> dict[str, float]:
    """Return the seconds that communication adds to a step, by cause."""
    share = BANDWIDTH_SHARE[estimate]
    early_bytes = traffic.gradient_bytes - traffic.last_gradient_bytes
    early_s = all_reduce_s(early_bytes, cluster, share)
    last_s = all_reduce_s(traffic.last_gradient_bytes, cluster, share)
    gather_s = traffic.num_gathers * all_gather_s(traffic.feature_bytes, cluster, share)
    hidden_s = {
        "gradients": min(early_s, traffic.last_backward_s),
        "audio features": min(gather_s, traffic.text_forward_s),
        "text features": min(gather_s, traffic.columns_s),
    }
    return {
        "gradients": early_s + last_s - hidden_s["gradients"],
        "audio features": gather_s - hidden_s["audio features"],
        "text features": gather_s - hidden_s["text features"],
        # What is hidden slows the kernels that hide it.
        "processors taken by NCCL": OCCUPIED * sum(hidden_s.values()),
    }
