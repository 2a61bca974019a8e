"""Dropout by this project's CPU kernel: torch's draws its mask in one thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.native.library import kernel


def draw_seed() -> int:
    """A seed for one mask, from torch's generator."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def native_dropout(x: Tensor, probability: float) -> Tensor:
    """`F.dropout` while training, of a multiple of 16 bf16 elements on the CPU; `probability` is below 1."""
    assert x.dtype == torch.bfloat16
    assert x.is_cpu
    assert x.numel() % 16 == 0
    assert 0 <= probability < 1
    return x if probability == 0.0 else _Dropout.apply(x, probability, draw_seed())


def _masked(x: Tensor, probability: float, seed: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    kernel("clap_dropout")(x, y, x.numel(), seed, float(probability))
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        ctx.mask = probability, seed
        return _masked(x, probability, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(grads[0], *ctx.mask), None, None
