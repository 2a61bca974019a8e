"""Compare window attention kernels with the eager form: outputs and gradients, with and without
shift."""

import pytest
import torch

from clap_ds.model import window_attention
from clap_ds.model.swin import WindowAttention
from clap_ds.model.window_attention import attend_windows
from tests.model.kernel_cases import CASES, TOLERANCE, Case, by, draw, eager, largest_error

LARGE = [Case(64, 4, 24, 4), Case(64, 4, 32, 0), Case(32, 8, 24, 4), Case(8, 32, 24, 0)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_kernels_equal_eager_form(kernel: str, dtype: torch.dtype, case: Case) -> None:
    assert largest_error(by(kernel, case), eager(case), draw(case), dtype) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
def test_kernels_on_gpu_equal_eager_form(kernel: str, dtype: torch.dtype, case: Case) -> None:
    error = largest_error(by(kernel, case), eager(case), draw(case), dtype, "cuda")
    assert error < TOLERANCE[dtype]


def test_bias_table_gradient_is_summed_in_fp32() -> None:
    """Each row gets a sum over up to 64 places. If rounded only before and after, its error is
    below two bf16 roundings of 2⁻⁹ on average; if summed in bf16, above three."""
    *qkv, _, probe = draw(Case(16, 4, 24, 0), clips=4)
    table = torch.randn(225, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        attention = WindowAttention(96, 8, 4).to(dtype)
        attention.relative_position_bias.data = table.to(dtype)
        joined = torch.cat(qkv, dim=3).to(dtype)
        output = attend_windows(joined, attention.position_bias(), None, 8, 0, "sdpa")
        parameter = attention.relative_position_bias
        return torch.autograd.grad(output, parameter, probe.to(dtype))[0].double()

    exact = gradient(torch.float64)
    assert (gradient(torch.bfloat16) - exact).norm() < 2 * 2**-9 * exact.norm()


def test_sdpa_with_too_large_batch_splits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        batches.append(len(q))
        return attend(q, *arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(window_attention, "MAX_BATCH", 11)
    # 3 clips of 4 windows.
    case = Case(16, 4, 24, 0)
    dtype = torch.float64
    assert largest_error(by("sdpa", case), eager(case), draw(case), dtype) < TOLERANCE[dtype]
    assert batches == [11, 1]
