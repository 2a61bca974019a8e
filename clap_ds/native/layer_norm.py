"""Layer norm on CPUs by this project's own kernels: bf16 rows, fp32 statistics, the residual's gradient added on the way.

A pre-norm block needs its input twice, normalised and as it is, and a post-norm block normalises a sum. Written with torch's
operations either takes one more pass over the activations in each direction; here it takes none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.native.library import kernel

MAX_CHANNELS = 4096


def fits(channels: int) -> bool:
    """Whether there are kernels for rows of so many channels."""
    return 0 < channels <= MAX_CHANNELS and channels % 16 == 0


def native_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`F.layer_norm` of `x + residual` over the last dimension.

    Args:
        x: (..., C) bf16 on the CPU; the kernels fit C.
        weight, bias: (C,), both bf16 or both fp32.
        eps: added to the variance.
        residual: as `x`.

    Returns:
        The normalised rows, and `x + residual`, rounded to bf16 as torch's is; without a residual `x` itself, not to be changed
        in place. The second one's gradient is added on the way.
    """
    return _LayerNorm.apply(x, residual, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        given = x
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        channels = x.shape[-1]
        for rows in (x, residual):
            assert rows is None or (rows.dtype == torch.bfloat16 and rows.is_cpu and rows.shape == x.shape)
        for vector in (weight, bias):
            assert vector.shape == (channels,)
            assert vector.dtype == weight.dtype
            assert vector.dtype in (torch.bfloat16, torch.float32)
            assert vector.is_contiguous()
        assert fits(channels)
        y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
        statistics = torch.empty(2, x.numel() // channels)
        low = int(weight.dtype == torch.bfloat16)
        sizes = x.numel() // channels, channels
        kernel("clap_layer_norm")(x, residual, total, weight, bias, low, y, statistics, *sizes, float(eps))
        ctx.save_for_backward(x if total is None else total, weight, statistics)
        ctx.has_residual = residual is not None
        return y, given.view_as(given) if total is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return passed, passed if ctx.has_residual else None, None, None, None
        x, weight, statistics = ctx.saved_tensors
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        given = dy.contiguous(), None if passed is None else passed.contiguous(), x, weight
        low, sizes = int(weight.dtype == torch.bfloat16), (x.numel() // x.shape[-1], x.shape[-1])
        kernel("clap_layer_norm_backward")(*given, low, statistics, dx, dweight, dbias, *sizes)
        return dx, dx if ctx.has_residual else None, dweight, dbias, None
