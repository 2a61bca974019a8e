"""The native kernel of window attention against the eager form in fp32, at every stage's shape, and beside `matmul` in bf16."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from clap_ds.native.window_attention import fits_windows, native_window_attention
from tests.kernels import needs_amx
from tests.model.window_attention_cases import TOLERANCE, Case, by, draw, eager, errors, results

pytestmark = needs_amx

BF16 = torch.bfloat16
STAGES = [(64, 4), (32, 8), (16, 16), (8, 32)]
CASES: list[Case] = [
    *(
        (grid, heads, dim, shift)
        for (grid, heads), dim, shift in itertools.product(STAGES, (24, 32), (0, 4))
        if grid > shift * 2
    ),
    (24, 3, 24, 4),
    (16, 2, 8, 3),
    (16, 1, 16, 7),
    (16, 2, 40, 4),
    (16, 2, 64, 1),
]
"""Grid, heads, head dim, shift: the stages of tiny (24) and base (32), an uneven number of windows, other dims and shifts."""


def native(qkv: Tensor, bias: Tensor, mask: Tensor | None, shift: int) -> Tensor:
    return native_window_attention(qkv, bias, shift)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_eager_form_as_closely_as_matmul(case: Case) -> None:
    inputs, shift = draw(case, clips=1 if case[0] == 64 else 3), case[3]
    expected = results(eager, inputs, shift, torch.float32)
    matmul = errors(results(by("matmul"), inputs, shift, BF16), expected)
    for name, error in errors(results(native, inputs, shift, BF16), expected).items():
        assert error < min(TOLERANCE[BF16], 1.5 * matmul[name]), name


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("dim", [24, 32])
def test_scores_too_large_for_their_powers(dim: int, shift: int) -> None:
    """2^score alone would overflow or vanish; what is left of a row are its largest few weights."""
    inputs = draw((16, 2, dim, shift), clips=1, spread=12.0)
    inputs[1][1] -= 150.0
    expected = results(eager, inputs, shift, torch.float32)
    for name, error in errors(results(native, inputs, shift, BF16), expected).items():
        assert error < TOLERANCE[BF16], name


def test_a_value_that_is_not_a_number_stays_in_its_window() -> None:
    qkv, bias, _ = draw((16, 2, 24, 0), clips=1)
    clean = native_window_attention(qkv, bias, 0)
    qkv[0, 3, 3, 0] = torch.nan
    got = native_window_attention(qkv, bias, 0)
    assert got[0, 3, 3, :24].isnan().all()
    got[0, :8, :8] = clean[0, :8, :8]
    assert got.equal(clean)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_the_same_from_run_to_run_and_with_other_numbers_of_threads(threads: int) -> None:
    """Only the sum of the bias gradient depends on them."""
    inputs, before = draw((16, 3, 24, 4), clips=1), torch.get_num_threads()
    expected = results(native, inputs, 4, BF16)
    torch.set_num_threads(threads)
    try:
        got = results(native, inputs, 4, BF16)
    finally:
        torch.set_num_threads(before)
    assert all(got[name].equal(expected[name]) for name in expected if name != "bias" or threads == before)
    torch.testing.assert_close(got["bias"], expected["bias"], rtol=0.01, atol=0.01)


def test_a_bias_of_another_dtype_or_without_gradient() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), clips=1)
    qkv.requires_grad_()
    wide = bias.float().requires_grad_()
    output = native_window_attention(qkv, wide, 4)
    d_qkv, d_bias = torch.autograd.grad(output, (qkv, wide), probe)
    assert d_bias.dtype == torch.float32
    again = native_window_attention(qkv, bias, 4)
    assert again.equal(output)
    assert torch.autograd.grad(again, qkv, probe)[0].equal(d_qkv)


def test_tensors_that_are_not_contiguous() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), clips=2)
    turned = qkv.transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    straight = qkv.clone().requires_grad_()
    got = native_window_attention(turned, bias.permute(1, 2, 0).contiguous().permute(2, 0, 1), 4)
    expected = native_window_attention(straight, bias, 4)
    assert got.equal(expected)
    got.backward(probe.transpose(1, 2).contiguous().transpose(1, 2))
    expected.backward(probe)
    assert turned.grad.equal(straight.grad)


def test_what_it_cannot_compute() -> None:
    assert [
        fits_windows(8, 24),
        fits_windows(8, 64),
        fits_windows(4, 24),
        fits_windows(8, 20),
        fits_windows(8, 72),
    ] == [True, True, False, False, False]
    qkv, bias, _ = draw((8, 2, 24, 0), clips=1)
    for wrong in (
        (qkv.float(), bias, 0),
        (qkv[:, :, :4], bias, 0),
        (qkv[..., :100], bias, 0),
        (qkv[..., :120], bias, 0),
        (qkv, bias[:, :16, :16], 0),
        (qkv, bias, 8),
    ):
        with pytest.raises(AssertionError):
            native_window_attention(*wrong)
