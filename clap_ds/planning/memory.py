"""Compute a rank's peak memory by part, and the largest micro-batch that fits on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from clap_ds.planning.step import Step

GIB = 2**30
CONTEXT_GIB = 0.7
"""CUDA context, kernels and cuBLAS workspace: 0.5 to 0.8 on H100 (assumed)."""
NCCL_GIB = 0.8  # channel buffers if there is more than one rank (assumed)
FRAGMENTATION = 0.016
"""Fraction of live memory that PyTorch's allocator holds in addition: 0.3% to 1.6% on an H200
(`results/h200`)."""
LEAP = 4
MOST_TRIES = 8


def memory_parts(step: Step, world_size: int) -> dict[str, float]:
    """Return GiB by part at the peak, largest first; their sum is the peak."""
    names = {"audio": "audio activations", "text": "text activations"}
    found = {
        names.get(part, part): num_bytes / GIB for part, num_bytes in step.recorded.at_peak.items()
    }
    found["fragmentation"] = FRAGMENTATION * sum(found.values())
    found["context and libraries (assumed)"] = CONTEXT_GIB + NCCL_GIB * (world_size > 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit_gib: float
) -> int | None:
    """Return the largest multiple of 8 whose peak is within the limit; None if 8 is too large.

    Extrapolate linearly from the last two sizes, because each peak requires recording a step; from
    the first as if half of it were constant. Small batches may need less memory than the weight
    update, which has a constant size.
    """
    peaks = dict[int, float]()
    last = 0
    size = start
    while size not in peaks and len(peaks) < MOST_TRIES:
        peaks[size] = peak_gib(size)
        slope = (peaks[size] - peaks.get(last, peaks[size] / 2)) / (size - last)
        wanted = size + (limit_gib - peaks[size]) / slope if slope > 0 else LEAP * max(size, last)
        last = size
        size = max(int(wanted) // 8, 1) * 8
    return (
        max((size // 8 * 8 for size, peak in peaks.items() if peak <= limit_gib), default=0) or None
    )
