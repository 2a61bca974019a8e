"""Every kernel of window attention against the eager form: outputs and gradients, shifted and not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.model import window_attention
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import resolve_kernel
from clap_ds.model.windows import relative_position_index, shifted_window_mask
from tests.model import window_attention_cases as cases
from tests.model.window_attention_cases import CASES, TOLERANCE, by, eager, largest_error


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_kernels_agree_with_the_eager_form(kernel: str, dtype: torch.dtype, case: cases.Case) -> None:
    assert largest_error(by(kernel), case, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_eager_form_is_attention_by_definition(case: cases.Case) -> None:
    """Oracle: for each token a loop over the tokens of its shifted window that lie in the same region."""
    grid, heads, dim, shift = case
    qkv = torch.randn(1, grid, grid, 3 * heads * dim, dtype=torch.float64)
    bias = torch.randn(heads, 64, 64, dtype=torch.float64)
    got = eager(qkv, bias, shifted_window_mask(grid, 8, shift) if shift else None, shift)
    q, k, v = qkv[0].unflatten(2, (3, heads, dim)).unbind(2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        row, column, head = (int(torch.randint(limit, (), generator=generator)) for limit in (grid, grid, heads))
        scores, values = [], []
        for other, inside in neighbours(row, column, grid, shift):
            product = q[row, column, head] @ k[*other, head]
            scores.append(product / dim**0.5 + bias[head][inside])
            values.append(v[*other, head])
        expected = torch.stack(scores).softmax(0) @ torch.stack(values)
        torch.testing.assert_close(got[0, row, column].unflatten(0, (heads, dim))[head], expected)


def neighbours(row: int, column: int, grid: int, shift: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The tokens that one attends to, and the places of both in their window."""
    own = shifted_place(row, column, grid, shift)
    for other_row in range(grid):
        for other_column in range(grid):
            other = shifted_place(other_row, other_column, grid, shift)
            same_window = own[0] // 8 == other[0] // 8 and own[1] // 8 == other[1] // 8
            if same_window and abs(other_row - row) < 8 and abs(other_column - column) < 8:
                places = (own[0] % 8 * 8 + own[1] % 8, other[0] % 8 * 8 + other[1] % 8)
                yield (other_row, other_column), places


def shifted_place(row: int, column: int, grid: int, shift: int) -> tuple[int, int]:
    return (row - shift) % grid, (column - shift) % grid


@pytest.mark.end_to_end
def test_the_triton_kernel_agrees_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, cases.__file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok grid") == 2 * len(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (64, 4, 24, 4), (64, 4, 32, 0), (32, 8, 24, 4), (8, 32, 24, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
def test_kernels_agree_with_the_eager_form_on_a_gpu(kernel: str, dtype: torch.dtype, case: cases.Case) -> None:
    assert largest_error(by(kernel), case, dtype, "cuda") < TOLERANCE[dtype]


def test_auto_is_what_was_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert [resolve_kernel("auto", device) for device in (cpu, meta)] == ["matmul", "sdpa"]
    assert resolve_kernel("sdpa", cpu) == "sdpa"
    monkeypatch.setattr(window_attention, "has_triton_package", lambda: False)
    with pytest.raises(ValueError, match="needs the triton package"):
        resolve_kernel("triton", cpu)


def embeddings_and_gradients(kernel: str) -> list[Tensor]:
    """Of the micro model, whose relative position bias is made to matter."""
    torch.manual_seed(0)
    model = ClapModel(load_preset("micro"), attention=kernel).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias"):
            torch.nn.init.normal_(parameter)
    waveforms = torch.rand(2, model.config.audio.num_samples, dtype=torch.float64) - 0.5
    input_ids = torch.randint(4, 500, (2, 12))
    mask = torch.ones_like(input_ids)
    mask[1, 5:] = 0
    audio, text, _ = model(waveforms, input_ids, mask)
    (audio[:, 0] + text[:, 0]).sum().backward()
    return [audio, text, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_the_whole_model_is_the_same_with_either_kernel() -> None:
    for got, expected in zip(embeddings_and_gradients("auto"), embeddings_and_gradients("sdpa"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_bias_gradients_reach_the_table() -> None:
    """One table entry per relative position: its gradient is the sum over the pairs at that position."""
    torch.manual_seed(0)
    block = ClapModel(load_preset("micro"), attention="auto").audio.stages[0].blocks[0].attention
    bias = block.position_bias()
    probe = torch.randn_like(bias)
    (bias * probe).sum().backward()
    expected = torch.zeros_like(block.relative_position_bias)
    index = relative_position_index(block.window).flatten()
    expected.index_add_(0, index, probe.flatten(1).T)
    torch.testing.assert_close(block.relative_position_bias.grad, expected)
