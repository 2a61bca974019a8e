"""Compute window attention with one Triton kernel forward and one backward, for CUDA.

With narrow heads (24 or 32) and small windows (64 tokens), time is bound by memory traffic, closely
followed by softmax's instructions (`results/triton`). Therefore the kernels read q, k and v from
the qkv projection's output and write to the grid, without copies for partition and cyclic shift.
The mask of shifted windows is computed from coordinates. A window's scores fit one program, so they
are recomputed in the backward pass from q, k and the bias. Products take the tensors' dtype and
accumulate in fp32 (without TF32 for fp32 tensors); softmax is in fp32.

The backward kernel also sums the gradients of q and v over tokens, for the bias of the qkv
projection. A separate sum would read all of them again. The bias of k has no gradient: it adds the
same to all scores of a query, which softmax ignores.

Under `TRITON_INTERPRET=1` the same code runs on CPU tensors, for tests. Shape letters: see
`window_attention.py`.
"""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from clap_ds.model.shifted_windows import MASKED_SCORE
from clap_ds.model.triton_common import Launch, attention_flops, dot, exp2, reciprocal

FORWARD = Launch(4, 1)
BACKWARD = Launch(4, 1, 168)
"""Maximize resident programs without spills on sm_80, sm_90a and sm_100 (`results/triton`)."""
MASKED = tl.constexpr(MASKED_SCORE)
LOG2_E = tl.constexpr(math.log2(math.e))
PROGRAMS_PER_MULTIPROCESSOR = 48
"""Programs of the backward pass, which loop over windows to sum the bias gradient in registers.
Heads of 24 channels share 32-byte memory sectors. Short programs keep a window's heads together in
time, so that the L2 cache merges their writes: on an H200, 48 took 1.7 ms where 6 took 2.7 in a
trial (2.8 in `results/h200`)."""


# Kernels below are written for one window and head at a time. GRID, WINDOW, SHIFT, HEADS and DIM
# are constants, so that divisions by them become shifts or multiplications.
@triton.jit
def _token_offsets(window_id, GRID: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Return a clip's first row in the (B·H·W, …) matrix, a window's rows relative to it, and its
    tokens' coordinates in the shifted grid. Only the first row is in 64 bits, to save registers."""
    PER_SIDE: tl.constexpr = GRID // WINDOW
    clip = window_id // (PER_SIDE * PER_SIDE)
    # Windows of a clip and tokens of a window are in row-major order.
    window = window_id % (PER_SIDE * PER_SIDE)
    token = tl.arange(0, WINDOW * WINDOW)
    row = window // PER_SIDE * WINDOW + token // WINDOW
    column = window % PER_SIDE * WINDOW + token % WINDOW
    # The shifted grid's token comes from further down and right, cyclically.
    source_row = (row + SHIFT) % GRID
    source_column = (column + SHIFT) % GRID
    return clip.to(tl.int64) * (GRID * GRID), source_row * GRID + source_column, row, column


@triton.jit
def _region(place, GRID: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Return 0 before a side's last window, 1 in it, and 2 for tokens from the other edge."""
    return (place >= GRID - WINDOW).to(tl.int32) + (place >= GRID - SHIFT).to(tl.int32)


@triton.jit
def _load_bias(bias_ptr, head, N: tl.constexpr):
    """Load a head's position bias, (N, N) in fp32."""
    token = tl.arange(0, N)
    offsets = (head * N + token[:, None]) * N + token[None, :]
    return tl.load(bias_ptr + offsets).to(tl.float32)


@triton.jit
def _weights(
    q,
    k,
    bias,
    row,
    column,
    scale,
    GRID: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return fp32 attention weights (N, N) of one window and head."""
    scores = dot(q, tl.trans(k)) * scale + bias
    if SHIFT > 0:
        # As in `shifted_window_mask`.
        region = 3 * _region(row, GRID, WINDOW, SHIFT) + _region(column, GRID, WINDOW, SHIFT)
        scores += tl.where(region[:, None] == region[None, :], 0.0, MASKED)
    # exp(x) is 2^(x · log2(e)).
    scores = exp2((scores - tl.max(scores, axis=1)[:, None]) * LOG2_E)
    return scores * reciprocal(tl.sum(scores, axis=1))[:, None]


@triton.jit
def _forward_kernel(
    qkv_ptr,
    bias_ptr,
    output_ptr,
    scale,
    GRID: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Process one window and head per program. Heads of a window are adjacent, so that they share
    cache lines."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * DIM
    head = tl.program_id(0) % HEADS
    clip, offsets, row, column = _token_offsets(tl.program_id(0) // HEADS, GRID, WINDOW, SHIFT)
    # Blocks are powers of two: a head of 24 channels has 8 masked ones.
    channel = tl.arange(0, BLOCK_DIM)
    inside = (channel < DIM)[None, :]
    qkv_offsets = offsets[:, None] * (3 * WIDTH) + head * DIM + channel[None, :]
    source = qkv_ptr + clip * (3 * WIDTH) + qkv_offsets
    q = tl.load(source, mask=inside, other=0.0)
    k = tl.load(source + WIDTH, mask=inside, other=0.0)
    v = tl.load(source + 2 * WIDTH, mask=inside, other=0.0)
    bias = _load_bias(bias_ptr, head, N)
    weights = _weights(q, k, bias, row, column, scale, GRID, WINDOW, SHIFT)
    # (N, N) · (N, D)
    mixed = dot(weights.to(v.dtype), v)
    output_offsets = offsets[:, None] * WIDTH + head * DIM + channel[None, :]
    target = output_ptr + clip * WIDTH + output_offsets
    tl.store(target, mixed.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    qkv_ptr,
    bias_ptr,
    d_output_ptr,
    d_qkv_ptr,
    d_bias_ptr,
    sums_ptr,
    scale,
    num_windows,
    windows_per_program,
    GRID: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Process several windows of one head per program. Each writes its partial gradient of the
    position bias separately, and each window's sums over tokens of the gradients of q and v."""
    N: tl.constexpr = WINDOW * WINDOW
    WIDTH: tl.constexpr = HEADS * DIM
    head = tl.program_id(0) % HEADS
    first = tl.program_id(0) // HEADS * windows_per_program
    last = tl.minimum(first + windows_per_program, num_windows)
    channel = tl.arange(0, BLOCK_DIM)
    inside = (channel < DIM)[None, :]
    # (N, N) in fp32, over all windows of this program.
    d_bias = tl.zeros((N, N), dtype=tl.float32)
    # No loop-invariant code motion: its results would occupy scarce registers.
    for window_id in tl.range(first, last, disable_licm=True):
        clip, offsets, row, column = _token_offsets(window_id, GRID, WINDOW, SHIFT)
        qkv_offsets = offsets[:, None] * (3 * WIDTH) + head * DIM + channel[None, :]
        source = qkv_ptr + clip * (3 * WIDTH) + qkv_offsets
        target = d_qkv_ptr + clip * (3 * WIDTH) + qkv_offsets
        q = tl.load(source, mask=inside, other=0.0)
        k = tl.load(source + WIDTH, mask=inside, other=0.0)
        v = tl.load(source + 2 * WIDTH, mask=inside, other=0.0)
        output_offsets = offsets[:, None] * WIDTH + head * DIM + channel[None, :]
        d_source = d_output_ptr + clip * WIDTH + output_offsets
        d_mixed = tl.load(d_source, mask=inside, other=0.0)
        bias = _load_bias(bias_ptr, head, N)
        weights = _weights(q, k, bias, row, column, scale, GRID, WINDOW, SHIFT)
        # mixed = weights · v
        d_v = dot(tl.trans(weights.to(v.dtype)), d_mixed)
        # [window, q or v, channel]
        sums = sums_ptr + window_id * (2 * WIDTH) + head * DIM + channel
        tl.store(sums + WIDTH, tl.sum(d_v, axis=0), mask=channel < DIM)
        tl.store(target + 2 * WIDTH, d_v.to(v.dtype), mask=inside)
        d_weights = dot(d_mixed, tl.trans(v))
        # weights = softmax(scores)
        d_scores = weights * (d_weights - tl.sum(weights * d_weights, axis=1)[:, None])
        d_bias += d_scores
        # scores = q · kᵀ · scale + bias
        d_scores = d_scores.to(q.dtype)
        d_k = dot(tl.trans(d_scores), q) * scale
        tl.store(target + WIDTH, d_k.to(k.dtype), mask=inside)
        d_q = dot(d_scores, k) * scale
        tl.store(sums, tl.sum(d_q, axis=0), mask=channel < DIM)
        tl.store(target, d_q.to(q.dtype), mask=inside)
    token = tl.arange(0, N)
    # Every program has its own place: without atomics, results are deterministic.
    first_row = tl.program_id(0).to(tl.int64) * N
    tl.store(d_bias_ptr + (first_row + token[:, None]) * N + token[None, :], d_bias)


def _constants(qkv_BHWE: Tensor, bias_ANN: Tensor, window: int, shift: int) -> dict[str, Any]:
    """Return the kernels' compile-time arguments."""
    _, height, width, channels = qkv_BHWE.shape
    heads, num_tokens, _ = bias_ANN.shape
    assert num_tokens == window**2
    assert height == width
    dim = channels // (3 * heads)
    return {
        "GRID": height,
        "WINDOW": window,
        "SHIFT": shift,
        "HEADS": heads,
        "DIM": dim,
        # 16 is the least size of a product's dimension.
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
    }


@torch.library.custom_op("clap_ds::window_attention", mutates_args=())
def _forward(
    qkv_BHWE: Tensor, bias_ANN: Tensor, qkv_bias_E: Tensor | None, window: int, shift: int
) -> Tensor:
    constants = _constants(qkv_BHWE, bias_ANN, window, shift)
    B, H, W, E = qkv_BHWE.shape
    output_BHWC = qkv_BHWE.new_empty(B, H, W, E // 3)
    num_windows = B * (H // window) ** 2
    _forward_kernel[(num_windows * constants["HEADS"],)](
        qkv_BHWE.contiguous(),
        bias_ANN.contiguous(),
        output_BHWC,
        constants["DIM"] ** -0.5,
        **constants,
        **FORWARD.options(),
    )
    return output_BHWC


@_forward.register_fake
def _(qkv_BHWE: Tensor, *_: Any) -> Tensor:
    B, H, W, E = qkv_BHWE.shape
    return qkv_BHWE.new_empty(B, H, W, E // 3)


@torch.library.custom_op("clap_ds::window_attention_backward", mutates_args=())
def _backward(
    qkv_BHWE: Tensor, bias_ANN: Tensor, d_output_BHWC: Tensor, window: int, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of qkv, of the position bias, and in fp32 of the qkv projection's bias."""
    constants = _constants(qkv_BHWE, bias_ANN, window, shift)
    heads = constants["HEADS"]
    num_windows = len(qkv_BHWE) * (constants["GRID"] // window) ** 2
    device = qkv_BHWE.device
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    # Windows are divided into chunks of nearly equal size, each a program per head.
    num_chunks = max(1, min(num_windows, PROGRAMS_PER_MULTIPROCESSOR * num_sms // heads))
    windows_per_program = -(-num_windows // num_chunks)
    num_chunks = -(-num_windows // windows_per_program)

    d_qkv_BHWE = qkv_BHWE.new_empty(qkv_BHWE.shape)
    d_bias_parts = bias_ANN.new_empty(num_chunks, *bias_ANN.shape, dtype=torch.float32)
    # Of the gradients of q and v, over each window's tokens.
    sums = qkv_BHWE.new_empty(num_windows, 2, d_output_BHWC.shape[3], dtype=torch.float32)
    _backward_kernel[(num_chunks * heads,)](
        qkv_BHWE.contiguous(),
        bias_ANN.contiguous(),
        d_output_BHWC.contiguous(),
        d_qkv_BHWE,
        d_bias_parts,
        sums,
        constants["DIM"] ** -0.5,
        num_windows,
        windows_per_program,
        **constants,
        **BACKWARD.options(),
    )
    # The bias of k has no gradient.
    d_qkv_bias = sums.new_zeros(3, sums.shape[2])
    torch.sum(sums, dim=0, out=d_qkv_bias[::2])
    return d_qkv_BHWE, d_bias_parts.sum(dim=0).to(bias_ANN.dtype), d_qkv_bias.flatten()


@_backward.register_fake
def _(qkv_BHWE: Tensor, bias_ANN: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Always contiguous.
    d_qkv_bias_E = qkv_BHWE.new_empty(qkv_BHWE.shape[3], dtype=torch.float32)
    return qkv_BHWE.new_empty(qkv_BHWE.shape), bias_ANN.new_empty(bias_ANN.shape), d_qkv_bias_E


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv_BHWE, bias_ANN, qkv_bias_E, *ctx.geometry = inputs
    ctx.qkv_bias_dtype = None if qkv_bias_E is None else qkv_bias_E.dtype
    ctx.save_for_backward(qkv_BHWE, bias_ANN)


def _autograd(ctx: Any, d_output_BHWC: Tensor) -> tuple[Tensor | None, ...]:
    qkv_BHWE, bias_ANN = ctx.saved_tensors
    d_qkv_BHWE, d_bias_ANN, d_qkv_bias_E = _backward(
        qkv_BHWE, bias_ANN, d_output_BHWC, *ctx.geometry
    )
    if ctx.qkv_bias_dtype is None:
        return d_qkv_BHWE, d_bias_ANN, None, None, None
    return d_qkv_BHWE, d_bias_ANN, d_qkv_bias_E.to(ctx.qkv_bias_dtype), None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.clap_ds.window_attention)
def _forward_flops(qkv: Sequence[int], bias: Sequence[int], *_: Any, **__: Any) -> int:
    return attention_flops(2, qkv, bias[-1])


@register_flop_formula(torch.ops.clap_ds.window_attention_backward)
def _backward_flops(qkv: Sequence[int], bias: Sequence[int], *_: Any, **__: Any) -> int:
    """Count five products, including the recomputed scores."""
    return attention_flops(5, qkv, bias[-1])


def triton_window_attention(
    qkv_BHWE: Tensor, bias_ANN: Tensor, qkv_bias_E: Tensor | None, window: int, shift: int
) -> Tensor:
    """Compute `clap_ds.model.window_attention.attend_windows` with the kernels, with autograd, as
    one operation for torch.compile. N = `window`² is a power of two, at least 16; qkv and bias are
    both fp32, bf16 or fp16."""
    return _forward(qkv_BHWE, bias_ANN, qkv_bias_E, window, shift)
