"""What this project's Triton kernels share: the matrix product, and how a launch is told to a kernel and to torch.library.

Imported by the modules of kernels alone: it needs Triton.
"""

from __future__ import annotations

# Triton reads the kernels' annotations itself, so that they can't be typed.
# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from clap_ds.model.kernel_choice import KernelChoice, Launch


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


def launch_options(launch: Sequence[int]) -> dict[str, int]:
    """Triton's keyword arguments of a `Launch`, given as the plain numbers that operations of torch.library take."""
    num_warps, num_stages, max_registers = Launch(*launch)
    limit = {"maxnreg": max_registers} if max_registers else {}
    return {"num_warps": num_warps, "num_stages": num_stages, **limit}


def launch_numbers(
    default: KernelChoice, forward: Launch | None, backward: Launch | None
) -> tuple[list[int], list[int]]:
    """Both ways' launches as plain numbers; those of the default where there are none."""
    forward, backward = forward or default.forward, backward or default.backward
    assert forward is not None
    assert backward is not None
    return list(forward), list(backward)
