"""Provide functions and launch options of this project's Triton kernels. Importing it needs Triton."""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Launch(NamedTuple):
    """Options that compile and launch a Triton kernel."""

    num_warps: int
    """Warps per program."""
    num_stages: int
    """Loop iterations with loads in flight."""
    max_registers: int = 0
    """Limit per thread; 0: the compiler's choice."""

    def options(self) -> dict[str, int]:
        """Return Triton's keyword arguments."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """Return the matrix product, accumulated in fp32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def exp2(x, WIDEN: tl.constexpr):
    """Return 2^x to 2 ulp. Results below fp32's normal range are 0; `tl.exp2` spends two scalings on them."""
    if WIDEN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, WIDEN: tl.constexpr):
    """Return 1 / x to 1 ulp, for normal numbers."""
    if WIDEN:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def must_widen(device: torch.device) -> bool:
    """Return whether `dot` needs fp32 copies: Triton's interpreter, on CPUs, multiplies bf16 bits as integers. Products are
    equally exact."""
    return device.type == "cpu"
