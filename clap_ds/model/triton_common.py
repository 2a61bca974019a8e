"""What this project's Triton kernels share: the matrix product, and how a kernel is compiled and launched.

Imported by the modules of kernels alone: it needs Triton.
"""

from __future__ import annotations

# Triton reads the kernels' annotations itself, so that they can't be typed.
# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Launch(NamedTuple):
    """How a Triton kernel is compiled and launched."""

    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Iterations whose loads are under way at a time."""
    max_registers: int = 0
    """Of a thread; 0: as many as the compiler wants."""

    def options(self) -> dict[str, int]:
        """Triton's keyword arguments."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """Matrix product accumulated in fp32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def exp2(x, WIDEN: tl.constexpr):
    """2^x to 2 ulp; 0 for results below fp32's normal range, which `tl.exp2` scales twice to keep."""
    if WIDEN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, WIDEN: tl.constexpr):
    """1 / x to 1 ulp, of normal numbers."""
    if WIDEN:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def must_widen(device: torch.device) -> bool:
    """Whether `dot` takes fp32 copies, whose products are as exact: the interpreter, which runs on CPUs, multiplies bf16 as if
    its bits were integers."""
    return device.type == "cpu"
