"""Layer norm on CPUs by this project's own kernels: bf16 rows, fp32 statistics, the residual's gradient added on the way.

A pre-norm block needs its input twice, normalised and as it is, and a post-norm block normalises a sum. Written with torch's
operations either takes one more pass over the activations in each direction; here it takes none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.native import library

MAX_CHANNELS = 4096


def supports(x: Tensor) -> bool:
    """Whether the functions below take `x` here: contiguous bf16 on the CPU, (..., C) with C a multiple of 16."""
    return (
        x.dtype == torch.bfloat16
        and x.ndim > 0
        and 0 < x.shape[-1] <= MAX_CHANNELS
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
        and library.takes(x)
    )


def native_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last dimension.

    Args:
        x: (..., C) bf16, see `supports`.
        weight: (C,) bf16 or fp32.
        bias: as `weight`.
        eps: added to the variance.

    Returns:
        (..., C) bf16.

    Raises:
        ValueError: the tensors are not as said.
    """
    return _LayerNorm.apply(x, weight, bias, eps)


def native_layer_norm_residual(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`native_layer_norm` for pre-norm blocks: also hands `x` on, so that backward adds up its two gradients in one pass.

    Returns:
        The normalised rows, and `x` itself for the residual connection, not to be changed in place.
    """
    return _LayerNormResidual.apply(x, weight, bias, eps)


def native_add_layer_norm(branch: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`native_layer_norm` of `branch + residual` for post-norm blocks. The sum is rounded to bf16, as torch's is.

    Args:
        branch: (..., C) bf16, see `supports`.
        residual: as `branch`.
    """
    return _AddLayerNorm.apply(branch, residual, weight, bias, eps)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> None:
    if not supports(x) or (residual is not None and not (supports(residual) and residual.shape == x.shape)):
        raise ValueError(
            "native layer norm takes contiguous bf16 CPU tensors of one shape, (..., C) with C a multiple of 16"
        )
    for vector in (weight, bias):
        if vector.shape != x.shape[-1:] or vector.dtype != weight.dtype or not vector.is_contiguous():
            raise ValueError("native layer norm takes weight and bias contiguous, (C,), of one dtype")
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"native layer norm takes weight and bias in bf16 or fp32, not {weight.dtype}")


def _forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    _check(x, residual, weight, bias)
    channels = x.shape[-1]
    rows = x.numel() // channels
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    statistics = torch.empty(2, rows)
    is_low = int(weight.dtype == torch.bfloat16)
    library.kernel("clap_layer_norm")(
        *(x, residual, total, weight, bias, is_low, y, statistics, rows, channels, float(eps))
    )
    ctx.save_for_backward(x if total is None else total, weight, statistics)
    return y


def _backward(ctx: Any, dy: Tensor, passed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows that were normalised, of weight and of bias."""
    x, weight, statistics = ctx.saved_tensors
    channels = x.shape[-1]
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    dy, passed = dy.contiguous(), None if passed is None else passed.contiguous()
    is_low = int(weight.dtype == torch.bfloat16)
    library.kernel("clap_layer_norm_backward")(
        *(dy, passed, x, weight, is_low, statistics, dx, dweight, dbias, x.numel() // channels, channels)
    )
    return dx, dweight, dbias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _forward(ctx, x, None, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dy, None), None


class _LayerNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _forward(ctx, x, None, weight, bias, eps), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return passed, None, None, None
        return *_backward(ctx, dy, passed), None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _forward(ctx, branch, residual, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _backward(ctx, dy, None)
        return dx, dx, dweight, dbias, None
