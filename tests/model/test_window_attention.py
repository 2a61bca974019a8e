"""Every kernel of window attention against the eager form: outputs and gradients, shifted and not."""

import os
import subprocess
import sys

import pytest
import torch

from clap_ds.model import window_attention
from clap_ds.model.windows import shifted_window_mask
from tests.model import window_attention_cases as cases
from tests.model.window_attention_cases import CASES, TOLERANCE, by, eager, largest_error


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_kernels_agree_with_the_eager_form(kernel: str, dtype: torch.dtype, case: cases.Case) -> None:
    assert largest_error(by(kernel), case, dtype) < TOLERANCE[dtype]


def test_a_batch_too_large_for_sdpa_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.draw(CASES[0])  # 3 clips of 4 windows
    expected = cases.results(by("sdpa"), inputs, 0, torch.float64)
    batches, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        batches.append(len(q))
        return attend(q, *others)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(window_attention, "MOST_BATCHED", 11)
    got = cases.results(by("sdpa"), inputs, 0, torch.float64)
    assert batches == [8, 4]
    assert max(cases.errors(got, expected).values()) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_eager_form_is_attention_by_definition(case: cases.Case) -> None:
    """Oracle: each token over the whole grid, less the tokens of other shifted windows and those a window or more away."""
    grid, heads, dim, shift = case
    qkv = torch.randn(1, grid, grid, 3 * heads * dim, dtype=torch.float64)
    bias = torch.randn(heads, 64, 64, dtype=torch.float64)
    got = eager(qkv, bias, shifted_window_mask(grid, 8, shift) if shift else None, shift)
    place = torch.cartesian_prod(torch.arange(grid), torch.arange(grid))
    shifted = (place - shift) % grid
    together = (shifted[:, None] // 8 == shifted // 8).all(dim=2) & ((place[:, None] - place).abs() < 8).all(dim=2)
    inside = shifted % 8 @ torch.tensor([8, 1])
    q, k, v = qkv.view(-1, 3, heads, dim).permute(1, 2, 0, 3)
    scores = q @ k.transpose(1, 2) / dim**0.5 + bias[:, inside][:, :, inside]
    expected = scores.masked_fill(~together, -torch.inf).softmax(dim=2) @ v
    torch.testing.assert_close(got.view(-1, heads, dim).transpose(0, 1), expected)


@pytest.mark.end_to_end
def test_the_triton_kernel_agrees_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, cases.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok grid") == 2 * len(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (64, 4, 24, 4), (64, 4, 32, 0), (32, 8, 24, 4), (8, 32, 24, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
def test_kernels_agree_with_the_eager_form_on_a_gpu(kernel: str, dtype: torch.dtype, case: cases.Case) -> None:
    assert largest_error(by(kernel), case, dtype, "cuda") < TOLERANCE[dtype]


@pytest.mark.gpu
def test_sdpa_takes_a_micro_batch_of_1024_on_a_gpu() -> None:
    """HTSAT-tiny's first stage, 65,536 windows; the last clips against the same ones alone."""
    qkv = torch.randn(1024, 64, 64, 3 * 96, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for clips in (qkv, qkv[-2:]):
        leaf = clips.clone().requires_grad_()
        output = by("sdpa")(leaf, bias, None, 0)
        output.sum().backward()
        assert leaf.grad is not None
        found.append((output.detach()[-2:], leaf.grad[-2:]))
    torch.testing.assert_close(*found)
    assert bias.grad is not None
    assert bias.grad.isfinite().all()
