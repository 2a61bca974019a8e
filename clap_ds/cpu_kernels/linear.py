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

# A row of an AMX tile has 32 bf16 numbers.
BLOCK = 32
"""Numbers of inputs and outputs must be multiples of this."""
MaybeTensors = Sequence[Tensor | None]


def supports_linears(*layers: nn.Linear) -> bool:
    """Return whether there are kernels for layers of these sizes."""
    return all(
        layer.in_features % BLOCK == 0 and layer.out_features % BLOCK == 0 for layer in layers
    )


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
        gradient is added in the same pass. Don't modify it in place.
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


def _pad_to_three(tensors: MaybeTensors) -> list[Tensor | None]:
    """Return the arguments of a kernel for up to three layers."""
    return [*tensors, None, None][:3]


def _sizes(rows: Tensor, weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """Return M, the N of all weights together, and K."""
    # Weights are (N, K).
    return rows.numel() // rows.shape[-1], sum(map(len, weights)), weights[0].shape[1]


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: MaybeTensors,
    residual: Tensor | None,
    activated: Tensor | None = None,
) -> Tensor:
    """Apply the layers. `residual` and `activated` (receives gelu(output)) are shaped like the
    output, or None."""
    M, N, K = _sizes(x, weights)
    y = x.new_empty(*x.shape[:-1], N)
    residual = _contiguous(residual)
    # Kernels take addresses, so wrong shapes would read other memory.
    assert is_ready(x, residual, *weights, *biases)
    assert x.shape[-1] == K
    assert residual is None or residual.shape == y.shape
    layers = *_pad_to_three(weights), *_pad_to_three(biases)
    kernel("clap_linear")(x, *layers, residual, y, activated, M, N, K)
    return y


def _backward_input(
    dy: Tensor, weights: Sequence[Tensor], d_passed: Tensor | None, gelu_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the layers' input, or of `gelu_input` if there is one, plus
    `d_passed`, its gradient from elsewhere."""
    M, N, K = _sizes(dy, weights)
    # dx = dy · weight + d_passed, times GELU's derivative if there is a GELU.
    dx = dy.new_empty(*dy.shape[:-1], K)
    layers = _pad_to_three(weights)
    kernel("clap_linear_backward_input")(
        dy, *layers, gelu_input, _contiguous(d_passed), dx, M, N, K
    )
    return dx


def _backward_weights(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], *, with_bias: bool
) -> list[Tensor | None]:
    """Return alternating gradients of weights and biases."""
    # dweight = dyᵀ · x, dbias = Σ dy, summed in fp32 over all rows.
    d_weights = [torch.empty_like(weight) for weight in weights]
    d_biases: list[Tensor | None] = [None] * len(weights)
    if with_bias:
        d_biases = [dy.new_empty(len(weight)) for weight in weights]
    layers = *_pad_to_three(d_weights), *_pad_to_three(d_biases)
    kernel("clap_linear_backward_weight")(dy, x, *layers, *_sizes(dy, weights))
    gradients: list[Tensor | None] = []
    for d_weight, d_bias in zip(d_weights, d_biases, strict=True):
        gradients += [d_weight, d_bias]
    return gradients


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Without this, an unused second output's gradient would be a tensor of zeros.
        ctx.set_materialize_grads(False)
        rows = x.contiguous()
        weights = parameters[::2]
        biases = parameters[1::2]
        ctx.save_for_backward(rows, *weights)
        ctx.has_bias = biases[0] is not None
        ctx.has_residual = residual is not None
        # The view is a new output, through which the input's other gradient comes.
        return _forward(rows, weights, biases, residual), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.contiguous()
        dx = _backward_input(dy, weights, d_passed)
        # A sum passes its gradient to both of its terms.
        d_residual = dy if ctx.has_residual else None
        d_parameters = _backward_weights(dy, x, weights, with_bias=ctx.has_bias)
        return dx, d_residual, *d_parameters


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight1, bias1, weight2, bias2 = parameters
        rows = x.contiguous()
        # One kernel writes GELU's input, for the backward pass, and its output.
        activated = x.new_empty(*x.shape[:-1], len(weight1))
        gelu_input = _forward(rows, [weight1], [bias1], None, activated)
        ctx.save_for_backward(rows, weight1, weight2, gelu_input, activated)
        ctx.has_residual = residual is not None
        return _forward(activated, [weight2], [bias2], residual), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, gelu_input, activated = ctx.saved_tensors
        dy = dy.contiguous()
        d_layer2 = _backward_weights(dy, activated, [weight2], with_bias=True)
        # GELU's derivative is applied in the same pass.
        d_gelu_input = _backward_input(dy, [weight2], None, gelu_input)
        d_layer1 = _backward_weights(d_gelu_input, x, [weight1], with_bias=True)
        dx = _backward_input(d_gelu_input, [weight1], d_passed)
        d_residual = dy if ctx.has_residual else None
        return dx, d_residual, *d_layer1, *d_layer2
