"""Test an all-reduce's result, and measure the bandwidth of it and of links, and each rank's TFLOPS."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import gather, reduce_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.run_records.timers import seconds

REPEATS = 3
LARGEST_LINK_BUFFER = 32_000_000
GPU_SIZE, CPU_SIZE = 8192, 1024  # of matrices


def measure(megabytes: float, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Measure an all-reduce's GB/s and, per rank, wrong elements, TFLOPS and links: two hosts' first ranks and their GB/s.
    Collective; only rank 0's result is complete."""
    num_elements = max(1, int(megabytes * 1e6 / 2))
    wrong, best_s = all_reduce(num_elements, ranks.world_size, device)
    links = _links(min(num_elements, LARGEST_LINK_BUFFER), ranks, device)
    tflops = measure_matmul_tflops(device, 512 if device.type == "cpu" else None, warm_up_s=0.2, measure_s=0.5)
    everyone: list[dict[str, Any]] = gather({"wrong": wrong, "seconds": best_s, "tflops": tflops, "links": links})
    # A ring's bytes per rank over the slowest rank's time: comparable across world sizes.
    slowest_s = max(rank["seconds"] for rank in everyone)
    bus_gb_per_s = 2 * (1 - 1 / ranks.world_size) * num_elements * 2 / slowest_s / 1e9
    return {"bus_gb_per_s": bus_gb_per_s, "ranks": everyone}


def all_reduce(num_elements: int, world_size: int, device: torch.device) -> tuple[int, float]:
    """Count wrong elements after a bf16 all-reduce of ones, and return the best time of several."""
    # Exact up to 256 in any order; larger sums may round.
    tolerance = world_size**1.5 / 256 if world_size > 256 else 0.0
    buffer, wrong, times = torch.empty(num_elements, dtype=torch.bfloat16, device=device), 0, []
    for _ in range(REPEATS):
        buffer.fill_(1.0)
        dist.barrier()
        times.append(seconds(partial(dist.all_reduce, buffer), device))
        fits = (buffer - world_size).abs_() <= tolerance  # False for NaN
        wrong = max(wrong, num_elements - int(fits.sum()))
    return wrong, min(times)


def _links(num_elements: int, ranks: Ranks, device: torch.device) -> list[tuple[int, int, float]]:
    """Measure this rank's links in a ring of hosts, in three rounds so that each host uses one link at a time."""
    leads = reduce_on_rank0(ranks.local_rank == 0, lambda lead: [rank for rank, is_lead in enumerate(lead) if is_lead])
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


def measure_matmul_tflops(
    device: torch.device, size: int | None = None, *, warm_up_s: float = 1.0, measure_s: float = 2.0
) -> float:
    """Measure TFLOPS of square bf16 matmuls, the median over short windows. `size`: rows and columns (None: enough to keep the
    device busy); `warm_up_s`: time for clocks to settle. Data is random: constant data draws less power and runs faster."""
    from torch.utils.benchmark import Timer  # imports setuptools

    size = size or (CPU_SIZE if device.type == "cpu" else GPU_SIZE)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    names = {"matmul": torch.matmul, "a": a, "b": b, "product": torch.empty_like(a)}
    timer = Timer("matmul(a, b, out=product)", globals=names, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=warm_up_s)
    return 2 * size**3 / timer.blocked_autorange(min_run_time=measure_s).median / 1e12
