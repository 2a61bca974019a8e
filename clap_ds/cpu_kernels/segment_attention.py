"""Run softmax attention of captions over their own tokens with CPU kernels.

Captions are segments of rows. So one kernel supports padded and packed ones, with all tokens or
only the first as queries, and reads q, k and v in place. Shape letters: S segments, T rows, A
heads, D head dim, C = A·D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.cpu_kernels.elementwise import draw_seed
from clap_ds.cpu_kernels.jit_build import is_ready, kernel

# Multiples of 32, the bf16 numbers in a row of an AMX tile.
HEAD_DIMS = (32, 64, 96, 128)
PARTS = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}
"""Number of tensors → how many of q, k and v are side by side in each."""


class Segments(NamedTuple):
    """Ranges of rows that attend to ranges of others, each field (S,) int32 on the CPU.

    Segment s's queries are `query_rows[s]` ≥ 0 rows from `query_start[s]`; keys and values
    likewise. Segments must be in order, without overlap (gaps are allowed) and inside the tensors,
    which the kernel doesn't check.
    """

    query_start: Tensor
    query_rows: Tensor
    key_start: Tensor
    key_rows: Tensor

    @classmethod
    def of_captions(
        cls, start: Tensor, rows: Tensor, keys: Tensor | None = None, *, first_only: bool
    ) -> Segments:
        """Build the segments of captions with `rows` rows from `start`, of which the first `keys`
        (default: all) are keys. With `first_only` the queries are (captions, C); else every row is
        a query."""
        if keys is None:
            keys = rows
        if first_only:
            query_start = torch.arange(len(start), dtype=torch.int32)
            return cls(query_start, torch.ones_like(start), start, keys)
        return cls(start, rows, start, keys)


def native_segment_attention(
    tensors: Sequence[Tensor], heads: int, segments: Segments, scale: float, dropout: float = 0.0
) -> Tensor:
    """Compute dropout(softmax(q kᵀ · scale)) v of each segment and head.

    Args:
        tensors: queries, keys and values, (rows, A·D) bf16 on the CPU each: all three side by side
            in one tensor, queries and the other two side by side, or three tensors. They may be
            slices of wider rows. Gradients have the same layout.
        scale: above 0.
        dropout: probability of dropping a weight, below 1.

    Returns:
        bf16 (rows of the queries, A·D). Zeros for segments without keys and rows outside of
        segments.
    """
    q, k, v = _split(tensors)
    for tensor in (q, k, v):
        # Rows may be slices, but their numbers are bf16 on the CPU.
        assert is_ready(tensor[:0])
        assert tensor.shape[1:] == q.shape[1:], tensor.shape
    head_dim = q.shape[1] // heads
    assert head_dim in HEAD_DIMS
    assert head_dim * heads == q.shape[1]
    # (4, S)
    ranges = torch.stack(segments)
    assert ranges.dtype == torch.int32
    # Both passes draw the same mask from it.
    seed = draw_seed() if dropout > 0 else 0
    sizes = torch.tensor((ranges.shape[1], len(q), len(k), heads, head_dim, seed))
    options = (ranges, sizes, float(scale), float(dropout))
    return _SegmentAttention.apply(heads, options, *tensors)


def _split(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split tensors, or their gradients, into q, k and v."""
    parts: list[Tensor] = []
    for count, tensor in zip(PARTS[len(tensors)], tensors, strict=True):
        parts += tensor.chunk(count, 1)
    return parts


def _run(name: str, tensors: list[Tensor], *options: Any) -> None:
    """Call a kernel with a table of the tensors' addresses and row strides as first argument."""
    # Strides, because q, k and v may be slices of wider rows.
    table = torch.tensor([[tensor.data_ptr(), tensor.stride(0)] for tensor in tensors])
    kernel(name)(table, *options)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: int, options: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        tensors = tuple(_with_whole_rows(tensor) for tensor in tensors)
        query, key, value = _split(tensors)
        output = torch.empty(query.shape, dtype=query.dtype)
        # Logarithms of the softmax denominators, from which the backward pass recomputes weights.
        log_sums_AT = torch.empty(heads, len(query))
        _run("clap_segment_attention_forward", [query, key, value, output], log_sums_AT, *options)
        ctx.save_for_backward(log_sums_AT, *tensors)
        ctx.options = options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_sums_AT, *tensors = ctx.saved_tensors
        # In the same layout as the inputs, so that their linear layer takes them as they are.
        gradients = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        d_output = _with_whole_rows(grads[0])
        table = [*_split(tensors), d_output, *_split(gradients)]
        _run("clap_segment_attention_backward", table, log_sums_AT, *ctx.options)
        return None, None, *gradients


def _with_whole_rows(tensor: Tensor) -> Tensor:
    # Kernels read whole rows; only the distance of rows is free.
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
