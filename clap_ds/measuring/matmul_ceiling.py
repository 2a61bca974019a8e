"""How fast matrix products can get on this device: the ceiling that a utilisation can be held against.

A data sheet's peak assumes a clock that the power limit does not allow under load, so the largest product reaches less. Data
is random: constant data draws less power and shows a rate no training sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.benchmark import Timer

GPU_SIZE = 8192
CPU_SIZE = 1024  # larger ones would take too long


def measure_matmul_tflops(
    device: torch.device, size: int | Sequence[int] | None = None, *, warm_up_s: float = 1.0, measure_s: float = 2.0
) -> float:
    """TFLOPS of bf16 matrix products with random data, median over short windows. `size`: of all sides, or of a product's rows,
    inner dimension and columns (None: as large as keeps the device busy); `warm_up_s`: for clocks to settle under load."""
    size = size or (GPU_SIZE if device.type == "cuda" else CPU_SIZE)
    m, k, n = (size,) * 3 if isinstance(size, int) else size
    a, b = (torch.randn(*sides, device=device, dtype=torch.bfloat16) for sides in ((m, k), (k, n)))
    names = {"matmul": torch.matmul, "a": a, "b": b, "product": torch.empty(m, n, device=device, dtype=a.dtype)}
    timer = Timer("matmul(a, b, out=product)", globals=names, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=warm_up_s)
    return 2 * m * k * n / timer.blocked_autorange(min_run_time=measure_s).median / 1e12
