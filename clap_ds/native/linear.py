"""Linear layers by this project's CPU kernels (`clap_ds/native/linear.cpp`): bf16 on matrix units, sums in fp32, and what
follows a layer (bias, GELU, residual) in the same pass.

Shape letters: M rows (all leading dimensions), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clap_ds.native.library import kernel, takes

BLOCK = 32
"""Inputs and outputs are a multiple of it."""


def supports(weight_NK: Tensor) -> bool:
    """Whether there are kernels for a layer with this weight, and bf16 inputs."""
    return weight_NK.dtype == torch.bfloat16 and not any(size % BLOCK for size in weight_NK.shape) and takes(weight_NK)


def native_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias + residual.

    Args:
        x: (…, K) bf16.
        bias_N: bf16.
        residual: (…, N) bf16.

    Returns:
        (…, N) bf16, rounded once.

    Raises:
        ValueError: the tensors are not as said.
    """
    return _Linear.apply(x, residual, weight_NK, bias_N)[0]


def native_joined_linears(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, Tensor]:
    """Two or three layers of one size with the same input, as one.

    Args:
        x: (…, K) bf16.

    Returns:
        (…, layers·N), their outputs one after the other in each row, and `x` itself, whose other gradient is then added on the
        way; not to be changed in place.
    """
    assert len({(layer.weight.shape, layer.bias is None) for layer in layers}) == 1
    return _Linear.apply(x, None, *(parameter for layer in layers for parameter in (layer.weight, layer.bias)))


def native_mlp(
    x: Tensor, weight1_NK: Tensor, bias1_N: Tensor, weight2_KN: Tensor, bias2_K: Tensor, residual: Tensor | None = None
) -> Tensor:
    """gelu(x · weight1ᵀ + bias1) · weight2ᵀ + bias2 + residual, by the exact GELU; all bf16.

    Args:
        x: (…, K).
        residual: like the output, (…, K).
    """
    return _Mlp.apply(x, residual, weight1_NK, bias1_N, weight2_KN, bias2_K)[0]


def native_mlp_passing(
    x: Tensor, weight1_NK: Tensor, bias1_N: Tensor, weight2_KN: Tensor, bias2_K: Tensor
) -> tuple[Tensor, Tensor]:
    """`native_mlp`, and `x` itself, as in `native_joined_linears`."""
    return _Mlp.apply(x, None, weight1_NK, bias1_N, weight2_KN, bias2_K)


Parts = Sequence[Tensor | None]


def _three(parts: Parts) -> list[Tensor | None]:
    return [*parts, None, None][:3]


def _sizes(x: Tensor, weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """Rows of the input `x`, outputs of all weights, inputs."""
    inputs = weights[0].shape[1]
    return x.numel() // inputs, sum(map(len, weights)), inputs


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Parts,
    residual: Tensor | None = None,
    activated: Tensor | None = None,
) -> Tensor:
    rows, outputs, inputs = _sizes(x, weights)
    y = x.new_empty(*x.shape[:-1], outputs)
    fits = x.shape[-1] == inputs and (residual is None or residual.shape == y.shape)
    fits = fits and all(weight.shape == weights[0].shape for weight in weights)
    fits = fits and all(bias is None or bias.shape == weights[0].shape[:1] for bias in biases)
    given = [each for each in (x, residual, *weights, *biases) if each is not None]
    if not fits or any(each.dtype != torch.bfloat16 or not each.is_cpu for each in given):
        found = ", ".join(f"{each.dtype} {(*each.shape,)}" for each in given)
        raise ValueError(f"native linear layers take bf16 CPU tensors that fit together, not {found}")
    run = kernel("clap_linear")
    run(x, *_three(weights), *_three(biases), residual, y, activated, rows, outputs, inputs)
    return y


def _backward_input(
    dy: Tensor, weights: Sequence[Tensor], passed: Tensor | None, before: Tensor | None = None
) -> Tensor:
    """Gradient of the layers' input, or of what GELU made it from where `before` is that; plus `passed`."""
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    dx = dy.new_empty(*dy.shape[:-1], inputs)
    run = kernel("clap_linear_backward_input")
    run(dy, *_three(weights), before, passed, dx, dy.numel() // outputs, outputs, inputs)
    return dx


def _backward_weights(dy: Tensor, x: Tensor, weights: Sequence[Tensor], *, with_bias: bool) -> list[Tensor | None]:
    """Each weight's gradient and after it its bias's."""
    dweights = [torch.empty_like(weight) for weight in weights]
    dbiases = [dy.new_empty(len(weight)) if with_bias else None for weight in weights]
    kernel("clap_linear_backward_weight")(dy, x, *_three(dweights), *_three(dbiases), *_sizes(x, weights))
    return [each for pair in zip(dweights, dbiases, strict=True) for each in pair]


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


class _Linear(torch.autograd.Function):
    """Of one input, up to three weights and their biases in turn; its second output is its first input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, *parameters: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        biases = [_contiguous(bias) for bias in parameters[1::2]]
        weights = [weight.contiguous() for weight in parameters[::2] if weight is not None]
        ctx.save_for_backward(x.contiguous(), *weights)
        ctx.has_bias, ctx.has_residual = biases[0] is not None, residual is not None
        return _forward(x.contiguous(), weights, biases, _contiguous(residual)), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if dy is None:
            return (passed, None, *[None] * (2 * len(weights)))
        dy = dy.contiguous()
        dx = _backward_input(dy, weights, _contiguous(passed)) if ctx.needs_input_grad[0] else None
        dparameters: list[Tensor | None] = [None] * (2 * len(weights))
        if any(ctx.needs_input_grad[2:]):
            dparameters = _backward_weights(dy, x, weights, with_bias=ctx.has_bias)
        return dx, dy if ctx.has_residual else None, *dparameters


class _Mlp(torch.autograd.Function):
    """Its second output is its first input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows, weight1, weight2 = x.contiguous(), weight1.contiguous(), weight2.contiguous()
        activated = x.new_empty(*x.shape[:-1], len(weight1))
        before = _forward(rows, [weight1], [bias1.contiguous()], activated=activated)
        ctx.save_for_backward(rows, weight1, weight2, before, activated)
        ctx.has_residual = residual is not None
        return _forward(activated, [weight2], [bias2.contiguous()], _contiguous(residual)), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return passed, *[None] * 5
        x, weight1, weight2, before, activated = ctx.saved_tensors
        needs_dx, _, *needs = ctx.needs_input_grad
        dx: Tensor | None = None
        first: list[Tensor | None] = [None] * 2
        second: list[Tensor | None] = [None] * 2
        dy = dy.contiguous()
        if any(needs[2:]):
            second = _backward_weights(dy, activated, [weight2], with_bias=True)
        if needs_dx or any(needs[:2]):
            dbefore = _backward_input(dy, [weight2], None, before)
            if any(needs[:2]):
                first = _backward_weights(dbefore, x, [weight1], with_bias=True)
            if needs_dx:
                dx = _backward_input(dbefore, [weight1], _contiguous(passed))
        return dx, dy if ctx.has_residual else None, *first, *second
