"""Window attention against its eager form, kernel by kernel; run by itself under Triton's interpreter.

    TRITON_INTERPRET=1 python tests/model/window_attention_cases.py

The interpreter must be chosen before Triton is imported, so those cases need a process of their own.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.window_attention import Kernel, attend_windows
from clap_ds.model.windows import merge_windows, partition_windows, shifted_window_mask

Case = tuple[int, int, int, int]
Attend = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]

# grid, heads, head dim, shift: the stages of tiny (24) and base (32) in small, one window alone, an uneven number of windows
CASES: list[Case] = [(16, 4, 24, 0), (16, 4, 24, 4), (16, 2, 32, 4), (8, 2, 32, 0), (24, 1, 24, 4), (16, 1, 8, 3)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03}
"""Of the largest value; bf16 holds 8 bits and the kernels round at other places than the eager form."""


def eager(qkv_BHWE: Tensor, bias_ANN: Tensor, mask_GNN: Tensor | None, shift: int) -> Tensor:
    """One plain operation after the other."""
    shifted = partition_windows(qkv_BHWE.roll((-shift, -shift), dims=(1, 2)), 8)
    q, k, v = shifted.unflatten(3, (3, len(bias_ANN), -1)).permute(3, 0, 1, 4, 2, 5)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias_ANN
    if mask_GNN is not None:
        scores = scores + mask_GNN[:, None].to(scores.dtype)
    mixed = (scores.softmax(dim=-1) @ v).transpose(2, 3).flatten(3)
    return merge_windows(mixed, qkv_BHWE.shape[1]).roll((shift, shift), dims=(1, 2))


def by(kernel: Kernel) -> Attend:
    """By the model's own function."""

    def attend(qkv: Tensor, bias: Tensor, mask: Tensor | None, shift: int) -> Tensor:
        return attend_windows(qkv, bias, mask, window=8, shift=shift, kernel=kernel)

    return attend


def draw(case: Case, clips: int = 3, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, bias and the output's gradient in bf16."""
    grid, heads, dim, shift = case
    generator = torch.Generator().manual_seed(grid * 100 + dim + shift)
    normal = functools.partial(torch.randn, generator=generator)
    qkv, bias = normal(clips, grid, grid, 3 * heads * dim).bfloat16() * spread, normal(heads, 64, 64).bfloat16()
    return qkv, bias, normal(clips, grid, grid, heads * dim).bfloat16()


def results(
    attend: Attend, inputs: tuple[Tensor, ...], shift: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Output and gradients, in fp64."""
    qkv, bias, probe = (tensor.detach().clone().to(device, dtype) for tensor in inputs)
    qkv.requires_grad_()
    bias.requires_grad_()
    mask = shifted_window_mask(qkv.shape[1], 8, shift).to(device) if shift else None
    output = attend(qkv, bias, mask, shift)
    assert output.dtype == dtype
    output.backward(probe)
    assert qkv.grad is not None
    assert bias.grad is not None
    d_q, d_k, d_v = qkv.grad.chunk(3, dim=-1)
    found = {"output": output, "q": d_q, "k": d_k, "v": d_v, "bias": bias.grad}
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest value."""
    return {name: float((got[name] - x).abs().max() / x.abs().max()) for name, x in expected.items()}


def largest_error(attend: Attend, case: Case, dtype: torch.dtype, device: str = "cpu") -> float:
    """Largest difference from the eager form in fp64, of output and gradients, over the largest value of each."""
    inputs = draw(case)
    expected = results(eager, inputs, case[3], torch.float64)
    return max(errors(results(attend, inputs, case[3], dtype, device), expected).values())


def check_traced(case: Case) -> None:
    """Raises where what torch.compile is told of the kernels' results isn't what they are: here of grids and a bias that don't
    lie in order, as the model's own bias, which is indexed, doesn't."""
    from clap_ds.model.window_attention_triton import _backward, _forward

    qkv, bias, probe = (tensor.transpose(1, 2).contiguous().transpose(1, 2).float() for tensor in draw(case))
    parts = ("test_schema", "test_faketensor")
    torch.library.opcheck(_forward, (qkv, bias, 8, case[3]), test_utils=parts)
    torch.library.opcheck(_backward, (qkv, bias, probe, 8, case[3]), test_utils=parts)


if __name__ == "__main__":
    check_traced(CASES[3])
    found = {(case, dtype): largest_error(by("triton"), case, dtype) for case in CASES for dtype in list(TOLERANCE)[1:]}
    for (case, dtype), error in found.items():
        print("ok" if error < TOLERANCE[dtype] else "FAILED", "grid, heads, dim, shift", case, dtype, error)
    sys.exit(any(error >= TOLERANCE[dtype] for (_, dtype), error in found.items()))
