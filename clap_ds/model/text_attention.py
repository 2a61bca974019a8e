"""Compute the text tower's attention, over padded or packed captions.

On CUDA captions of few tokens have a Triton kernel (`text_attention_triton.py`). Without it, packed
captions on CUDA in 16 bits use PyTorch's variable-length flash attention, which has no dropout of
attention weights. Otherwise packed captions are padded for attention. On CPUs attention is two
matrix products and a softmax: PyTorch's fused kernel takes ten times as long backward in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.model.packed import Layout


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    layout: Layout | None = None,
) -> Tensor:
    """Return attention, (batch, tokens, heads, D), of queries, keys and values (batch, heads,
    tokens, D). `attention_mask` is bool (batch, 1, 1, tokens), True at real tokens (None: all).
    With a `layout` of packed captions batch is 1."""
    if layout is None:
        return _attend_padded(query, key, value, attention_mask, dropout).transpose(1, 2)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _attend_varlen(query, key, value, layout)
    q, k, v = (_to_padded(tensor, layout) for tensor in (query, key, value))
    mixed_SALD = _attend_padded(q, k, v, layout.keep, dropout)
    mixed_TAD = mixed_SALD.transpose(1, 2).flatten(0, 1).index_select(0, layout.to_row)
    return mixed_TAD[None]


def attend_in_one_kernel(
    qkv_BLE: Tensor,
    bias_E: Tensor,
    attention_mask: Tensor | None,
    layout: Layout | None,
    heads: int,
    dropout: float,
) -> Tensor:
    """Compute `attend` by Triton from queries, keys and values in one (batch, tokens, 3·C), whose
    `bias_E` has been added and only receives its gradient. Returns (batch, tokens, C)."""
    from clap_ds.model.text_attention_triton import triton_text_attention

    B, L, _ = qkv_BLE.shape
    if layout is None:
        bounds = torch.arange(B + 1, dtype=torch.int32, device=qkv_BLE.device) * L
        lengths = (
            bounds.diff()
            if attention_mask is None
            else attention_mask.sum(dim=(1, 2, 3), dtype=torch.int32)
        )
    else:
        bounds = layout.packing.bounds
        L = layout.packing.max_tokens
        lengths = bounds.diff()
    mixed_TC = triton_text_attention(
        qkv_BLE.flatten(0, 1), bias_E, bounds, lengths, heads, L, dropout
    )
    return mixed_TC.unflatten(0, qkv_BLE.shape[:2])


def _to_padded(packed_1ATD: Tensor, layout: Layout) -> Tensor:
    """Rearrange (1, A, T, D) to (S, A, L, D)."""
    padded = packed_1ATD[0].transpose(0, 1).index_select(0, layout.to_padded)
    return padded.unflatten(0, (-1, layout.longest)).transpose(1, 2)


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, dropout: float
) -> Tensor:
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, keep, dropout_p=dropout)
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))
    if keep is not None:
        # With minus infinity, a caption of only padding would become NaN.
        scores = scores.masked_fill_(~keep, torch.finfo(scores.dtype).min)
    return torch.matmul(F.dropout(scores.softmax(dim=-1), dropout), value)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds = layout.packing.bounds
    longest = layout.packing.max_tokens
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest)
    assert isinstance(mixed, Tensor)
    return mixed[None]
