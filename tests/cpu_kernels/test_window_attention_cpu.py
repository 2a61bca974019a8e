"""Test the native window attention against eager fp32 at every stage's shape, and compare it with
`matmul` in bf16."""

import itertools

import pytest
import torch

from clap_ds.cpu_kernels.window_attention import native_window_attention
from tests.kernels import each_implementation
from tests.model.kernel_cases import TOLERANCE, Case, Compute, by, draw, eager, errors, results

pytestmark = each_implementation

BF16 = torch.bfloat16
STAGES = [(64, 4), (32, 8), (16, 16), (8, 32)]
SIZES = [(*stage, dim, shift) for stage, dim, shift in itertools.product(STAGES, (24, 32), (0, 4))]
CASES: list[Case] = [
    *(case for case in SIZES if case[0] > 2 * case[3]),
    *((24, 3, 24, 4), (16, 2, 8, 3), (16, 2, 40, 7), (16, 2, 64, 1)),
]
"""Grid, heads, head dim, shift: stages of tiny (24) and base (32), odd numbers of windows, other
dims and shifts."""


def native(shift: int) -> Compute:
    return lambda q, k, v, bias: native_window_attention(torch.cat([q, k, v], dim=3), bias, shift)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_eager_form_as_closely_as_matmul(case: Case) -> None:
    inputs = draw(case, clips=1 if case[0] == 64 else 3)
    expected = results(eager(case), inputs, torch.float32)
    matmul = errors(results(by("matmul", case), inputs, BF16), expected)
    for error, usual in zip(
        errors(results(native(case[3]), inputs, BF16), expected), matmul, strict=True
    ):
        assert error < min(TOLERANCE[BF16], 1.5 * usual)


def test_scores_too_large_for_their_powers() -> None:
    """2^score alone would overflow or underflow; only each row's largest weights remain."""
    inputs = draw((16, 2, 32, 4), clips=1, spread=12.0)
    inputs[3][1] -= 150.0
    expected = results(eager((16, 2, 32, 4)), inputs, torch.float32)
    assert max(errors(results(native(4), inputs, BF16), expected)) < TOLERANCE[BF16]
