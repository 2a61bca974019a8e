"""What hosts do together: whether an all-reduce sums rightly, and how fast it, the links and the processors are.

Leaves starting the ranks and judging their figures to `launch/preflight.py`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops
from clap_ds.ranks.agreement import gather
from clap_ds.ranks.distributed import Ranks
from clap_ds.record.clock import seconds

REPEATS = 3
LARGEST_LINK_BUFFER = 32_000_000
PIECE = 2**20  # elements, an even number


def measure(megabytes: float, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Every rank's clock, wrong elements and TFLOPS, by rank, seconds of the all-reduce, and pairs of neighbouring hosts' first
    ranks with the GB/s between them. A collective; its answer is the same on every rank."""
    dist.barrier()
    clock, num_elements = time.time(), max(1, int(megabytes * 1e6 / 2))
    wrong, best_s = all_reduce(num_elements, ranks.world_size, device)
    links = _links(min(num_elements, LARGEST_LINK_BUFFER), ranks, device)
    tflops = measure_matmul_tflops(device, None if device.type == "cuda" else 512, warm_up_s=0.2, measure_s=0.5)
    everyone: list[dict[str, Any]] = gather(
        {"clock": clock, "wrong": wrong, "seconds": best_s, "tflops": tflops, "links": links}
    )
    # Bytes a ring sends and receives per rank over the time of the slowest rank: comparable between world sizes.
    slowest_s = max(rank["seconds"] for rank in everyone)
    bus_gb_per_s = 2 * (1 - 1 / ranks.world_size) * num_elements * 2 / slowest_s / 1e9
    return {"bus_gb_per_s": bus_gb_per_s, "ranks": everyone}


def all_reduce(num_elements: int, world_size: int, device: torch.device) -> tuple[int, float]:
    """Wrong elements after an all-reduce whose sum is known exactly, and the best seconds of some repeats.

    Filled and looked through a piece at a time, for a host may have as many such buffers in memory as ranks.
    """
    # Small integers: exact in bf16 up to 256, whatever the order of the sum; above that a sum may round.
    pattern = torch.arange(PIECE, device=device) % 2
    expected = (pattern * world_size).to(torch.bfloat16)
    tolerance = expected * (2**-8) * (world_size > 256) * world_size**0.5
    buffer = torch.empty(num_elements, dtype=torch.bfloat16, device=device)
    pieces, wrong, times = buffer.split(PIECE), 0, []
    for _ in range(REPEATS):
        for piece in pieces:
            piece.copy_(pattern[: len(piece)])
        dist.barrier()
        times.append(seconds(partial(dist.all_reduce, buffer), device))
        fits = [(piece - expected[: len(piece)]).abs() <= tolerance[: len(piece)] for piece in pieces]  # NaN doesn't
        wrong = max(wrong, num_elements - sum(int(piece.sum()) for piece in fits))
    return wrong, min(times)


def _links(num_elements: int, ranks: Ranks, device: torch.device) -> list[tuple[int, int, float]]:
    """Ranks and GB/s of the links this rank measured, in a ring of hosts: in three turns, so that none is in two at once."""
    leads = [rank for rank in gather(ranks.rank if ranks.local_rank == 0 else None) if rank is not None]
    buffer, found = torch.ones(num_elements, dtype=torch.bfloat16, device=device), []
    for turn in range(3):
        dist.barrier()
        for place, first in enumerate(leads):
            second = leads[(place + 1) % len(leads)]
            if turn == (2 if second < first else place % 2) and first != second and ranks.rank in (first, second):
                exchange = partial(_exchange, buffer, first + second - ranks.rank, ranks.rank == first)
                best_s = min(seconds(exchange, device) for _ in range(REPEATS))
                found += [(first, second, 2 * buffer.nbytes / best_s / 1e9)] * (ranks.rank == first)
    return found


def _exchange(buffer: torch.Tensor, other: int, sends_first: bool) -> None:
    for sends in (sends_first, not sends_first):
        (dist.send if sends else dist.recv)(buffer, other)
