"""One rank of `launch/preflight.py`: all-reduces a buffer of the gradient's size, checks the sum, and times links and
processors.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # By its path, as job scripts start it: of a checkout or of an installed package.
    sys.path[0] = next(str(folder) for folder in Path(__file__).resolve().parents if (folder / "clap_ds").is_dir())

from clap_ds.dist.distributed import Ranks, initialize, run_command

REPEATS = 3


def main(ranks: Ranks) -> None:
    import torch.distributed as dist

    arguments = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    output, megabytes = Path(arguments[0]), float(arguments[1])
    device = initialize(ranks, compile_cpu_collective=False)
    num_elements = max(1, int(megabytes * 1e6 / 2))
    wrong, seconds = _all_reduce(num_elements, ranks, device)
    links = _links(num_elements, ranks, device)
    tflops = _tflops(device)
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (wrong, seconds, links, tflops))
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
        output.write_text(json.dumps(measured, indent=2) + "\n")


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_reduce(num_elements: int, ranks: Ranks, device: Any) -> tuple[int, float]:
    """Wrong elements after an all-reduce whose sum is known exactly, and the best seconds of some repeats."""
    import torch
    import torch.distributed as dist

    # Small integers: exact in bf16 up to 256, whatever the order of the sum.
    pattern = torch.arange(num_elements, device=device) % 2
    expected = (pattern * ranks.world_size).to(torch.bfloat16)
    wrong, best = 0, float("inf")
    for _ in range(REPEATS):
        buffer = pattern.to(torch.bfloat16)
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        tolerance = expected * (2**-8) * (ranks.world_size > 256)  # above 256 a bf16 sum may round
        wrong = max(wrong, int(((buffer - expected).abs() > tolerance * ranks.world_size**0.5).sum()))
    return wrong, best


def _links(num_elements: int, ranks: Ranks, device: Any) -> list[tuple[int, int, float]]:
    """GB/s between neighbouring hosts, by the first rank of each: in three rounds, so that no host is in two pairs at once."""
    import torch
    import torch.distributed as dist

    leads: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(leads, ranks.rank if ranks.local_rank == 0 else None)
    leads = [rank for rank in leads if rank is not None]
    num_hosts = len(leads)
    pairs = [(host, (host + 1) % num_hosts) for host in range(num_hosts if num_hosts > 2 else num_hosts - 1)]
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for first, second in pairs:
        rounds[2 if second < first else first % 2].append((first, second))
    buffer = torch.ones(min(num_elements, 32_000_000), dtype=torch.bfloat16, device=device)
    found = []
    for members in rounds:
        dist.barrier()
        for first, second in members:
            if ranks.rank not in (leads[first], leads[second]):
                continue
            other = leads[second] if ranks.rank == leads[first] else leads[first]
            rate = 0.0
            for _ in range(REPEATS):
                _synchronize(device)
                began = time.perf_counter()
                if ranks.rank < other:
                    dist.send(buffer, other)
                    dist.recv(buffer, other)
                else:
                    dist.recv(buffer, other)
                    dist.send(buffer, other)
                _synchronize(device)
                rate = max(rate, 2 * buffer.numel() * 2 / (time.perf_counter() - began) / 1e9)
            if ranks.rank == leads[first]:
                found.append((first, second, rate))
    return found


def _tflops(device: Any) -> float:
    """Matrix products per second of this rank's processor, in TFLOPS; bf16 on a GPU."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(REPEATS + 2):
        _synchronize(device)
        began = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return float(2 * size**3 / best / 1e12)


if __name__ == "__main__":
    run_command(main)
