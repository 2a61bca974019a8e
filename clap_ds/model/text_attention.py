"""Compute the text tower's attention, over padded or packed captions.

On CUDA captions of few tokens have a Triton kernel (`text_attention_triton.py`). Without it, packed
captions on CUDA in 16 bits use PyTorch's variable-length flash attention, unless attention weights
are dropped, which it can't, or the GPU is older. Otherwise packed captions are padded for
attention. On CPUs attention is two matrix products and a softmax: PyTorch's fused kernel takes ten
times as long backward in bf16.

Shape letters: B batch, A heads, D head dim, C = A·D channels, E = 3·C; for packed captions see
`packed.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.model.packed import PackedLayout


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    layout: PackedLayout | None = None,
    has_varlen: bool = True,
) -> Tensor:
    """Return attention, (batch, tokens, heads, D), of queries, keys and values (batch, heads,
    tokens, D). `attention_mask` is bool (batch, 1, 1, tokens), True at real tokens (None: all).
    With a `layout` of packed captions batch is 1. `has_varlen`: whether the GPU, if it is one, has
    variable-length attention."""
    if layout is None:
        return _attend_padded(query, key, value, attention_mask, dropout).transpose(1, 2)
    # Variable-length attention has no dropout.
    is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
    if has_varlen and query.is_cuda and is_16_bit and dropout == 0:
        return _attend_varlen(query, key, value, layout)
    # Without a kernel for captions of several lengths, pad them.
    q, k, v = (_to_padded(tensor, layout) for tensor in (query, key, value))
    mixed_SALD = _attend_padded(q, k, v, layout.is_token, dropout)
    mixed_TAD = mixed_SALD.transpose(1, 2).flatten(0, 1).index_select(0, layout.to_row)
    return mixed_TAD[None]


def attend_in_one_kernel(
    qkv_BLE: Tensor,
    bias_E: Tensor,
    attention_mask: Tensor | None,
    layout: PackedLayout | None,
    heads: int,
    dropout: float,
) -> Tensor:
    """Compute `attend` by Triton from queries, keys and values in one (batch, tokens, 3·C), whose
    `bias_E` has been added and only receives its gradient. Returns (batch, tokens, C)."""
    # Here, because Triton may not be installed.
    from clap_ds.model.text_attention_triton import triton_text_attention

    batch, length, _ = qkv_BLE.shape
    if layout is not None:
        cu_seqlens = layout.packing.cu_seqlens
        length = layout.packing.max_seqlen
    else:
        # Padded captions are packed ones of equal length.
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=qkv_BLE.device) * length
    num_keys = cu_seqlens.diff()
    if attention_mask is not None:
        num_keys = attention_mask.sum(dim=(1, 2, 3), dtype=torch.int32)
    # Captions are consecutive rows of one matrix.
    mixed_TC = triton_text_attention(
        qkv_BLE.flatten(0, 1), bias_E, cu_seqlens, num_keys, heads, length, dropout
    )
    return mixed_TC.unflatten(0, qkv_BLE.shape[:2])


def _to_padded(packed_1ATD: Tensor, layout: PackedLayout) -> Tensor:
    """Rearrange (1, A, T, D) to (S, A, L, D)."""
    padded = packed_1ATD[0].transpose(0, 1).index_select(0, layout.to_padded)
    return padded.unflatten(0, (-1, layout.longest)).transpose(1, 2)


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, is_key: Tensor | None, dropout: float
) -> Tensor:
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, is_key, dropout_p=dropout)
    # Scales the queries, which are fewer numbers than the scores.
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))
    if is_key is not None:
        # With minus infinity, a caption of only padding would become NaN.
        scores = scores.masked_fill_(~is_key, torch.finfo(scores.dtype).min)
    return torch.matmul(F.dropout(scores.softmax(dim=-1), dropout), value)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = layout.packing.cu_seqlens
    max_seqlen = layout.packing.max_seqlen
    # (1, A, T, D) → (T, A, D), as FlashAttention takes it
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed_TAD = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(mixed_TAD, Tensor)
    return mixed_TAD[None]
