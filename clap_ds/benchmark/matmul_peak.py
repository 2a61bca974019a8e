"""Measure a device's matmul TFLOPS, from which preflight detects slow GPUs.

Data is random: constant data draws less power and runs faster than training.
"""

from __future__ import annotations

import torch

GPU_SIZE = 8192
CPU_SIZE = 1024  # larger sizes take too long


def measure_matmul_tflops(
    device: torch.device, size: int | None = None, *, warm_up_s: float = 1.0, measure_s: float = 2.0
) -> float:
    """Measure TFLOPS of square bf16 matmuls, the median over short windows. `size`: rows and columns (None: enough to keep the
    device busy); `warm_up_s`: time for clocks to settle."""
    from torch.utils.benchmark import Timer  # imports setuptools

    size = size or (CPU_SIZE if device.type == "cpu" else GPU_SIZE)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    names = {"matmul": torch.matmul, "a": a, "b": b, "product": torch.empty_like(a)}
    timer = Timer("matmul(a, b, out=product)", globals=names, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=warm_up_s)
    return 2 * size**3 / timer.blocked_autorange(min_run_time=measure_s).median / 1e12
