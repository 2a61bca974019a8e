"""Compare kernels with torch's operations in bf16, which must not be more exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def numbers(*shape: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Draw normal bf16 numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + mean).bfloat16()


def results(function: Callable[..., Any], inputs: Sequence[Tensor], *upstream: Tensor) -> list[Tensor]:
    """Return outputs with upstream gradients, and the inputs' gradients, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs[: len(upstream)]
    gradients = torch.autograd.grad(outputs, leaves, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
    return [each.detach().float() for each in (*outputs, *gradients)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert bitwise equality in fp32."""
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
    """Compare with `reference` in fp32. Maximal errors are at most 1.5 times, and norms `norm_ratio` times, those of
    `reference` in bf16, plus fractions `slack` and `slack` / 10 of the values; the error's norm is at most `largest`."""
    exact = results(reference, [x.float() for x in inputs], *upstream)
    low, ours = results(reference, inputs, *upstream), results(function, inputs, *upstream)
    for number, (wanted, theirs, mine) in enumerate(zip(exact, low, ours, strict=True)):
        error, usual = mine - wanted, theirs - wanted
        assert error.abs().max() <= 1.5 * usual.abs().max() + slack * wanted.abs().max(), number
        assert error.norm() <= norm_ratio * usual.norm() + slack / 10 * wanted.norm(), number
        assert error.norm() <= largest * wanted.norm() or largest == math.inf, number
