"""Test the native layer norm against torch's, and the native dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.cpu_kernels.elementwise import native_dropout, native_layer_norm
from tests.cpu_kernels.exactness import assert_within_roundings, numbers
from tests.kernels import each_implementation

pytestmark = each_implementation

SHAPES = [(1, 16), (3, 5, 192), (1001, 96), (9, 4096)]
"""Shapes for every kernel: rows that fit in registers or not, one or several threads, odd numbers
of rows."""


def norm(x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> tuple[Tensor, Tensor]:
    return native_layer_norm(x, weight, bias, 1e-5, *residual)


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual[0] if residual else x * 1.0
    return F.layer_norm(total, x.shape[-1:], weight, bias), total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["alone", "passed on", "of a sum"])
def test_norms_are_exact_to_roundings(form, shape):
    x = numbers(*shape, seed=0, mean=3.0 if form == "alone" else 0.0)
    inputs = [x, numbers(shape[-1], seed=1, mean=1.0), numbers(shape[-1], seed=2)]
    upstream = [numbers(*shape, seed=3)]
    if form != "alone":
        upstream.append(numbers(*shape, seed=4))
    if form == "of a sum":
        inputs.append(numbers(*shape, seed=5))
    assert_within_roundings(norm, torch_norm, inputs, *upstream)


def test_dropout_scales_or_zeroes_elements_and_gradients_alike():
    torch.manual_seed(0)
    x = torch.ones(1 << 18, dtype=torch.bfloat16, requires_grad=True)
    y = native_dropout(x, 0.25)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(4 / 3).bfloat16().item()}
    assert 0.24 < float((y == 0).float().mean()) < 0.26
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, y)
    assert native_dropout(x, 0.0) is x
