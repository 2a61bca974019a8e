"""Test the native window attention against PyTorch's in fp32, and compare it with `matmul` in
bf16."""

import pytest
import torch
from torch import Tensor

from clap_ds.cpu_kernels.window_attention import native_window_attention
from tests.kernels import each_implementation
from tests.model.kernel_cases import TOLERANCE, Case, by, draw, errors, results

pytestmark = each_implementation

BF16 = torch.bfloat16
CASES = [
    # Stages of tiny and base, the last one without shift.
    Case(64, 4, 24, 4),
    Case(32, 8, 32, 4),
    Case(8, 32, 24, 0),
    # An odd number of windows, and other dims and shifts.
    Case(24, 3, 8, 3),
    Case(16, 2, 64, 1),
]


def native_errors(case: Case, inputs: list[Tensor], expected: list[Tensor]) -> list[float]:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return native_window_attention(torch.cat([q, k, v], dim=3), bias, case.shift)

    return errors(results(attend, inputs, BF16), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_close_to_fp32_as_matmul(case: Case) -> None:
    inputs = draw(case, clips=1 if case.grid == 64 else 3)
    expected = results(by("sdpa", case), inputs, torch.float32)
    matmul_errors = errors(results(by("matmul", case), inputs, BF16), expected)
    pairs = zip(native_errors(case, inputs, expected), matmul_errors, strict=True)
    assert all(error < min(TOLERANCE[BF16], 1.5 * usual) for error, usual in pairs)


def test_scores_beyond_range_of_their_powers_give_finite_weights() -> None:
    """2^score alone would overflow or underflow; only each row's largest weights remain."""
    case = Case(16, 2, 32, 4)
    inputs = draw(case, clips=1, spread=12.0)
    inputs[3][1] -= 150.0
    expected = results(by("sdpa", case), inputs, torch.float32)
    assert max(native_errors(case, inputs, expected)) < TOLERANCE[BF16]
