"""Test the native linear layers against torch's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.cpu_kernels.linear import native_linears, native_mlp
from tests.cpu_kernels.exactness import assert_within_roundings, numbers, results
from tests.kernels import each_implementation

pytestmark = each_implementation

SHAPES = [
    *((1, 32, 32), (33, 96, 64)),  # fewer rows than a block, one more than one
    *((1601, 96, 288), (100, 64, 3072)),  # threads share the rows, or the columns
    *((300, 3072, 768), (77, 1568, 64)),  # sums in several slices of different lengths
]
"""Rows, inputs and outputs."""


def by_torch(
    x: Tensor, *parameters: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    layers = zip(parameters[::2], parameters[1::2], strict=True)
    y = torch.cat([F.linear(x, weight, bias) for weight, bias in layers], dim=-1)
    return (y if residual is None else y + residual), x * 1.0


def mlp_by_torch(
    x: Tensor, weight1: Tensor, bias1: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    return by_torch(F.gelu(F.linear(x, weight1, bias1)), *others[:2], residual=(*others, None)[2])[
        0
    ], x * 1.0


def five(rows: int = 40, scale: float = 0.1) -> list[Tensor]:
    """Return an input and two layers' weights and biases, all 64 wide."""
    layers = [
        [numbers(64, 64, seed=seed, scale=scale), numbers(64, seed=seed + 1)] for seed in (1, 3)
    ]
    return [numbers(rows, 64, seed=0), *layers[0], *layers[1]]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear_and_mlp(rows: int, inputs: int, outputs: int, residual: bool) -> None:
    """With a residual; and without one, with the passed input's gradient."""
    x = numbers(rows, inputs, seed=0)
    weight = numbers(outputs, inputs, seed=1, scale=inputs**-0.5)
    first = [x, weight, numbers(outputs, seed=2)]
    added = [numbers(rows, outputs, seed=3)] * residual
    pair = [
        lambda x, w, b, *r, f=f: f(x, w, b, residual=(*r, None)[0])
        for f in (native_linears, by_torch)
    ]
    passed = [numbers(rows, inputs, seed=7)] * (not residual)
    assert_within_roundings(*pair, [*first, *added], numbers(rows, outputs, seed=4), *passed)
    second = [numbers(inputs, outputs, seed=3, scale=outputs**-0.5), numbers(inputs, seed=4)]
    added = [numbers(rows, inputs, seed=5)] * residual
    upstream = numbers(rows, inputs, seed=6), *passed
    assert_within_roundings(native_mlp, mlp_by_torch, [*first, *second, *added], *upstream)


def test_gelu_and_its_slope_everywhere() -> None:
    """With identity weights, every bf16 number up to 100, and some far larger ones."""
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
    far = torch.tensor([[value] + [0.0] * 31 for value in (3e38, -3e38, -1000.0)]).bfloat16()
    assert torch.equal(native_mlp(far, one, zero, one, zero)[0][:, 0], far[:, 0].clamp(min=0))


@pytest.mark.parametrize("kind", ["linear", "joined", "mlp"])
def test_frozen_inputs_in_any_combination(kind: str) -> None:
    """The others' gradients are unchanged; hooks receive them, and a second backward pass
    accumulates."""
    tensors = five()[: 3 if kind == "linear" else 5]
    ours, reference = (native_mlp, mlp_by_torch) if kind == "mlp" else (native_linears, by_torch)
    upstream = numbers(40, 128 if kind == "joined" else 64, seed=5)
    _, *wanted = results(reference, [x.float() for x in tensors], upstream)
    for trained in [*itertools.product((False, True), repeat=len(tensors))][1:]:
        leaves = [
            x.clone().requires_grad_(needed) for x, needed in zip(tensors, trained, strict=True)
        ]
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        seen: list[Tensor] = []
        for leaf in learning:
            leaf.register_post_accumulate_grad_hook(seen.append)
        output = ours(*leaves)[0]
        output.backward(upstream, retain_graph=True)
        assert sorted(map(id, seen)) == sorted(map(id, learning))
        output.backward(upstream)
        for leaf, exact in zip(leaves, wanted, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or (leaf.grad.float() - 2 * exact).norm() < 0.02 * exact.norm()
