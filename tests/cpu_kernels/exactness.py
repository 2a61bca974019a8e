"""Compare kernels in bf16 with torch's operations in fp32, by numbers of bf16's rounding errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDING = 2**-9
"""Largest relative error of a number rounded to bf16."""


def numbers(*shape: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Draw normal bf16 numbers."""
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + mean
    ).bfloat16()


def results(
    function: Callable[..., Any], inputs: Sequence[Tensor], *upstream: Tensor
) -> list[Tensor]:
    """Return outputs with upstream gradients, and the inputs' gradients, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs[: len(upstream)]
    gradients = torch.autograd.grad(
        outputs, leaves, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)]
    )
    return [each.detach().float() for each in (*outputs, *gradients)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert bitwise equality in fp32."""
    assert all(
        torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True)
    )


def assert_within_roundings(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    *upstream: Tensor,
) -> None:
    """Compare outputs and gradients in bf16 with `reference` in fp32, on the same bf16 inputs.

    If sums are in fp32, only the operands of one or two products and the result are rounded.
    """
    exact = results(reference, [x.float() for x in inputs], *upstream)
    ours = results(function, inputs, *upstream)
    for number, (wanted, mine) in enumerate(zip(exact, ours, strict=True)):
        error = mine - wanted
        assert error.abs().max() <= 5 * ROUNDING * wanted.abs().max(), number
        assert error.norm() <= 2.5 * ROUNDING * wanted.norm(), number
