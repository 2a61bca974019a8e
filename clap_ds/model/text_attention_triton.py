"""Compute the text tower's attention with one Triton kernel forward and one backward, for CUDA and
captions of few tokens.

Flash attention is made for long sequences: over 77 tokens its backward pass reaches 15% of an
H200's bandwidth (`results/h200`). Here a program has all tokens of one caption and head, and
recomputes the weights in the backward pass. Captions are consecutive rows of one matrix, the output
of a product that computes q, k and v, and so are their gradients. Dropout of the weights hashes
their index and two seeds. Products take the tensors' dtype and accumulate in fp32 (without TF32 for
fp32 tensors); softmax is in fp32.

Under `TRITON_INTERPRET=1` the same code runs on CPU tensors, for tests. Shape letters: T tokens of
all captions, S captions, C = A·D channels of A heads, E = 3·C. In the kernels, WIDTH is C, DIM is
D, COLUMNS the most keys, and ROWS the queries of a block.
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

from clap_ds.model.kernels import supports_captions
from clap_ds.model.triton_common import Launch, attention_flops, dot, exp2, reciprocal

ROWS = 32
"""Queries whose weights a program holds at once."""
FORWARD = Launch(8, 1)
BACKWARD = Launch(8, 1, 128)
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _shifted(bits, SHIFT: tl.constexpr):
    return bits ^ (bits >> SHIFT)


@triton.jit
def _keeps(seeds_ptr, rows, columns, threshold, COLUMNS: tl.constexpr):
    """Return which weights dropout keeps, (rows, columns), by the hash of
    `clap_ds.model.dropout`."""
    # The index of a weight among all captions and heads.
    first_index = tl.program_id(0).to(tl.uint32) * (COLUMNS * COLUMNS)
    index = first_index + (rows * COLUMNS + columns).to(tl.uint32)
    bits = index ^ tl.load(seeds_ptr)
    bits = _shifted(bits, 17) * tl.full((), 0xED5AD4BB, tl.uint32) ^ tl.load(seeds_ptr + 1)
    bits = _shifted(bits, 11) * tl.full((), 0xAC4C1B51, tl.uint32)
    return _shifted(_shifted(bits, 15) * tl.full((), 0x31848BAB, tl.uint32), 14) >= threshold


@triton.jit
def _locate(cu_seqlens_ptr, num_keys_ptr, HEADS: tl.constexpr):
    """Return a program's caption, head, first row, rows and keys. A caption without real tokens
    attends to its first one."""
    caption = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens_ptr + caption)
    num_rows = tl.load(cu_seqlens_ptr + caption + 1) - start
    num_keys = tl.maximum(tl.load(num_keys_ptr + caption), 1)
    # In 64 bits, as tensors may have more than 2³¹ elements.
    return caption, head, start.to(tl.int64), num_rows, num_keys


@triton.jit
def _forward_kernel(
    qkv_ptr,
    cu_seqlens_ptr,
    num_keys_ptr,
    seeds_ptr,
    output_ptr,
    scale,
    threshold,
    inverse_keep,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Process one caption and head per program, in blocks of queries."""
    WIDTH: tl.constexpr = HEADS * DIM
    _, head, first, num_rows, num_keys = _locate(cu_seqlens_ptr, num_keys_ptr, HEADS)
    channel = tl.arange(0, DIM)[None, :]
    column = tl.arange(0, COLUMNS)
    source = qkv_ptr + first * (3 * WIDTH) + head * DIM
    target = output_ptr + first * WIDTH + head * DIM
    key_offsets = column[:, None] * (3 * WIDTH) + channel
    in_caption = (column < num_rows)[:, None]
    is_key = (column < num_keys)[None, :]
    # q, k and v are side by side in a row: channel c of k is at WIDTH + c.
    k = tl.load(source + key_offsets + WIDTH, mask=in_caption, other=0.0)
    v = tl.load(source + key_offsets + 2 * WIDTH, mask=in_caption, other=0.0)
    # No loop-invariant code motion: its results would occupy scarce registers.
    for start in tl.range(0, num_rows, ROWS, disable_licm=True):
        row = start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None]
        q = tl.load(source + row[:, None] * (3 * WIDTH) + channel, mask=inside, other=0.0)
        # (ROWS, COLUMNS); exp(x) is 2^(x · log2(e)).
        scores = tl.where(is_key, dot(q, tl.trans(k)) * (scale * LOG2_E), -float("inf"))
        scores = exp2(scores - tl.max(scores, axis=1)[:, None])
        weights = scores * reciprocal(tl.sum(scores, axis=1))[:, None]
        if DROPS:
            # P(keep) = 1 - dropout; weights are scaled by its inverse.
            keeps = _keeps(seeds_ptr, row[:, None], column[None, :], threshold, COLUMNS)
            weights = tl.where(keeps, weights * inverse_keep, 0.0)
        mixed = dot(weights.to(v.dtype), v)
        tl.store(target + row[:, None] * WIDTH + channel, mixed.to(v.dtype), mask=inside)


@triton.jit
def _backward_kernel(
    qkv_ptr,
    cu_seqlens_ptr,
    num_keys_ptr,
    seeds_ptr,
    d_output_ptr,
    d_qkv_ptr,
    d_bias_ptr,
    scale,
    threshold,
    inverse_keep,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Process one caption and head per program, in blocks of queries. Each writes its sums of d_q,
    d_k and d_v separately."""
    WIDTH: tl.constexpr = HEADS * DIM
    caption, head, first, num_rows, num_keys = _locate(cu_seqlens_ptr, num_keys_ptr, HEADS)
    channel = tl.arange(0, DIM)[None, :]
    column = tl.arange(0, COLUMNS)
    source = qkv_ptr + first * (3 * WIDTH) + head * DIM
    target = d_qkv_ptr + first * (3 * WIDTH) + head * DIM
    d_source = d_output_ptr + first * WIDTH + head * DIM
    key_offsets = column[:, None] * (3 * WIDTH) + channel
    in_caption = (column < num_rows)[:, None]
    is_key = (column < num_keys)[:, None]
    k = tl.load(source + key_offsets + WIDTH, mask=in_caption, other=0.0)
    v = tl.load(source + key_offsets + 2 * WIDTH, mask=in_caption, other=0.0)
    d_k = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    d_v = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    d_q_sum = tl.zeros((DIM,), dtype=tl.float32)
    for start in tl.range(0, num_rows, ROWS, disable_licm=True):
        row = start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None]
        query_offsets = row[:, None] * (3 * WIDTH) + channel
        q = tl.load(source + query_offsets, mask=inside, other=0.0)
        d_mixed = tl.load(d_source + row[:, None] * WIDTH + channel, mask=inside, other=0.0)
        # (COLUMNS, ROWS): transposed, so that the products for d_k and d_v need no transposition in
        # registers, which spills on sm_80.
        scores = tl.where(is_key, dot(k, tl.trans(q)) * (scale * LOG2_E), -float("inf"))
        scores = exp2(scores - tl.max(scores, axis=0)[None, :])
        weights = scores * reciprocal(tl.sum(scores, axis=0))[None, :]
        dropped = weights
        if DROPS:
            keeps = _keeps(seeds_ptr, row[None, :], column[:, None], threshold, COLUMNS)
            dropped = tl.where(keeps, weights * inverse_keep, 0.0)
        d_v += dot(dropped.to(v.dtype), d_mixed)
        # Softmax's derivative: d_scores = weights · (d_weights - Σ weights · d_weights), where
        # dropout applies to d_weights.
        products = dropped * dot(v, tl.trans(d_mixed))
        d_scores = (products - weights * tl.sum(products, axis=0)[None, :]).to(q.dtype)
        d_k += dot(d_scores, q)
        d_q = dot(tl.trans(d_scores), k) * scale
        # For the bias of the product that computed q, k and v.
        d_q_sum += tl.sum(d_q, axis=0)
        tl.store(target + query_offsets, d_q.to(q.dtype), mask=inside)
    # Once, after the sum over queries.
    d_k *= scale
    tl.store(target + key_offsets + WIDTH, d_k.to(k.dtype), mask=in_caption)
    tl.store(target + key_offsets + 2 * WIDTH, d_v.to(v.dtype), mask=in_caption)
    sums = d_bias_ptr + caption.to(tl.int64) * (3 * WIDTH) + head * DIM + tl.arange(0, DIM)
    tl.store(sums, d_q_sum)
    tl.store(sums + WIDTH, tl.sum(d_k, axis=0))
    tl.store(sums + 2 * WIDTH, tl.sum(d_v, axis=0))


def _arguments(
    qkv_TE: Tensor, heads: int, longest: int, dropout: float
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the kernels' arguments `scale`, `threshold` and `inverse_keep`, and constants."""
    dim = qkv_TE.shape[1] // (3 * heads)
    assert supports_captions(dim, longest)
    # A weight is kept if its hash, a uint32, is at least the threshold.
    numbers = dim**-0.5, round(dropout * 2**32), 1 / (1 - dropout)
    return numbers, {
        "HEADS": heads,
        "DIM": dim,
        "COLUMNS": max(ROWS, triton.next_power_of_2(longest)),
        "ROWS": ROWS,
        "DROPS": dropout > 0,
    }


@torch.library.custom_op("clap_ds::text_attention", mutates_args=())
def _forward(
    qkv_TE: Tensor,
    bias_E: Tensor,
    cu_seqlens: Tensor,
    num_keys_S: Tensor,
    seeds: Tensor,
    heads: int,
    longest: int,
    dropout: float,
) -> Tensor:
    numbers, constants = _arguments(qkv_TE, heads, longest, dropout)
    qkv_TE = qkv_TE.contiguous()
    output_TC = qkv_TE.new_empty(len(qkv_TE), qkv_TE.shape[1] // 3)
    _forward_kernel[(len(num_keys_S) * heads,)](
        qkv_TE,
        cu_seqlens,
        num_keys_S,
        seeds.view(torch.uint32),
        output_TC,
        *numbers,
        **constants,
        **FORWARD.options(),
    )
    return output_TC


@_forward.register_fake
def _(qkv_TE: Tensor, *_: Any) -> Tensor:
    return qkv_TE.new_empty(qkv_TE.shape[0], qkv_TE.shape[1] // 3)


@torch.library.custom_op("clap_ds::text_attention_backward", mutates_args=())
def _backward(
    qkv_TE: Tensor,
    cu_seqlens: Tensor,
    num_keys_S: Tensor,
    seeds: Tensor,
    d_output_TC: Tensor,
    heads: int,
    longest: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv and its sums over each caption's tokens, (S, E) in fp32."""
    numbers, constants = _arguments(qkv_TE, heads, longest, dropout)
    d_qkv_TE, sums_SE = _allocate(qkv_TE, cu_seqlens, num_keys_S)
    _backward_kernel[(len(num_keys_S) * heads,)](
        qkv_TE.contiguous(),
        cu_seqlens,
        num_keys_S,
        seeds.view(torch.uint32),
        d_output_TC.contiguous(),
        d_qkv_TE,
        sums_SE,
        *numbers,
        **constants,
        **BACKWARD.options(),
    )
    return d_qkv_TE, sums_SE


@_backward.register_fake
def _allocate(
    qkv_TE: Tensor, cu_seqlens: Tensor, num_keys_S: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    sums_SE = qkv_TE.new_empty(num_keys_S.shape[0], qkv_TE.shape[1], dtype=torch.float32)
    # Always contiguous.
    return qkv_TE.new_empty(qkv_TE.shape), sums_SE


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv_TE, bias_E, cu_seqlens, num_keys_S, seeds, *ctx.options = inputs
    ctx.save_for_backward(qkv_TE, cu_seqlens, num_keys_S, seeds)
    # Its values aren't needed.
    ctx.bias_dtype = bias_E.dtype


def _autograd(ctx: Any, d_output_TC: Tensor) -> tuple[Tensor | None, ...]:
    d_qkv_TE, sums_SE = _backward(*ctx.saved_tensors, d_output_TC, *ctx.options)
    return d_qkv_TE, sums_SE.sum(dim=0).to(ctx.bias_dtype), None, None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.clap_ds.text_attention)
def _forward_flops(qkv: Sequence[int], *arguments: Any, **_: Any) -> int:
    """Count two products, of captions as long as the longest."""
    return attention_flops(2, qkv, num_keys=arguments[-2])


@register_flop_formula(torch.ops.clap_ds.text_attention_backward)
def _backward_flops(qkv: Sequence[int], *arguments: Any, **_: Any) -> int:
    """Count five products, including the recomputed scores."""
    return attention_flops(5, qkv, num_keys=arguments[-2])


def triton_text_attention(
    qkv_TE: Tensor,
    bias_E: Tensor,
    cu_seqlens: Tensor,
    num_keys_S: Tensor,
    heads: int,
    longest: int,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention, (T, C), within captions.

    Args:
        qkv_TE: queries, keys and values, each split into heads, with the product's bias added.
        bias_E: this bias. It only receives its gradient, which would otherwise take another pass
            over qkv's.
        cu_seqlens: (S + 1,) int32; caption i is rows cu_seqlens[i] to cu_seqlens[i + 1]. They cover
            all rows.
        num_keys_S: int32, real tokens per caption, which come first. The others are no keys.
        longest: most rows per caption; `supports_captions` it.
        dropout: fraction of the weights set to zero, drawn from torch's random numbers.
    """
    if dropout > 0:
        # From torch's generator, so that activation checkpointing draws the same ones.
        seeds = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=qkv_TE.device)
    else:
        # An evaluation must not change what training draws next.
        seeds = torch.zeros(2, dtype=torch.int32, device=qkv_TE.device)
    return _forward(qkv_TE, bias_E, cu_seqlens, num_keys_S, seeds, heads, longest, dropout)
