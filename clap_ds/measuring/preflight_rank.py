"""One rank of `launch/preflight.py`: all-reduces a buffer of the gradient's size, checks the sum, and times links and
processors.

A launcher starts this file by its path, with the package on PYTHONPATH: `preflight_rank.py OUTPUT MEGABYTES`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from clap_ds.dist.agreement import gather
from clap_ds.dist.distributed import Ranks, initialize, run_command
from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops
from clap_ds.record.clock import seconds

TIMEOUT_S = 180.0  # of a collective: hosts that can't hear each other are what this is to find
REPEATS = 3
LARGEST_LINK_BUFFER = 32_000_000
PIECE = 2**20  # elements, an even number


def main(ranks: Ranks) -> None:
    output, megabytes = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    device = initialize(ranks, compile_cpu_collective=False, collective_timeout_s=TIMEOUT_S)
    num_elements = max(1, int(float(megabytes) * 1e6 / 2))
    wrong, best_s = _all_reduce(num_elements, ranks, device)
    links = _links(min(num_elements, LARGEST_LINK_BUFFER), ranks, device)
    tflops = measure_matmul_tflops(device, None if device.type == "cuda" else 512, warm_up_s=0.2, measure_s=0.5)
    everyone = gather((wrong, best_s, links, tflops))
    if ranks.is_first:
        size = ranks.world_size
        slowest_s = max(each[1] for each in everyone)
        measured = {
            "wrong_elements": [each[0] for each in everyone],
            # Bytes a ring sends and receives per rank over the time of the slowest rank: comparable between world sizes.
            "bus_gb_per_s": 2 * (size - 1) / size * num_elements * 2 / slowest_s / 1e9,
            "links_gb_per_s": [link for each in everyone for link in each[2]],
            "tflops": [each[3] for each in everyone],
        }
        Path(output).write_text(json.dumps(measured, indent=2) + "\n")


def _all_reduce(num_elements: int, ranks: Ranks, device: torch.device) -> tuple[int, float]:
    """Wrong elements after an all-reduce whose sum is known exactly, and the best seconds of some repeats.

    Filled and looked through a piece at a time, for a host may have as many such buffers in memory as ranks.
    """
    # Small integers: exact in bf16 up to 256, whatever the order of the sum; above that a sum may round.
    pattern = torch.arange(PIECE, device=device) % 2
    expected = (pattern * ranks.world_size).to(torch.bfloat16)
    tolerance = expected * (2**-8) * (ranks.world_size > 256) * ranks.world_size**0.5
    buffer = torch.empty(num_elements, dtype=torch.bfloat16, device=device)
    pieces = buffer.split(PIECE)
    wrong, best = 0, float("inf")
    for _ in range(REPEATS):
        for piece in pieces:
            piece.copy_(pattern[: len(piece)])
        dist.barrier()
        best = min(best, seconds(partial(dist.all_reduce, buffer), device))
        wrong = max(wrong, sum(_num_wrong(piece, expected, tolerance) for piece in pieces))
    return wrong, best


def _num_wrong(piece: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> int:
    """Elements that are further off than the tolerance, or NaN."""
    fits = (piece - expected[: len(piece)]).abs() <= tolerance[: len(piece)]
    return len(piece) - int(fits.sum())


def _links(num_elements: int, ranks: Ranks, device: torch.device) -> list[tuple[int, int, float]]:
    """GB/s between neighbouring hosts, by the first rank of each: in three rounds, so that no host is in two pairs at once."""
    leads = [rank for rank in gather(ranks.rank if ranks.local_rank == 0 else None) if rank is not None]
    num_hosts = len(leads)
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for first in range(num_hosts if num_hosts > 2 else num_hosts - 1):
        second = (first + 1) % num_hosts
        rounds[2 if second < first else first % 2].append((first, second))
    buffer = torch.ones(num_elements, dtype=torch.bfloat16, device=device)
    found = []
    for pairs in rounds:
        dist.barrier()
        for first, second in pairs:
            if ranks.rank in (leads[first], leads[second]):
                other = leads[second] if ranks.rank == leads[first] else leads[first]
                exchange = partial(_exchange, buffer, ranks.rank, other)
                best = min(seconds(exchange, device) for _ in range(REPEATS))
                if ranks.rank == leads[first]:
                    found.append((first, second, 2 * buffer.numel() * 2 / best / 1e9))
    return found


def _exchange(buffer: torch.Tensor, own: int, other: int) -> None:
    """Send and receive, the lower rank first."""
    for sends in (own < other, own > other):
        (dist.send if sends else dist.recv)(buffer, other)


if __name__ == "__main__":
    run_command(main)
