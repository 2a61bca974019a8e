"""Run AdamW for bf16 parameters with fp32 master weights in one pass over memory, with a CPU
kernel.

Torch's kernel also needs fp32 copies of the gradients and copies the masters back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clap_ds.cpu_kernels.jit_build import is_ready, kernel

BLOCK = 1 << 14
"""Elements whose squares are summed in fp32; as in adamw.cpp."""


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
    """Update parameters in place, like `torch.optim.AdamW`. All tensors are contiguous on the CPU;
    masters and moments are fp32.

    Args:
        low: bf16 parameters, written only.
        step: number of this update, from 1.
        scale: divisor of the gradients.
    """
    addresses = []
    for tensors in zip(low, gradients, masters, exp_avgs, exp_avg_sqs, strict=True):
        assert is_ready(*tensors[:2])
        assert is_ready(*tensors[2:], dtype=torch.float32)
        addresses.append([*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()])
    beta1, beta2 = betas
    # In the order of `Coefficients` in adamw.cpp: master = master · decay - rate · exp_avg /
    # (√exp_avg_sq / √bias2 + eps).
    numbers = (
        scale,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        1.0 - lr * weight_decay,
    )
    kernel("clap_adamw")(
        torch.tensor(addresses), len(addresses), torch.tensor(numbers, dtype=torch.float32)
    )
    # The kernel writes to addresses, which autograd doesn't see.
    torch.autograd.graph.increment_version([*low, *masters, *exp_avgs, *exp_avg_sqs])


def native_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the total 2-norm of contiguous bf16 CPU tensors as fp64 scalar, independent of the
    number of threads."""
    assert is_ready(*tensors)
    addresses = torch.tensor([[tensor.data_ptr(), tensor.numel()] for tensor in tensors])
    num_blocks = sum(-(-tensor.numel() // BLOCK) for tensor in tensors)
    # A sum per block, whatever the threads, makes the result independent of their number.
    sums = torch.empty(num_blocks, dtype=torch.float64)
    kernel("clap_sums_of_squares")(addresses, len(tensors), sums)
    return sums.sum().sqrt()
