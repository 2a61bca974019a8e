"""Measure an all-reduce over all ranks, and check its sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import gather
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from clap_ds.metrics.timers import seconds

REPEATS = 3  # the first one also connects the ranks
FP32_BYTES = 4


def join_and_time_all_reduce(ranks: Ranks, num_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Join the process group, with a time limit for collectives, and return `time_all_reduce`. Hosts
    may have different code."""
    device = initialize(ranks, collective_timeout_s=timeout_s, allow_mixed_code=True)
    return time_all_reduce(num_bytes, device)


def time_all_reduce(num_bytes: int, device: torch.device) -> dict[str, Any]:
    """Sum ones over all ranks. A collective.

    Returns:
        `seconds`: the slowest rank's time, each rank's being the shortest of its repeats.
        `bus_gb_per_s`: bytes that a rank sends in a ring all-reduce, in GB, over `seconds`.
        `num_wrong`: wrong elements of the sum by rank; on rank 0 only of all ranks.
    """
    world_size = dist.get_world_size()
    buffer = torch.empty(num_bytes // FP32_BYTES, device=device)
    times_s = []
    num_wrong = 0
    for _ in range(REPEATS):
        buffer.fill_(1.0)
        dist.barrier()
        times_s.append(seconds(partial(dist.all_reduce, buffer), device))
        # NaN differs from every number, so it counts as wrong, too.
        num_wrong = max(num_wrong, int((buffer != world_size).sum()))
    by_rank = gather((num_wrong, min(times_s)))
    slowest_s = max(rank_s for _, rank_s in by_rank)
    # A ring sends 2 (n - 1) / n of the buffer per rank, which makes the rate comparable across
    # numbers of ranks. nccl-tests call it the bus bandwidth.
    sent_bytes = 2 * (world_size - 1) / world_size * buffer.nbytes
    return {
        "seconds": slowest_s,
        "bus_gb_per_s": sent_bytes / slowest_s / 1e9,
        "num_wrong": [wrong for wrong, _ in by_rank],
    }
