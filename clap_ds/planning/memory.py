"""A rank's peak memory by part, and the largest micro-batch that a GPU has room for.

Live tensors are `step.py`'s; what a driver, libraries and the allocator need beyond them is assumed here.
"""

from __future__ import annotations

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
"""Micro-batches are looked for in multiples of this."""
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


def largest_micro_batch(peak_gib: Callable[[int], float], start: int, limit_gib: float) -> int | None:
    """Largest multiple of 8 whose peak is within the limit; None where 8 is too much.

    Peaks are taken to grow with the size, between two known ones in proportion to it: the next size tried is where the limit
    would be met.
    """
    fits, too_large = 0, max(1, start // MULTIPLE)  # in multiples
    below, above = 0.0, peak_gib(MULTIPLE * too_large)
    while above <= limit_gib:
        fits, below, too_large = too_large, above, 2 * too_large
        above = peak_gib(MULTIPLE * too_large)
    while too_large - fits > 1:
        share = (limit_gib - below) / (above - below)
        size = min(max(fits + int(share * (too_large - fits)), fits + 1), too_large - 1)
        peak = peak_gib(MULTIPLE * size)
        fits, below, too_large, above = (
            (size, peak, too_large, above) if peak <= limit_gib else (fits, below, size, peak)
        )
    return MULTIPLE * fits or None
