"""Provide functions and launch options of this project's Triton kernels. Importing it needs
Triton."""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
ROOT_HALF_PI = tl.constexpr(math.sqrt(0.5 / math.pi))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, for tests on CPUs. It has no inline assembly, and
multiplies bf16 bits as integers, so that products need fp32 copies; they are equally exact."""
MINUS_HALF_LOG2_E = tl.constexpr(-0.5 * math.log2(math.e))


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
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return options


def attention_flops(num_products: int, qkv: Sequence[int], num_keys: int) -> int:
    """Return the FLOPs of attention's products, each queries times keys times channels: a third of
    `qkv`'s elements times the keys."""
    return num_products * 2 * math.prod(qkv) // 3 * num_keys


@triton.jit
def dot(a, b):
    """Return the matrix product, accumulated in fp32."""
    # "ieee": without TF32 for fp32 tensors.
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def exp2(x):
    """Return 2^x to 2 ulp. Results below fp32's normal range are 0; `tl.exp2` spends two scalings
    on them."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """Return 1 / x to 1 ulp, for normal numbers."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gelu_factors(x):
    """Return GELU(x) / x, which is the standard normal distribution function, and GELU's
    derivative.

    Uses Abramowitz and Stegun's formula 7.1.26 for erf, like PyTorch on CPUs, with errors up to
    8e-8. CUDA's erf would add a third to the instructions of the MLP kernels' loops, which are
    instruction-bound.
    """
    # exp(-x²/2): the normal density times √2π.
    density = exp2(x * x * MINUS_HALF_LOG2_E)
    t = reciprocal(1.0 + 0.3275911 * ROOT_HALF * tl.abs(x))
    # Half of the formula's coefficients, by Horner's rule, as the tail is (1 - erf(|x|/√2)) / 2.
    series = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    series = 0.127414796 + t * (-0.142248368 + t * series)
    tail = t * series * density
    cdf = tl.where(x < 0, tail, 1.0 - tail)
    # d(x · cdf(x)) / dx = cdf(x) + x · density(x)
    return cdf, cdf + x * density * ROOT_HALF_PI
