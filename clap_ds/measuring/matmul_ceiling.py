"""How fast matrix products can get on this device: the ceiling that a utilisation can be held against.

A data sheet's peak assumes a clock that the power limit does not allow under load, so the largest product reaches less. Data
is random: constant data draws less power and shows a rate no training sees.
"""

from __future__ import annotations

import statistics
import time

import torch

from clap_ds.record.clock import synchronize

GPU_SIZE = 8192
CPU_SIZE = 1024
WARM_UP_S = 1.0
"""Long enough for clocks to settle under load."""
MEASURE_S = 2.0
NUM_WINDOWS = 10


def measure_matmul_tflops(
    device: torch.device, size: int | None = None, *, warm_up_s: float = WARM_UP_S, measure_s: float = MEASURE_S
) -> float:
    """TFLOPS of bf16 square matrix products with random data, median over short windows; a few seconds.

    Args:
        device: where to measure.
        size: rows and columns; 8192 on a GPU, 1024 on a CPU, where larger ones would take too long.
        warm_up_s: seconds of products before measuring.
        measure_s: seconds of products that are measured.
    """
    size = size or (GPU_SIZE if device.type == "cuda" else CPU_SIZE)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    once_s = _seconds(a, b, product, 1)
    deadline = time.perf_counter() + warm_up_s
    while time.perf_counter() < deadline:
        once_s = _seconds(a, b, product, 1)
    repeats = max(1, int(measure_s / NUM_WINDOWS / once_s))
    window_s = statistics.median(_seconds(a, b, product, repeats) for _ in range(NUM_WINDOWS))
    return 2 * size**3 * repeats / window_s / 1e12


def _seconds(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, repeats: int) -> float:
    synchronize(a.device)
    started_s = time.perf_counter()
    for _ in range(repeats):
        torch.matmul(a, b, out=product)
    synchronize(a.device)
    return time.perf_counter() - started_s
