"""Compute the backward pass of GELU and the linear layer behind it with one Triton product, for
CUDA.

The gradient of GELU's input is the output's gradient times the layer's weight, times GELU's
derivative. As two kernels, the product writes the gradient of GELU's output, four times as wide as
its input, and the second one reads it. Here a program computes a tile of the product, and
multiplies it by the derivative before it is written for the first time. It also sums the tile over
tokens: partial sums of the first bias's gradient, added in a fixed order, so that results are
deterministic. The tile stays in fp32, so that it is rounded once instead of twice.

With C channels, this saves 16·C bytes a token, and costs what Triton's product takes longer than
torch's. If torch computes F FLOP/s and other kernels move B bytes/s, it is faster while the product
of 8·C² FLOPs takes less than 1 + 2·F / (B·C) times torch's time. On an H200 at 73% and 65% of its
data sheet (`results/h200`), that is 1.6 times for C = 768, and 2.2 for 384; on an H100 1.9 and 2.7,
on an A100 1.4 and 1.9. Triton's products usually take 1.1 to 1.25 times as long as torch's, so all
widths use it. Forward, the same would save 8·C bytes and the limits would be 1.3 and 1.5, too close
to the time that GELU's arithmetic adds where no other program of a processor hides it.

Under `TRITON_INTERPRET=1` the same code runs on CPU tensors, for tests. Shape letters: T tokens, C
channels, M hidden units.
"""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from clap_ds.model.gelu_triton import gelu_forward
from clap_ds.model.triton_common import INTERPRETED, Launch, dot, gelu_factors

BLOCK = 128
"""Tokens of a program."""
LINE = tl.constexpr(64)
"""16-bit numbers of a line of the L2 cache."""


class Tile(NamedTuple):
    """What a program computes: `BLOCK` tokens by two blocks of hidden units."""

    units: int
    """Hidden units of a block."""
    chunk: int
    """Channels of a loop iteration."""
    launch: Launch

    def constants(self) -> dict[str, int]:
        """Return the kernel's compile-time arguments."""
        return {"BLOCK": BLOCK, "UNITS": self.units, "CHUNK": self.chunk}


SMALL = Tile(64, 32, Launch(8, 4, 128))
"""Two programs per processor: one's arithmetic hides the other's traffic. 48 to 64 KB of shared
memory each, which every architecture has."""
LARGE = Tile(128, 64, Launch(8, 4))
"""One program per processor, with 192 KB. Operands come from the L2 cache, of which a tile of twice
as many units reads three quarters as much per FLOP."""
LARGE_CAPABILITIES = (9, 10)
"""Major compute capabilities whose tensor cores read shared memory, of which they have enough."""
FEW_CHANNELS = 256
"""Most channels for which these have small tiles: operands are little of their traffic."""


def usable_tiles(channels: int, device: torch.device) -> list[Tile]:
    """Return the tiles that a device has, first the one for so many channels."""
    major = 0
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
    if major not in LARGE_CAPABILITIES:
        return [SMALL]
    return [SMALL, LARGE] if channels <= FEW_CHANNELS else [LARGE, SMALL]


def supports(channels: int, units: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports a layer from `units` to `channels`. Other dtypes than 16
    bits don't fit in shared memory."""
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and channels % LARGE.chunk == 0 and units % (2 * LARGE.units) == 0


@triton.jit
def _prefetch(pointers):
    """Copy lines to the L2 cache."""
    if not INTERPRETED:
        # An operation needs a result.
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _finish(d_active, hidden, d_hidden_ptrs, mask, d_bias_ptrs):
    """Multiply a block of the product by GELU's derivative, and write it and its sums."""
    d_hidden = d_active * gelu_factors(hidden.to(tl.float32))[1]
    tl.store(d_hidden_ptrs, d_hidden.to(hidden.dtype), mask=mask)
    # Masked rows are zeros, so that they add nothing.
    tl.store(d_bias_ptrs, tl.sum(d_hidden, axis=0))


@triton.jit(do_not_specialize=["num_tokens"])  # packed captions have any number
def _backward_kernel(
    d_output_ptr,
    weight_ptr,
    hidden_ptr,
    d_hidden_ptr,
    d_bias_ptr,
    num_tokens,
    num_channels,
    num_units,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Process one tile per program. Tiles of the same tokens are adjacent, so that the L2 cache has
    these tokens' gradients; it always has the weight. Each writes its partial bias gradient
    separately."""
    num_tiles = num_units // (2 * UNITS)
    # In 64 bits, as tensors may have more than 2³¹ elements. Offsets within a tile have 32.
    block = (tl.program_id(0) // num_tiles).to(tl.int64)
    d_output_ptr += block * BLOCK * num_channels
    hidden_ptr += block * BLOCK * num_units
    d_hidden_ptr += block * BLOCK * num_units
    rows = tl.arange(0, BLOCK)
    num_rows = tl.minimum(num_tokens - block * BLOCK, BLOCK).to(tl.int32)
    mask = (rows < num_rows)[:, None]
    # The program's hidden units are two blocks, a and b, each an operand of tensor cores.
    first = tl.program_id(0) % num_tiles * (2 * UNITS)
    units = first + tl.arange(0, UNITS)
    # Only needed after the product, so that its time hides the transfer.
    lines = first + tl.arange(0, 2 * UNITS // LINE) * LINE
    _prefetch(hidden_ptr + tl.minimum(rows, num_rows - 1)[:, None] * num_units + lines[None, :])

    channels = tl.arange(0, CHUNK)
    d_output_ptrs = d_output_ptr + rows[:, None] * num_channels + channels[None, :]
    weight_ptrs = weight_ptr + channels[:, None] * num_units + units[None, :]
    d_active_a = tl.zeros((BLOCK, UNITS), dtype=tl.float32)
    d_active_b = tl.zeros((BLOCK, UNITS), dtype=tl.float32)
    for _ in tl.range(0, num_channels, CHUNK):
        d_output = tl.load(d_output_ptrs, mask=mask, other=0.0)
        d_active_a += dot(d_output, tl.load(weight_ptrs))
        d_active_b += dot(d_output, tl.load(weight_ptrs + UNITS))
        d_output_ptrs += CHUNK
        weight_ptrs += CHUNK * num_units

    offsets = rows[:, None] * num_units + units[None, :]
    hidden_ptrs = hidden_ptr + offsets
    d_hidden_ptrs = d_hidden_ptr + offsets
    d_bias_ptrs = d_bias_ptr + block * num_units + units
    # One block after the other, because both together need too many registers.
    hidden = tl.load(hidden_ptrs, mask=mask, other=0.0)
    _finish(d_active_a, hidden, d_hidden_ptrs, mask, d_bias_ptrs)
    hidden = tl.load(hidden_ptrs + UNITS, mask=mask, other=0.0)
    _finish(d_active_b, hidden, d_hidden_ptrs + UNITS, mask, d_bias_ptrs + UNITS)


def compute_gradients(
    d_output: Tensor, weight_CM: Tensor, hidden: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return the gradient of GELU's input, and partial sums of it over tokens, (programs, M) in
    fp32."""
    hidden = hidden.contiguous()
    d_hidden, partial_sums = _allocate(d_output, weight_CM, hidden)
    C, M = weight_CM.shape
    assert supports(C, M, hidden.dtype)
    programs = len(partial_sums) * (M // (2 * tile.units))
    _backward_kernel[(programs,)](
        d_output.contiguous(),
        weight_CM.contiguous(),
        hidden,
        d_hidden,
        partial_sums,
        hidden.numel() // M,
        C,
        M,
        **tile.constants(),
        **tile.launch.options(),
    )
    return d_hidden, partial_sums


@torch.library.custom_op("clap_ds::gelu_linear_backward", mutates_args=())
def _backward(d_output: Tensor, weight_CM: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    tile, *_ = usable_tiles(len(weight_CM), hidden.device)
    return compute_gradients(d_output, weight_CM, hidden, tile)


@_backward.register_fake
def _allocate(d_output: Tensor, weight_CM: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    M = hidden.shape[-1]
    num_blocks = -(-(hidden.numel() // M) // BLOCK)
    # Always contiguous.
    return hidden.new_empty(hidden.shape), hidden.new_empty(num_blocks, M, dtype=torch.float32)


@register_flop_formula(torch.ops.clap_ds.gelu_linear_backward)
def _backward_flops(d_output: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    # One product of tokens, channels and hidden units.
    return 2 * math.prod(d_output) * weight[1]


class GeluLinear(torch.autograd.Function):
    """GELU and a linear layer, of the output of another linear layer that used its bias detached.
    That bias only receives its gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias1_M: Tensor, weight2_CM: Tensor, bias2_C: Tensor
    ) -> Tensor:
        active = gelu_forward(hidden)
        ctx.save_for_backward(hidden, active, weight2_CM)
        ctx.bias_dtype = bias1_M.dtype
        return F.linear(active, weight2_CM, bias2_C)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, ...]:
        # Saved tensors can be read once with activation checkpointing.
        hidden, active, weight2_CM = ctx.saved_tensors
        d_output_TC = d_output.flatten(0, -2)
        d_hidden, partial_sums = _backward(d_output_TC, weight2_CM, hidden)
        d_bias1_M = partial_sums.sum(dim=0).to(ctx.bias_dtype)
        # As a product's second operand, Inductor stores `d_output_TC` once, for the kernel, too.
        d_weight2_CM = (active.flatten(0, -2).T @ d_output_TC).T.contiguous()
        return d_hidden, d_bias1_M, d_weight2_CM, d_output_TC.sum(dim=0)


def linear_gelu_linear(
    tokens: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, bias2_C: Tensor
) -> Tensor:
    """Compute `F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)` for any number
    of dimensions, with the kernel in the backward pass."""
    # Detached, because the kernel sums the bias's gradient.
    hidden = F.linear(tokens, weight1_MC, bias1_M.detach())
    # Under autocast, parameters have another dtype.
    weight2_CM = weight2_CM.to(hidden.dtype)
    return GeluLinear.apply(hidden, bias1_M, weight2_CM, bias2_C.to(hidden.dtype))
