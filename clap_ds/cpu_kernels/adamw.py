"""Run AdamW for bf16 parameters with fp32 master weights in one pass over memory, with a CPU
kernel.

Torch's kernel also needs fp32 copies of the gradients and copies the masters back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clap_ds.cpu_kernels.jit_build import is_ready, kernel, unavailable

BLOCK = 1 << 14
"""Elements whose squares are summed in fp32; as in adamw.cpp."""


def supports(low: Tensor, gradient: Tensor, *fp32: Tensor) -> bool:
    """Return whether `native_adamw` supports these tensors of one size: bf16, bf16 and fp32,
    contiguous CPU tensors."""
    contiguous = all(
        each.dtype == torch.float32 and each.is_cpu and each.is_contiguous() for each in fp32
    )
    return is_ready(low, gradient) and contiguous and not unavailable()


def native_adamw(
    low: Sequence[Tensor],
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """Update parameters in place, like `torch.optim.AdamW`.

    Args:
        low: bf16 parameters, written only.
        step: number of this update, from 1.
        scale: divisor of the gradients.
    """
    rows = list(zip(low, gradients, masters, exp_avgs, exp_avg_sqs, strict=True))
    assert all(supports(*row) for row in rows)
    table = torch.tensor([[*(each.data_ptr() for each in row), row[0].numel()] for row in rows])
    beta1, beta2 = betas
    bias1 = 1.0 - beta1**step
    bias2 = 1.0 - beta2**step
    numbers = (
        scale,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(bias2),
        eps,
        lr / bias1,
        1.0 - lr * weight_decay,
    )
    kernel("clap_adamw")(table, len(rows), torch.tensor(numbers, dtype=torch.float32))
    torch.autograd.graph.increment_version([*low, *masters, *exp_avgs, *exp_avg_sqs])


def native_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the total 2-norm of contiguous bf16 CPU tensors as fp64 scalar, independent of the
    number of threads."""
    assert is_ready(*tensors)
    table = torch.tensor([[each.data_ptr(), each.numel()] for each in tensors])
    sums = torch.empty(sum(-(-each.numel() // BLOCK) for each in tensors), dtype=torch.float64)
    kernel("clap_sums_of_squares")(table, len(tensors), sums)
    return sums.sum().sqrt()
