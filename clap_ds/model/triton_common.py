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


def must_widen(device: torch.device) -> bool:
    """Whether `dot` takes fp32 copies, whose products are as exact: the interpreter, which runs on CPUs, multiplies bf16 as if
    its bits were integers."""
    return device.type == "cpu"
