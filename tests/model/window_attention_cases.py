"""Window attention against its eager form, kernel by kernel; run by itself under Triton's interpreter.

    TRITON_INTERPRET=1 python tests/model/window_attention_cases.py triton [cuda]

The interpreter must be chosen before Triton is imported, so those cases need a process of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.model.swin import shifted_window_mask
from clap_ds.model.window_attention import Kernel, attend_windows

# grid, heads, head dim, shift: the stages of tiny (24) and base (32) in small, one window alone, an uneven number of windows
CASES = [
    (16, 4, 24, 0),
    (16, 4, 24, 4),
    (16, 2, 32, 4),
    (8, 2, 32, 0),
    (24, 1, 24, 4),
    (16, 1, 8, 3),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03}
"""Of the largest value; bf16 holds 8 bits and the kernels round at other places than the eager form."""


def results(
    kernel: Kernel, case: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu", clips: int = 3
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v and bias, in fp64."""
    grid, heads, dim, shift = case
    generator = torch.Generator().manual_seed(grid * 100 + dim + shift)

    def draw(*shape: int) -> Tensor:
        rounded = torch.randn(*shape, generator=generator).to(torch.bfloat16)  # the same numbers in every dtype
        return rounded.to(device, dtype)

    qkv = draw(clips, grid, grid, 3 * heads * dim).requires_grad_()
    bias = draw(heads, 64, 64).requires_grad_()
    probe = draw(clips, grid, grid, heads * dim)
    mask = shifted_window_mask(grid, 8, shift).to(device) if shift else None
    output = attend_windows(qkv, bias, mask, window=8, shift=shift, kernel=kernel)
    assert output.dtype == dtype
    output.backward(probe)
    assert qkv.grad is not None
    assert bias.grad is not None
    return tuple(tensor.detach().double().cpu() for tensor in (output, qkv.grad, bias.grad))


def largest_error(kernel: Kernel, case: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> float:
    """Largest difference from the eager form in fp64, of output and gradients, over the largest value of each."""
    expected = results("eager", case, torch.float64)
    got = results(kernel, case, dtype, device)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def main(kernel: Kernel, device: str) -> int:
    failed = 0
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            error = largest_error(kernel, case, dtype, device)
            good = error < TOLERANCE[dtype]
            failed += not good
            print(
                f"{'ok' if good else 'FAILED'} {kernel} grid, heads, dim, shift {case} {dtype}: {error:.1e}", flush=True
            )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"))  # type: ignore[arg-type]
