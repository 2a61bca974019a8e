"""The native layer norm against torch's in fp32, no less exact than torch's in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.native.layer_norm import (
    native_add_layer_norm,
    native_layer_norm,
    native_layer_norm_residual,
    supports,
)
from tests.kernels import needs_amx

pytestmark = needs_amx

EPS = 1e-5
SHAPES = [(1, 16), (7, 96), (3, 5, 192), (33, 384), (1001, 96), (131, 768), (9, 4096), (2, 3, 11, 48)]
"""Rows of every kernel: held in registers or not, one thread or several, odd in number."""


def numbers(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + mean).bfloat16()


def parameters(channels: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return numbers(channels, seed=1, mean=1.0).to(dtype), numbers(channels, seed=2).to(dtype)


def results(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs and the inputs' gradients, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
    return [each.detach().float() for each in (*outputs, *gradients)]


def assert_as_exact_as_torch(
    function: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    upstream: list[Tensor],
) -> None:
    exact = results(reference, [x.float() for x in inputs], upstream)
    low, ours = results(reference, inputs, upstream), results(function, inputs, upstream)
    for wanted, theirs, mine in zip(exact, low, ours, strict=True):
        assert mine.shape == wanted.shape
        largest = float(wanted.abs().max())
        assert float((mine - wanted).abs().max()) <= 1.5 * float((theirs - wanted).abs().max()) + 1e-3 * largest
        assert float((mine - wanted).norm()) <= 1.5 * float((theirs - wanted).norm()) + 1e-4 * float(wanted.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [numbers(*shape, seed=0, mean=3.0), *parameters(shape[-1], dtype)]
    assert_as_exact_as_torch(
        lambda x, weight, bias: (native_layer_norm(x, weight, bias, EPS),),
        lambda x, weight, bias: (F.layer_norm(x, shape[-1:], weight, bias, EPS),),
        inputs,
        [numbers(*shape, seed=3)],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_residual_passed_on(shape: tuple[int, ...]) -> None:
    inputs = [numbers(*shape, seed=0), *parameters(shape[-1])]
    assert_as_exact_as_torch(
        lambda x, weight, bias: native_layer_norm_residual(x, weight, bias, EPS),
        lambda x, weight, bias: (F.layer_norm(x, shape[-1:], weight, bias, EPS), x * 1.0),
        inputs,
        [numbers(*shape, seed=3), numbers(*shape, seed=4)],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_normalised(shape: tuple[int, ...]) -> None:
    inputs = [numbers(*shape, seed=0), numbers(*shape, seed=5), *parameters(shape[-1])]
    assert_as_exact_as_torch(
        lambda branch, residual, weight, bias: (native_add_layer_norm(branch, residual, weight, bias, EPS),),
        lambda branch, residual, weight, bias: (F.layer_norm(branch + residual, shape[-1:], weight, bias, EPS),),
        inputs,
        [numbers(*shape, seed=3)],
    )


def test_large_mean_keeps_the_variance() -> None:
    x = numbers(50, 96, seed=0) + torch.tensor(300.0).bfloat16()
    weight, bias = parameters(96)
    wanted = F.layer_norm(x.float(), (96,), weight.float(), bias.float(), EPS)
    torch.testing.assert_close(native_layer_norm(x, weight, bias, EPS).float(), wanted, rtol=1e-2, atol=1e-2)


def test_either_gradient_may_be_missing() -> None:
    weight, bias = parameters(96)
    x = numbers(13, 96, seed=0).requires_grad_()
    weight.requires_grad_()
    y, passed = native_layer_norm_residual(x, weight, bias, EPS)
    only_passed = torch.autograd.grad(passed.float().sum(), [x, weight], retain_graph=True, allow_unused=True)
    assert torch.equal(only_passed[0], torch.ones_like(x))
    assert only_passed[1] is None
    upstream = numbers(13, 96, seed=3)
    (only_y,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    (wanted,) = torch.autograd.grad(native_layer_norm(x, weight, bias, EPS), x, upstream)
    assert torch.equal(only_y, wanted)


def test_pre_norm_block_twice_over_one_input() -> None:
    """Passed-on inputs used several times, and further on, get the sum of their gradients."""
    weight, bias = (each.requires_grad_() for each in parameters(96))

    def ours(x: Tensor) -> Tensor:
        y, passed = native_layer_norm_residual(x, weight, bias, EPS)
        z, again = native_layer_norm_residual(passed + y, weight, bias, EPS)
        return (again + z + passed * y).float().sum() + x.float().sum()

    def reference(x: Tensor) -> Tensor:
        hidden = x + (y := F.layer_norm(x, (96,), weight.float(), bias.float(), EPS))
        return (hidden + F.layer_norm(hidden, (96,), weight.float(), bias.float(), EPS) + x * y).sum() + x.sum()

    x = numbers(21, 96, seed=0)
    low, exact = x.clone().requires_grad_(), x.float().requires_grad_()
    mine = torch.autograd.grad(ours(low), [low, weight, bias])
    wanted = torch.autograd.grad(reference(exact), [exact, weight, bias])
    for each, other in zip(mine, wanted, strict=True):
        assert float((each.float() - other.float()).norm()) < 0.02 * float(other.float().norm())


def test_input_passed_on_is_the_same_memory_and_guarded() -> None:
    x = numbers(4, 32, seed=0).requires_grad_()
    _, passed = native_layer_norm_residual(x, *parameters(32), EPS)
    assert passed.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="inplace"):
        passed.add_(1)


def test_gradients_that_are_not_contiguous() -> None:
    weight, bias = parameters(48)
    x = numbers(10, 48, seed=0).requires_grad_()
    upstream = numbers(48, 10, seed=3).T
    (strided,) = torch.autograd.grad(native_layer_norm(x, weight, bias, EPS), x, upstream)
    (plain,) = torch.autograd.grad(native_layer_norm(x, weight, bias, EPS), x, upstream.contiguous())
    assert torch.equal(strided, plain)


def test_same_bits_every_time() -> None:
    inputs = [numbers(2003, 192, seed=0), *parameters(192)]
    upstream = [numbers(2003, 192, seed=3), numbers(2003, 192, seed=4)]

    def once() -> list[Tensor]:
        return results(lambda x, weight, bias: native_layer_norm_residual(x, weight, bias, EPS), inputs, upstream)

    first = once()
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(first, once(), strict=True))


def test_no_rows() -> None:
    weight, bias = (each.requires_grad_() for each in parameters(32))
    y = native_layer_norm(numbers(0, 32, seed=0), weight, bias, EPS)
    y.sum().backward()
    assert y.shape == (0, 32)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_it_supports() -> None:
    x = numbers(8, 32, seed=0)
    assert supports(x)
    assert not supports(x.float())
    assert not supports(x.T)
    assert not supports(x[:, :16])
    assert not supports(numbers(8, 24, seed=0))
    assert not supports(numbers(1, 4112, seed=0))
    weight, bias = parameters(32)
    with pytest.raises(ValueError, match="contiguous bf16"):
        native_layer_norm(x.float(), weight, bias, EPS)
    with pytest.raises(ValueError, match="of one shape"):
        native_add_layer_norm(x, x[:4], weight, bias, EPS)
    with pytest.raises(ValueError, match="one dtype"):
        native_layer_norm(x, weight, bias.float(), EPS)
    with pytest.raises(ValueError, match="bf16 or fp32"):
        native_layer_norm(x, weight.half(), bias.half(), EPS)
