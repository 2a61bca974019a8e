"""The native kernel of window attention against the eager form in fp32, at every stage's shape, and beside `matmul` in bf16."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from clap_ds.model.swin import shifted_window_mask
from clap_ds.model.window_attention import Kernel, attend_windows, resolve_kernel
from clap_ds.native import library
from clap_ds.native.window_attention import native_window_attention, supports
from tests.kernels import needs_amx
from tests.model.window_attention_cases import TOLERANCE

STAGES = [(64, 4), (32, 8), (16, 16), (8, 32)]
CASES = [
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


def draw(case: tuple[int, int, int, int], clips: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, bias and the output's gradient in bf16."""
    grid, heads, dim, shift = case
    generator = torch.Generator().manual_seed(grid * 100 + dim + shift)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    qkv = normal(clips, grid, grid, 3 * heads * dim) * spread
    return qkv, normal(heads, 64, 64), normal(clips, grid, grid, heads * dim)


def results(kernel: Kernel, inputs: tuple[Tensor, Tensor, Tensor], shift: int, dtype: torch.dtype) -> dict[str, Tensor]:
    qkv, bias, probe = (tensor.detach().clone().to(dtype) for tensor in inputs)
    qkv.requires_grad_()
    bias.requires_grad_()
    mask = shifted_window_mask(qkv.shape[1], 8, shift) if shift else None
    output = attend_windows(qkv, bias, mask, window=8, shift=shift, kernel=kernel)
    output.backward(probe)
    assert qkv.grad is not None
    assert bias.grad is not None
    assert output.dtype == qkv.grad.dtype == bias.grad.dtype == dtype
    d_q, d_k, d_v = qkv.grad.chunk(3, dim=-1)
    found = {"output": output, "q": d_q, "k": d_k, "v": d_v, "bias": bias.grad}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest value."""
    return {name: float((got[name] - x).abs().max() / x.abs().max()) for name, x in expected.items()}


@needs_amx
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_eager_form_as_closely_as_matmul(case: tuple[int, int, int, int]) -> None:
    clips = 1 if case[0] == 64 else 3
    inputs = draw(case, clips)
    expected = results("eager", inputs, case[3], torch.float32)
    native = errors(results("native", inputs, case[3], torch.bfloat16), expected)
    matmul = errors(results("matmul", inputs, case[3], torch.bfloat16), expected)
    for name, error in native.items():
        assert error < TOLERANCE[torch.bfloat16], name
        assert error < 1.5 * matmul[name], name


@needs_amx
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("dim", [24, 32])
def test_scores_too_large_for_their_powers(dim: int, shift: int) -> None:
    """2^score alone would overflow or vanish; what is left of a row are its largest few weights."""
    qkv, bias, probe = draw((16, 2, dim, shift), 1, spread=12.0)
    bias[1] -= 150.0
    inputs = qkv, bias, probe
    expected = results("eager", inputs, shift, torch.float32)
    for name, error in errors(results("native", inputs, shift, torch.bfloat16), expected).items():
        assert error < TOLERANCE[torch.bfloat16], name


@needs_amx
def test_a_value_that_is_not_a_number_stays_in_its_window() -> None:
    qkv, bias, _ = draw((16, 2, 24, 0), 1)
    clean = native_window_attention(qkv, bias, 8, 0)
    qkv[0, 3, 3, 0] = torch.nan
    got = native_window_attention(qkv, bias, 8, 0)
    assert got[0, 3, 3, :24].isnan().all()
    got[0, :8, :8] = clean[0, :8, :8]
    assert got.equal(clean)


@needs_amx
def test_results_are_the_same_from_run_to_run() -> None:
    inputs = draw((32, 8, 24, 4), 3)
    first, second = (results("native", inputs, 4, torch.bfloat16) for _ in range(2))
    for name, tensor in first.items():
        assert tensor.equal(second[name]), name


@needs_amx
@pytest.mark.parametrize("threads", [1, 3])
def test_other_numbers_of_threads(threads: int) -> None:
    """Only the sum of the bias gradient depends on them."""
    inputs = draw((16, 3, 24, 4), 1)
    expected = results("native", inputs, 4, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = results("native", inputs, 4, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    for name in ("output", "q", "k", "v"):
        assert got[name].equal(expected[name]), name
    torch.testing.assert_close(got["bias"], expected["bias"], rtol=0.01, atol=0.01)


@needs_amx
def test_a_bias_of_another_dtype_or_without_gradient() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), 1)
    qkv.requires_grad_()
    wide = bias.float().requires_grad_()
    output = native_window_attention(qkv, wide, 8, 4)
    d_qkv, d_bias = torch.autograd.grad(output, (qkv, wide), probe)
    assert d_bias.dtype == torch.float32
    again = native_window_attention(qkv, bias, 8, 4)
    assert again.equal(output)
    assert torch.autograd.grad(again, qkv, probe)[0].equal(d_qkv)


@needs_amx
def test_tensors_that_are_not_contiguous() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), 2)
    expected = native_window_attention(qkv, bias, 8, 4)
    turned = qkv.transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    got = native_window_attention(turned, bias.permute(1, 2, 0).contiguous().permute(2, 0, 1), 8, 4)
    assert got.equal(expected)
    got.backward(probe.transpose(1, 2).contiguous().transpose(1, 2))
    straight = qkv.detach().clone().requires_grad_()
    native_window_attention(straight, bias, 8, 4).backward(probe)
    assert turned.grad is not None
    assert straight.grad is not None
    assert turned.grad.equal(straight.grad)


@needs_amx
def test_torch_compile_takes_it_whole() -> None:
    qkv, bias, probe = draw((16, 2, 24, 4), 1)
    qkv.requires_grad_()
    bias.requires_grad_()
    mask = shifted_window_mask(16, 8, 4)

    def attend(qkv: Tensor, bias: Tensor) -> Tensor:
        return attend_windows(qkv, bias, mask, window=8, shift=4, kernel="auto")

    expected = attend(qkv, bias)
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(qkv, bias)
    assert got.equal(expected)
    for a, b in zip(
        torch.autograd.grad(got, (qkv, bias), probe), torch.autograd.grad(expected, (qkv, bias), probe), strict=True
    ):
        assert a.equal(b)


@pytest.mark.parametrize(
    ("shape", "dtype", "window", "found"),
    [
        ((1, 8, 8, 144), torch.float32, 8, "float32"),
        ((1, 8, 8, 144), torch.bfloat16, 4, "4 × 4"),
        ((1, 8, 8, 6 * 20), torch.bfloat16, 8, "found 20"),
        ((1, 8, 8, 6 * 72), torch.bfloat16, 8, "found 72"),
    ],
)
def test_says_what_it_cannot_compute(shape: tuple[int, ...], dtype: torch.dtype, window: int, found: str) -> None:
    qkv = torch.empty(shape, dtype=dtype)
    assert not supports(dtype, qkv.device, window, shape[3] // 6)
    with pytest.raises(ValueError, match=f"'native'.*{found}"):
        resolve_kernel("native", qkv, window, 2)
    assert resolve_kernel("auto", qkv, window, 2) == "matmul"


def test_says_why_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: "no compiler found")
    qkv = torch.empty(1, 8, 8, 144, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no compiler found"):
        resolve_kernel("native", qkv, 8, 2)
    assert resolve_kernel("auto", qkv, 8, 2) == "matmul"
