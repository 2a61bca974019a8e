"""Linear layers by this project's CPU kernels (`clap_ds/native/linear.cpp`): bf16 on matrix units, sums in fp32, and what
follows a layer (bias, GELU, residual) in the same pass.

Shape letters: M rows (all leading dimensions), K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clap_ds.native.library import kernel, unavailable

BLOCK = 32
"""Inputs and outputs are a multiple of it."""


def supports(weight_NK: Tensor) -> bool:
    """Whether there are kernels for a layer with this weight, and bf16 inputs."""
    return (
        weight_NK.device.type == "cpu"
        and weight_NK.dtype == torch.bfloat16
        and not any(size % BLOCK for size in weight_NK.shape)
        and not unavailable()
    )


def native_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias + residual.

    Args:
        x: (…, K) bf16.
        bias_N: bf16.
        residual: (…, N) bf16.

    Returns:
        (…, N) bf16, rounded once.
    """
    return _Linear.apply(x, weight_NK, bias_N, residual)


def native_mlp(
    x: Tensor, weight1_NK: Tensor, bias1_N: Tensor, weight2_KN: Tensor, bias2_K: Tensor, residual: Tensor | None = None
) -> Tensor:
    """gelu(x · weight1ᵀ + bias1) · weight2ᵀ + bias2 + residual, by the exact GELU; all bf16.

    Args:
        x: (…, K).
        residual: like the output, (…, K).
    """
    return _Mlp.apply(x, weight1_NK, bias1_N, weight2_KN, bias2_K, residual)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, activated: Tensor | None = None
) -> Tensor:
    outputs, inputs = weight.shape
    y = x.new_empty(*x.shape[:-1], outputs)
    kernel("clap_linear")(x, weight, bias, residual, y, activated, x.numel() // inputs, outputs, inputs)
    return y


def _backward_input(dy: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Gradient of the layer's input; of what GELU made it from, where `before` is that."""
    outputs, inputs = weight.shape
    dx = dy.new_empty(*dy.shape[:-1], inputs)
    kernel("clap_linear_backward_input")(dy, weight, before, dx, dy.numel() // outputs, outputs, inputs)
    return dx


def _backward_weight(dy: Tensor, x: Tensor, weight: Tensor, *, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    outputs, inputs = weight.shape
    dweight = torch.empty_like(weight)
    dbias = dy.new_empty(outputs) if with_bias else None
    kernel("clap_linear_backward_weight")(dy, x, dweight, dbias, dy.numel() // outputs, outputs, inputs)
    return dweight, dbias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
        return _forward(x, weight, bias, None if residual is None else residual.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = _backward_input(dy, weight) if ctx.needs_input_grad[0] else None
        dweight, dbias = None, None
        if ctx.needs_input_grad[1]:
            dweight, dbias = _backward_weight(dy, x, weight, with_bias=ctx.has_bias)
        return dx, dweight, dbias, dy if ctx.has_residual else None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> Tensor:
        weight1, bias1, weight2, bias2, residual = parameters
        assert weight1 is not None and weight2 is not None
        x = x.contiguous()
        activated = x.new_empty(*x.shape[:-1], len(weight1))
        before = _forward(x, weight1, bias1, activated=activated)
        ctx.save_for_backward(x, weight1, weight2, before, activated)
        ctx.has_residual = residual is not None
        return _forward(activated, weight2, bias2, None if residual is None else residual.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, before, activated = ctx.saved_tensors
        dy = grads[0].contiguous()
        dweight2, dbias2 = _backward_weight(dy, activated, weight2, with_bias=True)
        dbefore = _backward_input(dy, weight2, before)
        dweight1, dbias1 = _backward_weight(dbefore, x, weight1, with_bias=True)
        dx = _backward_input(dbefore, weight1) if ctx.needs_input_grad[0] else None
        return dx, dweight1, dbias1, dweight2, dbias2, dy if ctx.has_residual else None
