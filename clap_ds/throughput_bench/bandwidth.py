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
LARGEST_LINK_BUFFER = 16_000_000


def measure(megabytes: float, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Measure an all-reduce's GB/s, each rank's wrong elements, and GB/s between each host's first
    rank and the next host's. A collective."""
    buffer = torch.empty(max(1, int(megabytes * 1e6 / 4)), device=device)
    wrong = 0
    times = []
    links = []
    for _ in range(REPEATS):
        buffer.fill_(1.0)
        dist.barrier()
        times.append(seconds(partial(dist.all_reduce, buffer), device))
        wrong = max(wrong, int((buffer != ranks.world_size).sum()))
    part = buffer[:LARGEST_LINK_BUFFER]
    firsts = reduce_on_rank0(
        ranks.local_rank, lambda local: [rank for rank, number in enumerate(local) if number == 0]
    )
    for pair in pairwise(firsts):
        dist.barrier()
        if ranks.rank in pair:
            best_s = min(
                seconds(partial(_exchange, part, ranks.rank, *pair), device) for _ in range(REPEATS)
            )
            links += [(*pair, 2 * part.nbytes / best_s / 1e9)] * (ranks.rank == pair[0])
    everyone: list[dict[str, Any]] = gather({"wrong": wrong, "links": links, "seconds": min(times)})
    # A ring's bytes per rank over the slowest rank's time: comparable across world sizes.
    sent = 2 * (1 - 1 / ranks.world_size) * buffer.nbytes
    return {
        "bus_gb_per_s": sent / max(each["seconds"] for each in everyone) / 1e9,
        "ranks": everyone,
    }


def _exchange(buffer: torch.Tensor, rank: int, first: int, second: int) -> None:
    """Send a buffer from the first rank to the second and back."""
    for sends in (rank == first, rank == second):
        (dist.send if sends else dist.recv)(buffer, first + second - rank)
