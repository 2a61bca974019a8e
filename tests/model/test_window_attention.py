"""Compare window attention kernels with PyTorch's on CPUs in fp64: outputs and gradients, with and
without shift."""

import pytest
import torch

from clap_ds.model import window_attention
from clap_ds.model.swin import WindowAttention
from tests.model.kernel_cases import (
    CASES,
    TOLERANCE,
    Case,
    by,
    draw,
    errors,
    largest_error,
    results,
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_matmul_equals_sdpa(dtype: torch.dtype, case: Case) -> None:
    error = largest_error(by("matmul", case), by("sdpa", case), draw(case), dtype)
    assert error < TOLERANCE[dtype]


def test_bias_table_gradient_is_summed_in_fp32() -> None:
    """Each row gets a sum over up to 64 places. If rounded only at the end, its error is below a
    bf16 rounding of 2⁻⁹ on average; if summed in bf16, above two."""
    upstream = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        attention = WindowAttention(96, 8, 4).to(dtype)
        attention.position_bias().backward(upstream.to(attention.position_bias().dtype))
        return attention.relative_position_bias.grad.double()

    exact = gradient(torch.float64)
    assert (gradient(torch.bfloat16) - exact).norm() < 2**-9 * exact.norm()


def test_sdpa_with_too_large_batch_splits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 clips of 4 windows.
    case = Case(16, 4, 24, 0)
    inputs = draw(case)
    whole = results(by("sdpa", case), inputs, torch.float64)
    monkeypatch.setattr(window_attention, "MAX_BATCH", 11)
    with torch.profiler.profile() as profile:
        parts = results(by("sdpa", case), inputs, torch.float64)
    assert max(errors(parts, whole)) < TOLERANCE[torch.float64]
    names = [event.name for event in profile.events()]
    assert names.count("aten::scaled_dot_product_attention") == 2
