"""The native kernel of window attention against the eager form in fp32, at every stage's shape, and beside `matmul` in bf16."""

import itertools

import pytest
import torch
from torch import Tensor

from clap_ds.native.window_attention import fits_windows, native_window_attention
from tests.kernels import each_implementation
from tests.model.window_attention_cases import TOLERANCE, Case, by, draw, eager, errors, results
from tests.native.exactness import threads

pytestmark = each_implementation

BF16 = torch.bfloat16
STAGES = [(64, 4), (32, 8), (16, 16), (8, 32)]
SIZES = [(*stage, dim, shift) for stage, dim, shift in itertools.product(STAGES, (24, 32), (0, 4))]
CASES: list[Case] = [
    *(case for case in SIZES if case[0] > 2 * case[3]),
    *((24, 3, 24, 4), (16, 2, 8, 3), (16, 1, 16, 7), (16, 2, 40, 4), (16, 2, 64, 1)),
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_the_same_from_run_to_run_and_with_other_numbers_of_threads(count: int) -> None:
    """Only the sum of the bias gradient depends on them."""
    inputs, before = draw((16, 3, 24, 4), clips=1), torch.get_num_threads()
    expected = results(native, inputs, 4, BF16)
    with threads(count):
        got = results(native, inputs, 4, BF16)
    assert all(got[name].equal(expected[name]) for name in expected if name != "bias" or count == before)
    torch.testing.assert_close(got["bias"], expected["bias"], rtol=0.01, atol=0.01)


def test_other_layouts_and_a_bias_of_another_dtype_or_without_gradient() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), clips=2)
    qkv.requires_grad_()
    wide = bias.float().requires_grad_()
    output = native_window_attention(qkv, wide, 4)
    d_qkv, d_bias = torch.autograd.grad(output, (qkv, wide), probe)
    assert d_bias.dtype == torch.float32
    turned = qkv.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    again = native_window_attention(turned, bias.permute(1, 2, 0).contiguous().permute(2, 0, 1), 4)
    assert again.equal(output)
    again.backward(probe.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned.grad.equal(d_qkv)


def test_sizes_that_there_are_kernels_for() -> None:
    """Window and head dim."""
    sizes = [(8, 24), (8, 64), (4, 24), (8, 20), (8, 72)]
    assert [size for size in sizes if fits_windows(*size)] == sizes[:2]
