"""Kernels against torch's operations: no less exact than those are in bf16."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def numbers(*shape: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Normal bf16 numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + mean).bfloat16()


def results(function: Callable[..., Any], inputs: Sequence[Tensor], *upstream: Tensor) -> list[Tensor]:
    """As many outputs as there are upstream gradients, and the inputs' gradients, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs[: len(upstream)]
    gradients = torch.autograd.grad(outputs, leaves, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
    return [each.detach().float() for each in (*outputs, *gradients)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To the bit, in fp32."""
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))


def assert_as_exact_as_torch(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    *upstream: Tensor,
    norm_ratio: float = 1.1,
    slack: float = 0.0,
    largest: float = math.inf,
) -> None:
    """Against `reference` in fp32, errors are at most 1.5 times its own in bf16 anywhere and `norm_ratio` times in all, and a
    share `slack` of the largest value, of which a tenth in all; in all never more than the share `largest`."""
    exact = results(reference, [x.float() for x in inputs], *upstream)
    low, ours = results(reference, inputs, *upstream), results(function, inputs, *upstream)
    for number, (wanted, theirs, mine) in enumerate(zip(exact, low, ours, strict=True)):
        error, usual = mine - wanted, theirs - wanted
        assert error.abs().max() <= 1.5 * usual.abs().max() + slack * wanted.abs().max(), number
        assert error.norm() <= norm_ratio * usual.norm() + slack / 10 * wanted.norm(), number
        assert error.norm() <= largest * wanted.norm() or largest == math.inf, number
