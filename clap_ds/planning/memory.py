"""A rank's peak memory by part, and the largest micro-batch that a GPU has room for.

Live tensors are `step.py`'s; what a driver, libraries and the allocator need beyond them is assumed here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from clap_ds.planning.step import Step

GIB = 2**30
CONTEXT_GIB = 0.7
"""CUDA context, kernels and cuBLAS workspace: 0.5 to 0.8 on H100 (assumed)."""
NCCL_GIB = 0.8
"""Buffers of its channels, where there is more than one rank (assumed)."""
FRAGMENTATION = 0.03
"""Of live tensors, what PyTorch's allocator holds on top (assumed; blocks of one step come again in the next)."""
MULTIPLE = 8
"""Micro-batches are looked for in multiples of this, as by `launch/micro_batch.py`."""
LEAP = 4
MOST_SDPA_BLOCKS = 65_535
"""Batch × windows that PyTorch's memory-efficient attention takes."""
_NAMES = {"audio": "audio activations", "text": "text activations"}


def memory_parts(step: Step, world_size: int, loss_bytes: int = 0) -> dict[str, float]:
    """GiB by part at the peak, largest first; their sum is the peak.

    Args:
        loss_bytes: what the loss needs beyond what was recorded, of more ranks.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for (part, _), num_bytes in step.recorded.at_peak.items():
        found[_NAMES.get(part, part)] += num_bytes / GIB
    found["loss"] += loss_bytes / GIB
    found["fragmentation (assumed)"] = FRAGMENTATION * sum(found.values())
    found["context and libraries (assumed)"] = CONTEXT_GIB + NCCL_GIB * (world_size > 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit_gib: float, most: float = math.inf
) -> int | None:
    """Largest multiple of 8 up to `most` whose peak is within the limit; None where 8 is too much.

    Peaks are taken to grow linearly: two of them give the answer, which a third confirms or, where it is too large, mends.
    """
    low = max(MULTIPLE, start // 2 // MULTIPLE * MULTIPLE)
    high = max(2 * low, start)
    peaks = {size: peak_gib(size) for size in (low, high)}
    while True:
        slope = (peaks[high] - peaks[low]) / (high - low)
        # Small batches may need less than what the update of the weights does, which doesn't grow.
        wanted = low + (limit_gib - peaks[low]) / slope if slope > 0 else LEAP * high
        size = int(min(wanted, most)) // MULTIPLE * MULTIPLE
        if size < MULTIPLE:
            return None
        if size in peaks:
            return size if peaks[size] <= limit_gib else (size - MULTIPLE) or None
        peaks[size] = peak_gib(size)
        if peaks[size] > limit_gib:
            low, high = sorted((low, size))
        elif slope > 0:
            return size
        else:
            low, high = high, size
