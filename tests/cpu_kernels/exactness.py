"""Compare kernels in bf16 with torch's operations in fp32, by numbers of bf16's rounding errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDING = 2**-9
"""Largest relative error of a number rounded to bf16."""


def numbers(*shape: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Draw normal bf16 numbers."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (noise * scale + mean).bfloat16()


def results(
    function: Callable[..., Any], inputs: Sequence[Tensor], *upstream: Tensor
) -> list[Tensor]:
    """Return outputs with upstream gradients, and the inputs' gradients, in fp32."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs[: len(upstream)]
    upstream = tuple(gradient.to(outputs[0].dtype) for gradient in upstream)
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    return [tensor.detach().float() for tensor in (*outputs, *gradients)]


def assert_within_roundings(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    *upstream: Tensor,
) -> None:
    """Compare outputs and gradients in bf16 with `reference` in fp32, on the same bf16 inputs.

    If sums are in fp32, only the operands of one or two products and the result are rounded.
    """
    expected = results(reference, [tensor.float() for tensor in inputs], *upstream)
    tensors = results(function, inputs, *upstream)
    for number, (tensor, exact) in enumerate(zip(tensors, expected, strict=True)):
        error = tensor - exact
        assert error.abs().max() <= 5 * ROUNDING * exact.abs().max(), number
        assert error.norm() <= 2.5 * ROUNDING * exact.norm(), number
