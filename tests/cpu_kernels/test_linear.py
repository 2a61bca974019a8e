"""Test the native linear layers against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.cpu_kernels.linear import native_linears, native_mlp
from tests.cpu_kernels.exactness import assert_within_roundings, numbers
from tests.kernels import each_implementation

pytestmark = each_implementation

SHAPES = [
    # Fewer rows than a block, one more than one.
    (1, 32, 32),
    (33, 96, 64),
    # Threads share the rows, or the columns.
    (1601, 96, 288),
    (100, 64, 3072),
    # Sums in several slices of different lengths.
    (77, 1568, 64),
]
"""Rows, inputs and outputs."""


def torch_linears(
    x: Tensor, *parameters: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    layers = zip(parameters[::2], parameters[1::2], strict=True)
    y = torch.cat([F.linear(x, weight, bias) for weight, bias in layers], dim=-1)
    return (y if residual is None else y + residual), x * 1.0


def torch_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    active = F.gelu(F.linear(x, weight1, bias1))
    return torch_linears(active, weight2, bias2, residual=residual)[0], x * 1.0


def with_residual(linears: Callable[..., Any]) -> Callable[..., Any]:
    """Take the residual as the fourth argument."""
    return lambda x, weight, bias, residual=None: linears(x, weight, bias, residual=residual)


@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear_and_mlp_are_exact_to_roundings(rows, inputs, outputs, with_sum):
    """With a residual; and without one, with the passed input's gradient."""
    weight1 = numbers(outputs, inputs, seed=1, scale=inputs**-0.5)
    linear = [numbers(rows, inputs, seed=0), weight1, numbers(outputs, seed=2)]
    weight2 = numbers(inputs, outputs, seed=3, scale=outputs**-0.5)
    mlp = [*linear, weight2, numbers(inputs, seed=4)]
    upstream = []
    if with_sum:
        linear.append(numbers(rows, outputs, seed=3))
        mlp.append(numbers(rows, inputs, seed=5))
    else:
        upstream.append(numbers(rows, inputs, seed=7))
    pair = with_residual(native_linears), with_residual(torch_linears)
    assert_within_roundings(*pair, linear, numbers(rows, outputs, seed=4), *upstream)
    assert_within_roundings(native_mlp, torch_mlp, mlp, numbers(rows, inputs, seed=6), *upstream)


def test_gelu_and_its_slope_of_every_bf16_number():
    """With identity weights, every bf16 number up to 100."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() <= 100)]
    x = x[: len(x) // 32 * 32].view(-1, 32).requires_grad_()
    one = torch.eye(32).bfloat16()
    zero = torch.zeros(32).bfloat16()
    y = native_mlp(x, one, zero, one, zero)[0]
    (slope,) = torch.autograd.grad(y.sum(), x)
    double = x.detach().double().requires_grad_()
    exact = F.gelu(double)
    (exact_slope,) = torch.autograd.grad(exact.sum(), double)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=3e-5)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=2**-8, atol=3e-5)
