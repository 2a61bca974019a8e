"""The native linear layers against torch's in fp32, no less exact than torch's in bf16."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.native.linear import _Linear, _Mlp, native_linear, native_mlp, supports
from tests.kernels import needs_amx

pytestmark = needs_amx

SHAPES = [
    *((1, 32, 32), (31, 64, 96), (33, 96, 64)),  # fewer rows than a block, one more than one
    *((1000, 96, 288), (4097, 384, 96)),  # threads share the rows
    *((616, 768, 1536), (100, 64, 3072)),  # or the columns
    *((616, 3072, 768), (77, 1568, 64)),  # sums in several slices, of different lengths
]
"""Rows, inputs and outputs."""


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def results(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and the inputs' gradients, in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return [each.detach().float() for each in (output, *gradients)]


def assert_as_exact_as_torch(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor
) -> None:
    exact = results(reference, [x.float() for x in inputs], upstream)
    low, ours = results(reference, inputs, upstream), results(function, inputs, upstream)
    for wanted, theirs, mine in zip(exact, low, ours, strict=True):
        assert mine.shape == wanted.shape
        assert float((mine - wanted).abs().max()) <= 1.5 * float((theirs - wanted).abs().max())
        assert float((mine - wanted).norm()) <= 1.1 * float((theirs - wanted).norm())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear(rows: int, inputs: int, outputs: int, residual: bool) -> None:
    tensors = [numbers(rows, inputs, seed=0), numbers(outputs, inputs, seed=1, scale=inputs**-0.5)]
    tensors += [numbers(outputs, seed=2)] + [numbers(rows, outputs, seed=3)] * residual

    def torchs(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight, bias)
        return y if other is None else y + other

    assert_as_exact_as_torch(native_linear, torchs, tensors, numbers(rows, outputs, seed=4))


def test_linear_without_bias_keeps_leading_dimensions() -> None:
    inputs = [numbers(2, 3, 5, 64, seed=0), numbers(96, 64, seed=1)]
    assert_as_exact_as_torch(
        lambda x, weight: native_linear(x, weight, None), F.linear, inputs, numbers(2, 3, 5, 96, seed=2)
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_mlp(rows: int, inputs: int, outputs: int, residual: bool) -> None:
    tensors = [numbers(rows, inputs, seed=0), numbers(outputs, inputs, seed=1, scale=inputs**-0.5)]
    tensors += [
        numbers(outputs, seed=2),
        numbers(inputs, outputs, seed=3, scale=outputs**-0.5),
        numbers(inputs, seed=4),
    ]
    tensors += [numbers(rows, inputs, seed=5)] * residual

    def torchs(x: Tensor, *parameters: Tensor) -> Tensor:
        first, second = parameters[:2], parameters[2:4]
        y = F.linear(F.gelu(F.linear(x, *first)), *second)
        return y + parameters[4] if residual else y

    assert_as_exact_as_torch(native_mlp, torchs, tensors, numbers(rows, inputs, seed=6))


def test_gelu_and_its_slope_everywhere() -> None:
    """Through identity weights, every bf16 number up to 100."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() <= 100)]
    x = x[: len(x) // 32 * 32].view(-1, 32).requires_grad_()
    one, zero = torch.eye(32).bfloat16(), torch.zeros(32).bfloat16()
    y = native_mlp(x, one, zero, one, zero)
    (slope,) = torch.autograd.grad(y.sum(), x)
    double = x.detach().double().requires_grad_()
    exact = F.gelu(double)
    (exact_slope,) = torch.autograd.grad(exact.sum(), double)
    rounding = 2**-8
    torch.testing.assert_close(y.double(), exact, rtol=rounding, atol=3e-5, check_dtype=False)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=rounding, atol=3e-5, check_dtype=False)


def layers_by_torch(x: Tensor, *parameters: Tensor) -> Tensor:
    """Weights and biases in turn."""
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    return torch.cat([F.linear(x, weight, bias) for weight, bias in layers], dim=-1)


def mlp_by_torch(x: Tensor, *parameters: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, *parameters[:2])), *parameters[2:])


@pytest.mark.parametrize("kind", ["linear", "joined", "mlp"])
def test_frozen_inputs_in_any_combination(kind: str) -> None:
    """The others' gradients are what they are with nothing frozen; hooks see them, and a second backward pass adds to them."""
    tensors = [numbers(40, 64, seed=0), numbers(64, 64, seed=1, scale=0.1), numbers(64, seed=2)]
    if kind != "linear":
        tensors += [numbers(64, 64, seed=3, scale=0.1), numbers(64, seed=4)]

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return (_Mlp if kind == "mlp" else _Linear).apply(x, None, *parameters)[0]

    reference = mlp_by_torch if kind == "mlp" else layers_by_torch
    upstream = numbers(40, 128 if kind == "joined" else 64, seed=5)
    _, *wanted = results(reference, [x.float() for x in tensors], upstream)
    for trained in itertools.product((False, True), repeat=len(tensors)):
        if not any(trained):
            continue
        leaves = [x.clone().requires_grad_(needed) for x, needed in zip(tensors, trained, strict=True)]
        seen: list[int] = []
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _, seen=seen, index=index: seen.append(index))
        output = ours(*leaves)
        output.backward(upstream, retain_graph=True)
        assert sorted(seen) == [index for index, needed in enumerate(trained) if needed]
        output.backward(upstream)
        for leaf, exact in zip(leaves, wanted, strict=True):
            if leaf.requires_grad:
                assert leaf.grad is not None
                assert float((leaf.grad.float() - 2 * exact).norm()) < 0.02 * float(exact.norm())
            else:
                assert leaf.grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(value: float) -> None:
    """In the same rows of the output as with torch, in no others, and in both weights' gradients; NaN in all gradients."""
    x, weight, bias = numbers(35, 64, seed=0), numbers(64, 64, seed=1), numbers(64, seed=2)
    x[33, 5] = value
    inputs = [x, weight, bias, numbers(64, 64, seed=3), numbers(64, seed=4)]
    upstream = numbers(35, 64, seed=5)
    mine, theirs = (results(mlp, inputs, upstream) for mlp in (native_mlp, mlp_by_torch))
    assert torch.equal(mine[0].isfinite().all(1), theirs[0].isfinite().all(1))
    for index in (2, 4):
        assert not mine[index].isfinite().all()
    if math.isnan(value):
        assert [bool(x.isfinite().all()) for x in mine] == [bool(x.isfinite().all()) for x in theirs]
        assert torch.equal(mine[1].isfinite().all(1), theirs[1].isfinite().all(1))


def test_gelu_far_out() -> None:
    one, zero = torch.eye(32).bfloat16(), torch.zeros(32).bfloat16()
    x = torch.tensor([[value] + [0.0] * 31 for value in (1e30, -1e30, 3e38, -3e38, -1000.0, -6.0)]).bfloat16()
    x.requires_grad_()
    y = native_mlp(x, one, zero, one, zero)
    (slope,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert torch.equal(y[:, 0], x[:, 0].clamp(min=0))
    assert torch.equal(slope[:, 0].round(decimals=3), (x[:, 0] > 0).bfloat16())


def test_results_repeat_to_the_bit() -> None:
    tensors = [numbers(1234, 96, seed=0), numbers(384, 96, seed=1), numbers(384, seed=2)]
    tensors += [numbers(96, 384, seed=3), numbers(96, seed=4)]
    first, again = (results(native_mlp, tensors, numbers(1234, 96, seed=5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_tensors_in_any_layout() -> None:
    x, weight = numbers(64, 70, seed=0).T[:64], numbers(64, 96, seed=1).T
    upstream = numbers(96, 64, seed=2).T
    assert not x.is_contiguous()
    assert not weight.is_contiguous()
    assert_as_exact_as_torch(lambda a, b: native_linear(a, b, None), F.linear, [x, weight], upstream)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads; undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(33, 96, 64), (33, 64, 96), (1, 32, 32), (200, 96, 96)])
def test_any_number_of_threads(
    threads: Callable[[int], None], rows: int, inputs: int, outputs: int, count: int
) -> None:
    """Some have nothing to do."""
    tensors = [numbers(rows, inputs, seed=0), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)]
    threads(count)
    assert_as_exact_as_torch(native_linear, F.linear, tensors, numbers(rows, outputs, seed=3))


def test_no_rows() -> None:
    tensors = [numbers(0, 96, seed=0), numbers(64, 96, seed=1), numbers(64, seed=2)]
    output, *gradients = results(native_linear, tensors, numbers(0, 64, seed=3))
    assert output.shape == (0, 64)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 48), (80, 64)])
def test_other_sizes_are_left_to_torch(outputs: int, inputs: int) -> None:
    assert not supports(torch.zeros(outputs, inputs, dtype=torch.bfloat16))


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight = numbers(8, 64, seed=0), numbers(96, 64, seed=1)
    for wrong in (
        (x.float(), weight, None),
        (x[:, :32], weight, None),
        (x, weight, numbers(64, seed=2)),
        (x, weight, numbers(96, seed=2).float()),
        (x, weight, None, numbers(8, 64, seed=3)),
    ):
        with pytest.raises(ValueError, match="fit together"):
            native_linear(*wrong)


def test_other_dtypes_are_left_to_torch() -> None:
    assert not supports(torch.zeros(64, 64))
