"""Compute GELU in Triton products of an MLP whose hidden activations are stored, for CUDA.

Backward, the gradient of GELU's input is the output's gradient times the second weight, times
GELU's derivative. As two kernels, the product writes the gradient of GELU's output, four times as
wide as its input, and the second one reads it. Here a program computes a tile of the product, and
multiplies it by the derivative before it is written for the first time. It also sums the tile over
tokens: partial sums of the first bias's gradient, added in a fixed order, so that results are
deterministic. The tile stays in fp32, so that it is rounded once instead of twice. Forward, a
program adds the bias to a tile of the first product, and writes it and its GELU.

With C channels, this saves 16·C bytes a token backward and 8·C forward, and costs what Triton's
product takes longer than torch's. If torch computes F FLOP/s and separate kernels move B bytes/s,
one kernel is faster while its product of 8·C² FLOPs takes less than 1 + 2·F / (B·C) times torch's
time, forward 1 + F / (B·C). On an H200 (73% and 65% of its data sheet, forward 75%, from
`results/h200`) the limits are:

- backward 1.6 for C = 768, and 2.2 for 384; on an H100 1.9 and 2.7, on an A100 1.4 and 1.9
- forward 1.3 for C = 768, 1.5 for 384, and 2.0 for 192, where torch's product is slower, too

Triton's products usually take 1.1 to 1.25 times as long as torch's, and GELU's arithmetic adds up
to a third where no other program of a processor hides it. So the backward pass of all widths uses
it, and the forward pass of up to `FEW_CHANNELS`.

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
"""Most channels for which these have small tiles, as operands are little of their traffic, and for
which the forward pass has a kernel."""


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
def _multiply(
    row_ptrs,
    weight_ptrs,
    weight_step,
    block_step,
    mask,
    num_channels,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return a product of rows and weights, (channels, units), as two blocks of units, each an
    operand of tensor cores. Weights of the next chunk and block are steps away."""
    product_a = tl.zeros((BLOCK, UNITS), dtype=tl.float32)
    product_b = tl.zeros((BLOCK, UNITS), dtype=tl.float32)
    for _ in tl.range(0, num_channels, CHUNK):
        rows = tl.load(row_ptrs, mask=mask, other=0.0)
        product_a += dot(rows, tl.load(weight_ptrs))
        product_b += dot(rows, tl.load(weight_ptrs + block_step))
        row_ptrs += CHUNK
        weight_ptrs += weight_step
    return product_a, product_b


@triton.jit
def _finish_forward(product, bias_ptrs, hidden_ptrs, active_ptrs, mask):
    """Add the bias to a block of the product, and write it and its GELU."""
    hidden = product + tl.load(bias_ptrs)[None, :].to(tl.float32)
    # GELU of what the backward pass reads.
    hidden = hidden.to(hidden_ptrs.dtype.element_ty)
    tl.store(hidden_ptrs, hidden, mask=mask)
    hidden = hidden.to(tl.float32)
    active = hidden * gelu_factors(hidden)[0]
    tl.store(active_ptrs, active.to(active_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])  # packed captions have any number
def _forward_kernel(
    tokens_ptr,
    weight_ptr,
    bias_ptr,
    hidden_ptr,
    active_ptr,
    num_tokens,
    num_channels,
    num_units,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Process one tile per program, like the backward kernel."""
    num_tiles = num_units // (2 * UNITS)
    block = (tl.program_id(0) // num_tiles).to(tl.int64)
    tokens_ptr += block * BLOCK * num_channels
    hidden_ptr += block * BLOCK * num_units
    active_ptr += block * BLOCK * num_units
    rows = tl.arange(0, BLOCK)
    mask = (rows < num_tokens - block * BLOCK)[:, None]
    units = tl.program_id(0) % num_tiles * (2 * UNITS) + tl.arange(0, UNITS)
    channels = tl.arange(0, CHUNK)
    product_a, product_b = _multiply(
        tokens_ptr + rows[:, None] * num_channels + channels[None, :],
        weight_ptr + units[None, :] * num_channels + channels[:, None],
        CHUNK,
        UNITS * num_channels,
        mask,
        num_channels,
        BLOCK,
        UNITS,
        CHUNK,
    )
    offsets = rows[:, None] * num_units + units[None, :]
    bias_ptrs = bias_ptr + units
    _finish_forward(product_a, bias_ptrs, hidden_ptr + offsets, active_ptr + offsets, mask)
    offsets += UNITS
    _finish_forward(product_b, bias_ptrs + UNITS, hidden_ptr + offsets, active_ptr + offsets, mask)


@triton.jit
def _finish_backward(product, hidden_ptrs, d_hidden_ptrs, mask, d_bias_ptrs):
    """Multiply a block of the product by GELU's derivative, and write it and its sums."""
    hidden = tl.load(hidden_ptrs, mask=mask, other=0.0)
    d_hidden = product * gelu_factors(hidden.to(tl.float32))[1]
    tl.store(d_hidden_ptrs, d_hidden.to(hidden.dtype), mask=mask)
    # Masked rows are zeros, so that they add nothing.
    tl.store(d_bias_ptrs, tl.sum(d_hidden, axis=0))


@triton.jit(do_not_specialize=["num_tokens"])
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
    first = tl.program_id(0) % num_tiles * (2 * UNITS)
    units = first + tl.arange(0, UNITS)
    # Only needed after the product, so that its time hides the transfer.
    lines = first + tl.arange(0, 2 * UNITS // LINE) * LINE
    _prefetch(hidden_ptr + tl.minimum(rows, num_rows - 1)[:, None] * num_units + lines[None, :])
    channels = tl.arange(0, CHUNK)
    product_a, product_b = _multiply(
        d_output_ptr + rows[:, None] * num_channels + channels[None, :],
        weight_ptr + channels[:, None] * num_units + units[None, :],
        CHUNK * num_units,
        UNITS,
        mask,
        num_channels,
        BLOCK,
        UNITS,
        CHUNK,
    )
    # One block after the other, because both together need too many registers.
    offsets = rows[:, None] * num_units + units[None, :]
    d_bias_ptrs = d_bias_ptr + block * num_units + units
    _finish_backward(product_a, hidden_ptr + offsets, d_hidden_ptr + offsets, mask, d_bias_ptrs)
    offsets += UNITS
    d_bias_ptrs += UNITS
    _finish_backward(product_b, hidden_ptr + offsets, d_hidden_ptr + offsets, mask, d_bias_ptrs)


def _launch(kernel: Any, rows: Tensor, *tensors: Tensor, units: int, tile: Tile) -> None:
    """Run a kernel with a tile on tokens or their gradients, (T, C)."""
    T, C = rows.shape
    assert supports(C, units, rows.dtype)
    programs = triton.cdiv(T, BLOCK) * (units // (2 * tile.units))
    options = tile.constants() | tile.launch.options()
    kernel[(programs,)](rows.contiguous(), *tensors, T, C, units, **options)


def compute_activations(
    tokens_TC: Tensor, weight_MC: Tensor, bias_M: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return GELU's input and output, (T, M) each."""
    hidden_TM, active_TM = _allocate_activations(tokens_TC, weight_MC, bias_M)
    tensors = (weight_MC.contiguous(), bias_M, hidden_TM, active_TM)
    _launch(_forward_kernel, tokens_TC, *tensors, units=len(weight_MC), tile=tile)
    return hidden_TM, active_TM


def compute_gradients(
    d_output_TC: Tensor, weight_CM: Tensor, hidden_TM: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return the gradient of GELU's input, and partial sums of it over tokens, (blocks, M) in
    fp32."""
    d_hidden_TM, partial_sums = _allocate_gradients(d_output_TC, weight_CM, hidden_TM)
    tensors = (weight_CM.contiguous(), hidden_TM.contiguous(), d_hidden_TM, partial_sums)
    _launch(_backward_kernel, d_output_TC, *tensors, units=weight_CM.shape[1], tile=tile)
    return d_hidden_TM, partial_sums


@torch.library.custom_op("clap_ds::linear_gelu", mutates_args=())
def _forward(tokens_TC: Tensor, weight_MC: Tensor, bias_M: Tensor) -> tuple[Tensor, Tensor]:
    tile, *_ = usable_tiles(weight_MC.shape[1], tokens_TC.device)
    return compute_activations(tokens_TC, weight_MC, bias_M, tile)


@_forward.register_fake
def _allocate_activations(tokens_TC: Tensor, weight_MC: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    hidden_TM = tokens_TC.new_empty(len(tokens_TC), len(weight_MC))
    return hidden_TM, torch.empty_like(hidden_TM)


@torch.library.custom_op("clap_ds::gelu_linear_backward", mutates_args=())
def _backward(d_output_TC: Tensor, weight_CM: Tensor, hidden_TM: Tensor) -> tuple[Tensor, Tensor]:
    tile, *_ = usable_tiles(len(weight_CM), hidden_TM.device)
    return compute_gradients(d_output_TC, weight_CM, hidden_TM, tile)


@_backward.register_fake
def _allocate_gradients(d_output_TC: Tensor, _: Tensor, hidden_TM: Tensor) -> tuple[Tensor, Tensor]:
    T, M = hidden_TM.shape
    # Contiguous also if the input isn't.
    return hidden_TM.new_empty(T, M), hidden_TM.new_empty(-(-T // BLOCK), M, dtype=torch.float32)


@register_flop_formula((torch.ops.clap_ds.linear_gelu, torch.ops.clap_ds.gelu_linear_backward))
def _count_flops(rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    # One product of tokens, channels and hidden units.
    return 2 * rows[0] * math.prod(weight)


class WideMlp(torch.autograd.Function):
    """An MLP of tokens, (T, C), whose parameters have their dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TC: Tensor,
        weight1_MC: Tensor,
        bias1_M: Tensor,
        weight2_CM: Tensor,
        bias2_C: Tensor,
    ) -> Tensor:
        if tokens_TC.shape[1] <= FEW_CHANNELS:
            hidden_TM, active_TM = _forward(tokens_TC, weight1_MC, bias1_M)
        else:
            hidden_TM = F.linear(tokens_TC, weight1_MC, bias1_M)
            active_TM = gelu_forward(hidden_TM)
        ctx.save_for_backward(tokens_TC, weight1_MC, weight2_CM, hidden_TM, active_TM)
        return F.linear(active_TM, weight2_CM, bias2_C)

    @staticmethod
    def backward(ctx: Any, d_output_TC: Tensor) -> tuple[Tensor, ...]:
        # Saved tensors can be read once with activation checkpointing.
        tokens_TC, weight1_MC, weight2_CM, hidden_TM, active_TM = ctx.saved_tensors
        d_hidden_TM, partial_sums = _backward(d_output_TC, weight2_CM, hidden_TM)
        d_bias1_M = partial_sums.sum(dim=0).to(weight1_MC.dtype)
        d_weight1_MC = d_hidden_TM.T @ tokens_TC
        # As a product's second operand, Inductor stores `d_output_TC` once, for the kernel, too.
        d_weight2_CM = (active_TM.T @ d_output_TC).T.contiguous()
        d_tokens_TC = d_hidden_TM @ weight1_MC
        return d_tokens_TC, d_weight1_MC, d_bias1_M, d_weight2_CM, d_output_TC.sum(dim=0)
