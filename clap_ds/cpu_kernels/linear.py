"""Run linear layers with CPU kernels: bf16 products, fp32 sums, with bias, GELU and residual fused.

All tensors are bf16 on the CPU. Shape letters: M rows (all leading dimensions), K inputs, N
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clap_ds.cpu_kernels.jit_build import is_ready, kernel

BLOCK = 32
"""Numbers of inputs and outputs must be multiples of this."""


def fits_linears(*layers: nn.Linear) -> bool:
    """Return whether there are kernels for layers of these sizes."""
    return not any(size % BLOCK for layer in layers for size in layer.weight.shape)


def native_linears(
    x: Tensor, *parameters: Tensor | None, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply up to three layers of one size to the same input, x · weightᵀ + bias, and add a
    residual.

    Args:
        x: (…, K).
        parameters: alternating weights (N, K) and biases (N,); either all biases or none are None.
        residual: (…, layers·N).

    Returns:
        (…, layers·N), the concatenated outputs, rounded once; and `x` itself, so that its other
          gradient is added in the
        same pass. Don't modify it in place.
    """
    return _Linear.apply(x, residual, *parameters)


def native_mlp(
    x: Tensor,
    weight1_NK: Tensor,
    bias1_N: Tensor,
    weight2_KN: Tensor,
    bias2_K: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return gelu(x · weight1ᵀ + bias1) · weight2ᵀ + bias2 + residual, (…, K), with exact GELU; and
    `x` itself, as in `native_linears`."""
    return _Mlp.apply(x, residual, weight1_NK, bias1_N, weight2_KN, bias2_K)


Parts = Sequence[Tensor | None]


def _three(parts: Parts) -> list[Tensor | None]:
    return [*parts, None, None][:3]


def _sizes(rows: Tensor, weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """Return the numbers of rows, of all weights' outputs, and of inputs."""
    return rows.numel() // rows.shape[-1], sum(map(len, weights)), weights[0].shape[1]


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Parts, residual: Any, activated: Any = None
) -> Tensor:
    """Apply the layers. `residual` and `activated` (receives gelu(output)) are shaped like the
    output, or None."""
    M, N, K = _sizes(x, weights)
    y = x.new_empty(*x.shape[:-1], N)
    residual = _contiguous(residual)
    assert is_ready(x, residual, *weights, *biases)
    assert x.shape[-1] == K
    assert residual is None or residual.shape == y.shape
    kernel("clap_linear")(x, *_three(weights), *_three(biases), residual, y, activated, M, N, K)
    return y


def _backward_input(
    dy: Tensor, weights: Sequence[Tensor], passed: Tensor | None, before: Tensor | None = None
) -> Tensor:
    """Return the gradient of the layers' input, or of GELU's input `before` if given, plus
    `passed`."""
    M, N, K = _sizes(dy, weights)
    dx = dy.new_empty(*dy.shape[:-1], K)
    kernel("clap_linear_backward_input")(
        dy, *_three(weights), before, _contiguous(passed), dx, M, N, K
    )
    return dx


def _backward_weights(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], *, with_bias: bool
) -> list[Tensor | None]:
    """Return alternating gradients of weights and biases."""
    dweights = [torch.empty_like(weight) for weight in weights]
    dbiases = [dy.new_empty(len(weight)) if with_bias else None for weight in weights]
    kernel("clap_linear_backward_weight")(
        dy, x, *_three(dweights), *_three(dbiases), *_sizes(dy, weights)
    )
    return [each for pair in zip(dweights, dbiases, strict=True) for each in pair]


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = x.contiguous()
        weights = parameters[::2]
        biases = parameters[1::2]
        ctx.save_for_backward(rows, *weights)
        ctx.has_bias = biases[0] is not None
        ctx.has_residual = residual is not None
        return _forward(rows, weights, biases, residual), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.contiguous()
        dx = _backward_input(dy, weights, passed)
        return (
            dx,
            dy if ctx.has_residual else None,
            *_backward_weights(dy, x, weights, with_bias=ctx.has_bias),
        )


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = x.contiguous()
        activated = x.new_empty(*x.shape[:-1], len(weight1))
        before = _forward(rows, [weight1], [bias1], None, activated)
        ctx.save_for_backward(rows, weight1, weight2, before, activated)
        ctx.has_residual = residual is not None
        return _forward(activated, [weight2], [bias2], residual), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, before, activated = ctx.saved_tensors
        dy = dy.contiguous()
        second = _backward_weights(dy, activated, [weight2], with_bias=True)
        dbefore = _backward_input(dy, [weight2], None, before)
        first = _backward_weights(dbefore, x, [weight1], with_bias=True)
        return (
            _backward_input(dbefore, [weight1], passed),
            dy if ctx.has_residual else None,
            *first,
            *second,
        )
