"""Softmax attention of captions over their own tokens on CPUs with bf16 matrix units: the wrapper of
`native/segment_forward.cpp` and `segment_backward.cpp`.

Captions are segments of rows, so one kernel takes padded and packed ones, with every token or the first alone as query, and
reads q, k and v where a projection left them. Shape letters: S segments, T rows, A heads, D head dim, C = A·D, E = 3·C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.native import library
from clap_ds.native.dropout import draw_seed

HEAD_DIMS = (32, 64, 96, 128)


class Segments(NamedTuple):
    """Which rows attend to which; each (S,) int32 on CPU. Segments follow one another in the queries and in the keys without
    overlap, perhaps with gaps, and lie inside the tensors: the kernel doesn't look.

    Attributes:
        query_start, query_rows: segment s's queries are `query_rows[s]` rows from row `query_start[s]` on; may be none.
        key_start, key_rows: the rows of keys and values they attend to, likewise.
    """

    query_start: Tensor
    query_rows: Tensor
    key_start: Tensor
    key_rows: Tensor


def segments_of_padded(batch: int, length: int, lengths: Tensor | None, first_only: bool) -> Segments:
    """The segments of captions padded on the right to `length` rows each.

    Args:
        lengths: (batch,) integers, real tokens of each, which are the keys; None where all are.
        first_only: the queries are (batch, C), one row per caption; else padding has queries too.
    """
    number = torch.arange(batch, dtype=torch.int32)
    key_rows = torch.full_like(number, length) if lengths is None else lengths.int()
    if first_only:
        return Segments(number, torch.ones_like(number), number * length, key_rows)
    return Segments(number * length, torch.full_like(number, length), number * length, key_rows)


def segments_of_packed(bounds: Tensor, num_captions: int | None, first_only: bool) -> Segments:
    """The segments of packed captions.

    Args:
        bounds: (captions + 1,) int32 on CPU: caption i is rows bounds[i] to bounds[i + 1].
        num_captions: only so many, the first ones; None for all.
        first_only: the queries are (captions, C), one row per caption.
    """
    start = bounds[:-1][:num_captions].contiguous()
    rows = bounds.diff()[:num_captions].contiguous()
    if first_only:
        return Segments(torch.arange(len(start), dtype=torch.int32), torch.ones_like(start), start, rows)
    return Segments(start, rows, start, rows)


def supports(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Whether the kernel can be used."""
    known = dtype == torch.bfloat16 and device.type == "cpu" and head_dim in HEAD_DIMS
    return known and not library.unavailable()


def native_segment_attention(
    q_TC: Tensor, k_TC: Tensor, v_TC: Tensor, heads: int, segments: Segments, scale: float, dropout: float = 0.0
) -> Tensor:
    """dropout(softmax(q kᵀ · scale)) v of each segment and head.

    Args:
        q_TC: bf16 (rows of the queries, A·D) on CPU; like the others perhaps a slice of wider rows.
        k_TC, v_TC: bf16 (rows of the keys, A·D).
        scale: above 0.
        dropout: probability of a weight to become 0, as in `F.dropout` while training; below 1.

    Returns:
        bf16 (rows of the queries, A·D). Zeros where a segment has no keys and in rows of no segment.

    Raises:
        ValueError: dtypes, shapes, the scale or the dropout are others.
        RuntimeError: there is no native library here.
    """
    _check((q_TC, k_TC, v_TC), heads, segments, scale, dropout)
    if q_TC.shape[1] != k_TC.shape[1] or k_TC.shape != v_TC.shape:
        raise ValueError(f"q, k and v don't fit together: {(*q_TC.shape,)}, {(*k_TC.shape,)}, {(*v_TC.shape,)}")
    return _SegmentAttention.apply(q_TC, k_TC, v_TC, heads, segments, _Weighting.drawn(scale, dropout))


def native_segment_attention_qkv(
    qkv_TE: Tensor, heads: int, segments: Segments, scale: float, dropout: float = 0.0
) -> Tensor:
    """`native_segment_attention` of queries, keys and values side by side, whose gradient is one tensor as well.

    Args:
        qkv_TE: bf16 (rows, 3·A·D), heads inside each of the three.

    Returns:
        bf16 (rows, A·D), as there.

    Raises:
        ValueError, RuntimeError: as there.
    """
    if qkv_TE.ndim != 2 or qkv_TE.shape[1] % 3:
        raise ValueError(f"qkv must be (rows, 3·A·D), not {(*qkv_TE.shape,)}")
    _check(qkv_TE.chunk(3, dim=1), heads, segments, scale, dropout)
    return _FusedSegmentAttention.apply(qkv_TE, heads, segments, _Weighting.drawn(scale, dropout))


class _Weighting(NamedTuple):
    """How weights come from scores: what the kernels take last."""

    scale: float
    dropout: float
    seed: int

    @classmethod
    def drawn(cls, scale: float, dropout: float) -> _Weighting:
        return cls(float(scale), float(dropout), draw_seed() if dropout > 0 else 0)


def _check(tensors: tuple[Tensor, ...], heads: int, segments: Segments, scale: float, dropout: float) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu" or tensor.ndim != 2:
            raise ValueError(f"expected bf16 rows on CPU, not {tensor.dtype} {(*tensor.shape,)} on {tensor.device}")
        if tensor.shape[1] not in [heads * head_dim for head_dim in HEAD_DIMS]:
            raise ValueError(f"{tensor.shape[1]} columns are not {heads} heads of {', '.join(map(str, HEAD_DIMS))}")
    shape = segments.query_start.shape
    for places in segments:
        if places.dtype != torch.int32 or places.shape != shape or places.ndim != 1 or not places.is_contiguous():
            raise ValueError(f"segments must be contiguous int32 of one length, not {places.dtype} {(*places.shape,)}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, not {scale}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, segments: Segments, weighting: _Weighting
    ) -> Tensor:
        q, k, v = (_with_whole_rows(tensor) for tensor in (q, k, v))
        output, log_sums = _forward(q, k, v, heads, segments, weighting)
        ctx.save_for_backward(q, k, v, log_sums)
        ctx.rest = heads, segments, weighting
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_sums = ctx.saved_tensors
        d_q, d_k, d_v = (_new_rows(tensor, ctx.rest[1]) for tensor in (q, k, v))
        _backward(q, k, v, grads[0], d_q, d_k, d_v, log_sums, *ctx.rest)
        return d_q, d_k, d_v, None, None, None


class _FusedSegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, segments: Segments, weighting: _Weighting) -> Tensor:
        qkv = _with_whole_rows(qkv)
        q, k, v = qkv.chunk(3, dim=1)
        output, log_sums = _forward(q, k, v, heads, segments, weighting)
        ctx.save_for_backward(qkv, log_sums)
        ctx.rest = heads, segments, weighting
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, log_sums = ctx.saved_tensors
        d_qkv = _new_rows(qkv, ctx.rest[1])
        q, k, v = qkv.chunk(3, dim=1)
        d_q, d_k, d_v = d_qkv.chunk(3, dim=1)
        _backward(q, k, v, grads[0], d_q, d_k, d_v, log_sums, *ctx.rest)
        return d_qkv, None, None, None


def _with_whole_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _new_rows(like: Tensor, segments: Segments) -> Tensor:
    """For the kernel to write, which with no segment at all writes nothing."""
    make = torch.empty if len(segments.query_start) else torch.zeros
    return make(like.shape, dtype=like.dtype)


def _sizes(q: Tensor, k: Tensor, heads: int, segments: Segments) -> tuple[int, ...]:
    return len(segments.query_start), len(q), len(k), heads, q.shape[1] // heads


def _forward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, segments: Segments, weighting: _Weighting
) -> tuple[Tensor, Tensor]:
    """The output, and (A, rows of q) fp32 log-sum-exps of the scores."""
    output = _new_rows(q, segments)
    log_sums = torch.empty(heads, len(q))
    places = [argument for tensor in (q, k, v, output) for argument in (tensor, tensor.stride(0))]
    run = library.kernel("clap_segment_attention_forward")
    run(*places, log_sums, *segments, *_sizes(q, k, heads, segments), *weighting)
    return output, log_sums


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_output: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    log_sums: Tensor,
    heads: int,
    segments: Segments,
    weighting: _Weighting,
) -> None:
    """Writes `d_q`, `d_k` and `d_v`."""
    tensors = (q, k, v, _with_whole_rows(d_output), d_q, d_k, d_v)
    places = [argument for tensor in tensors for argument in (tensor, tensor.stride(0))]
    run = library.kernel("clap_segment_attention_backward")
    run(*places, log_sums, *segments, *_sizes(q, k, heads, segments), *weighting)
