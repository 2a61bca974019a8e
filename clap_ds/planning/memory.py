"""A rank's peak memory by part, and the largest micro-batch that a GPU has room for."""

from __future__ import annotations

from collections.abc import Callable

from clap_ds.planning.step import Step

GIB = 2**30
CONTEXT_GIB = 0.7
"""CUDA context, kernels and cuBLAS workspace: 0.5 to 0.8 on H100 (assumed)."""
NCCL_GIB = 0.8
"""Buffers of its channels, where there is more than one rank (assumed)."""
FRAGMENTATION = 0.03
"""Of live tensors, what PyTorch's allocator holds on top (assumed; blocks of one step come again in the next)."""
MULTIPLE, LEAP, MOST_TRIES = 8, 4, 8
_NAMES = {"audio": "audio activations", "text": "text activations"}


def memory_parts(step: Step, world_size: int) -> dict[str, float]:
    """GiB by part at the peak, largest first; their sum is the peak."""
    found = {_NAMES.get(part, part): num_bytes / GIB for part, num_bytes in step.recorded.at_peak.items()}
    found["fragmentation (assumed)"] = FRAGMENTATION * sum(found.values())
    found["context and libraries (assumed)"] = CONTEXT_GIB + NCCL_GIB * (world_size > 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def largest_micro_batch(peak_gib: Callable[[int], float], start: int, limit_gib: float) -> int | None:
    """Largest multiple of 8 whose peak is within the limit; None where 8 is too much.

    Each peak takes a recorded step, so that few are tried: next, where the line through the last two meets the limit.
    """
    peaks = {start: peak_gib(start)}
    last, share = start, limit_gib / peaks[start]
    wanted = start * (max(share, 2) if share >= 1 else share)
    for _ in range(MOST_TRIES):
        size = max(int(wanted) // MULTIPLE, 1) * MULTIPLE
        if size in peaks:
            break
        peaks[size] = peak_gib(size)
        before, last = last, size
        slope = (peaks[last] - peaks[before]) / (last - before)
        # Small batches may need less than what the update of the weights does, which doesn't grow.
        wanted = last + (limit_gib - peaks[last]) / slope if slope > 0 else LEAP * max(last, before)
    return max((size // MULTIPLE * MULTIPLE for size, peak in peaks.items() if peak <= limit_gib), default=0) or None
