"""Test the native window attention against PyTorch's in fp32, and compare it with `matmul` in
bf16."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clap_ds.cpu_kernels.window_attention import native_window_attention
from tests.cpu_kernels.exactness import assert_within_roundings
from tests.kernels import each_implementation
from tests.model.kernel_cases import Case, by, draw

pytestmark = each_implementation

CASES = [
    # Stages of tiny and base, the last one without shift.
    Case(64, 4, 24, 4),
    Case(32, 8, 32, 4),
    Case(8, 32, 24, 0),
    # An odd number of windows, and other dims and shifts.
    Case(24, 3, 8, 3),
    Case(16, 2, 64, 1),
]


def attend_natively(case: Case) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return native_window_attention(torch.cat([q, k, v], dim=3), bias, case.shift)

    return attend


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_exact_to_roundings(case):
    *inputs, probe = draw(case, clips=1 if case.grid == 64 else 3)
    assert_within_roundings(attend_natively(case), by("sdpa", case), inputs, probe)


def test_scores_beyond_range_of_their_powers_give_finite_weights():
    """2^score alone would overflow or underflow; only each row's largest weights remain."""
    case = Case(16, 2, 32, 4)
    *inputs, probe = draw(case, clips=1, spread=12.0)
    inputs[3][1] -= 150.0
    assert_within_roundings(attend_natively(case), by("sdpa", case), inputs, probe)
