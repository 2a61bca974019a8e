"""Test an all-reduce's result, and measure the bandwidth of it and of links between hosts."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import gather, reduce_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.metrics.timers import seconds

REPEATS = 3
# Elements: 64 MB.
LARGEST_LINK_BUFFER = 16_000_000


def measure(megabytes: float, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Measure an all-reduce's GB/s, each rank's wrong elements, and GB/s between each host's first
    rank and the next host's. A collective."""
    # fp32 has 4 bytes.
    buffer = torch.empty(max(1, int(megabytes * 1e6 / 4)), device=device)
    num_wrong = 0
    times_s = []
    for _ in range(REPEATS):
        buffer.fill_(1.0)
        # The timed operation must not include waiting for late ranks.
        dist.barrier()
        times_s.append(seconds(partial(dist.all_reduce, buffer), device))
        # Each element is the sum of a one of each rank.
        num_wrong = max(num_wrong, int((buffer != ranks.world_size).sum()))
    links = _measure_links(buffer[:LARGEST_LINK_BUFFER], ranks, device)
    results: list[dict[str, Any]] = gather(
        {"wrong": num_wrong, "links": links, "seconds": min(times_s)}
    )
    # A ring's bytes per rank over the slowest rank's time: comparable across world sizes.
    sent_bytes = 2 * (1 - 1 / ranks.world_size) * buffer.nbytes
    slowest_s = max(result["seconds"] for result in results)
    return {"bus_gb_per_s": sent_bytes / slowest_s / 1e9, "ranks": results}


def _measure_links(
    buffer: torch.Tensor, ranks: Ranks, device: torch.device
) -> list[tuple[int, int, float]]:
    """Return the pairs of hosts of which this is the first one's first rank: both ranks and GB/s,
    of both directions together."""
    links = []
    first_ranks = reduce_on_rank0(ranks.local_rank, _ranks_with_local_rank_0)
    for sender, receiver in pairwise(first_ranks):
        dist.barrier()
        if ranks.rank not in (sender, receiver):
            continue
        exchange = partial(_exchange, buffer, ranks.rank, sender, receiver)
        best_s = min(seconds(exchange, device) for _ in range(REPEATS))
        if ranks.rank == sender:
            links.append((sender, receiver, 2 * buffer.nbytes / best_s / 1e9))
    return links


def _ranks_with_local_rank_0(local_ranks: list[int]) -> list[int]:
    return [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]


def _exchange(buffer: torch.Tensor, rank: int, sender: int, receiver: int) -> None:
    """Send a buffer from one rank to another and back."""
    if rank == sender:
        dist.send(buffer, receiver)
        dist.recv(buffer, receiver)
    else:
        dist.recv(buffer, sender)
        dist.send(buffer, sender)
