"""The native kernel of window attention against the eager form in fp32, at every stage's shape, and beside `matmul` in bf16."""

import itertools

import pytest
import torch

from clap_ds.native.window_attention import fits_windows, native_window_attention
from tests.kernels import each_implementation
from tests.model.kernel_cases import TOLERANCE, Case, Compute, by, draw, eager, errors, results
from tests.native.exactness import threads

pytestmark = each_implementation

BF16 = torch.bfloat16
STAGES = [(64, 4), (32, 8), (16, 16), (8, 32)]
SIZES = [(*stage, dim, shift) for stage, dim, shift in itertools.product(STAGES, (24, 32), (0, 4))]
CASES: list[Case] = [
    *(case for case in SIZES if case[0] > 2 * case[3]),
    *((24, 3, 24, 4), (16, 2, 8, 3), (16, 2, 40, 7), (16, 2, 64, 1)),
]
"""Grid, heads, head dim, shift: the stages of tiny (24) and base (32), an uneven number of windows, other dims and shifts."""


def native(shift: int) -> Compute:
    return lambda q, k, v, bias: native_window_attention(torch.cat([q, k, v], dim=3), bias, shift)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_eager_form_as_closely_as_matmul(case: Case) -> None:
    inputs = draw(case, clips=1 if case[0] == 64 else 3)
    expected = results(eager(case), inputs, torch.float32)
    matmul = errors(results(by("matmul", case), inputs, BF16), expected)
    for error, usual in zip(errors(results(native(case[3]), inputs, BF16), expected), matmul, strict=True):
        assert error < min(TOLERANCE[BF16], 1.5 * usual)


def test_scores_too_large_for_their_powers() -> None:
    """2^score alone would overflow or vanish; what is left of a row are its largest few weights."""
    inputs = draw((16, 2, 32, 4), clips=1, spread=12.0)
    inputs[3][1] -= 150.0
    expected = results(eager((16, 2, 32, 4)), inputs, torch.float32)
    assert max(errors(results(native(4), inputs, BF16), expected)) < TOLERANCE[BF16]


def test_a_value_that_is_not_a_number_stays_in_its_window() -> None:
    q, k, v, bias, _ = draw((16, 2, 24, 0), clips=1)
    clean = native(0)(q, k, v, bias)
    q[0, 3, 3, 0] = torch.nan
    got = native(0)(q, k, v, bias)
    assert got[0, 3, 3, :24].isnan().all()
    got[0, :8, :8] = clean[0, :8, :8]
    assert got.equal(clean)


def test_results_are_the_same_from_run_to_run_and_with_other_numbers_of_threads() -> None:
    """Only the sum of the bias gradient depends on them."""
    inputs = draw((16, 3, 24, 4), clips=1)
    *expected, bias = results(native(4), inputs, BF16)
    with threads(3):
        (*got, other), (*_, again) = (results(native(4), inputs, BF16) for _ in range(2))
    assert all(map(torch.equal, got, expected))
    assert other.equal(again)
    torch.testing.assert_close(other, bias, rtol=0.01, atol=0.01)


def test_other_layouts_and_a_bias_of_another_dtype() -> None:
    *tensors, bias, probe = draw((16, 2, 24, 4), clips=2)
    qkv, wide = torch.cat(tensors, dim=3).requires_grad_(), bias.float().requires_grad_()
    output = native_window_attention(qkv, wide, 4)
    d_qkv, d_bias = torch.autograd.grad(output, (qkv, wide), probe)
    assert d_bias.dtype == torch.float32
    turned = qkv.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    again = native_window_attention(turned, bias.permute(1, 2, 0).contiguous().permute(2, 0, 1), 4)
    assert again.equal(output)
    again.backward(probe.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned.grad.equal(d_qkv)


def test_what_there_are_kernels_for() -> None:
    sizes = [(8, 24), (8, 64), (4, 24), (8, 20), (8, 72)]
    assert [size for size in sizes if fits_windows(*size)] == sizes[:2]
