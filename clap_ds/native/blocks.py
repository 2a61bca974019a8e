"""Whole transformer blocks by this project's CPU kernels (`clap_ds/native`), with the weights of torch's modules.

For bf16 weights on CPUs with matrix units; `swin.py` and `text.py` ask `runs_*` and else go on with torch. The results differ
from torch's bf16 by rounding alone, and less often: sums, GELU and residuals stay in fp32 until they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.native import layer_norm as layer_norm_native
from clap_ds.native import linear as linear_native
from clap_ds.native import segment_attention as segment_attention_native
from clap_ds.native.dropout import native_dropout
from clap_ds.native.layer_norm import native_add_layer_norm, native_layer_norm, native_layer_norm_residual
from clap_ds.native.linear import native_joined_linears, native_linear, native_mlp, native_mlp_passing
from clap_ds.native.segment_attention import (
    Segments,
    native_segment_attention,
    native_segment_attention_qkv,
)
from clap_ds.native.window_attention import native_window_attention
from clap_ds.native.window_attention import supports as supports_windows

if TYPE_CHECKING:
    from clap_ds.model.htsat import PatchEmbed
    from clap_ds.model.swin import DropPath, PatchMerging, SwinBlock


KERNELS = ("auto", "native")
"""Of the window attention's, those with which whole blocks run here where they can."""


def runs_swin(block: SwinBlock, tokens_BHWC: Tensor) -> bool:
    """Whether `swin_block` can stand in for the block on these tokens."""
    attention = block.attention
    heads = attention.relative_position_bias.shape[1]
    return (
        attention.kernel in KERNELS
        and layer_norm_native.supports(tokens_BHWC)
        and linear_native.supports(attention.qkv.weight)
        and supports_windows(tokens_BHWC.dtype, tokens_BHWC.device, attention.window, tokens_BHWC.shape[-1] // heads)
    )


def runs_merging(merge: PatchMerging, squares: Tensor) -> bool:
    """Whether `patch_merging` can stand in for the module."""
    return layer_norm_native.supports(squares) and linear_native.supports(merge.reduction.weight)


def runs_patch_embed(embed: PatchEmbed, image: Tensor) -> bool:
    """Whether `patch_embed` can stand in for the module."""
    weight, patch = embed.proj.weight, image.shape[-1] // embed.proj.kernel_size[0]
    return (
        embed.kernel in KERNELS
        and image.dtype == weight.dtype == torch.bfloat16
        and layer_norm_native.supports(image.new_empty(0, patch, weight.shape[0]))
    )


def runs_text(layer: Any, hidden: Tensor) -> bool:
    """Whether `text_layer` can stand in for a RoBERTa layer on these hidden states."""
    attention = layer.attention.self
    return (
        layer_norm_native.supports(hidden)
        and linear_native.supports(attention.query.weight)
        and linear_native.supports(layer.intermediate.dense.weight)
        and segment_attention_native.supports(hidden.dtype, hidden.device, attention.attention_head_size)
    )


def swin_block(block: SwinBlock, tokens_BHWC: Tensor) -> Tensor:
    """`SwinBlock.forward`."""
    attention, mlp = block.attention, block.mlp
    normed, tokens_BHWC = _norm_and_pass(tokens_BHWC, block.norm1)
    qkv_BHWE = native_linear(normed, attention.qkv.weight, attention.qkv.bias)
    mixed = native_window_attention(qkv_BHWE, attention.position_bias(), attention.window, block.shift)
    project = partial(native_linear, mixed, attention.proj.weight, attention.proj.bias)
    tokens_BHWC = _add_branch(block.drop_path, project, tokens_BHWC)
    normed, tokens_BHWC = _norm_and_pass(tokens_BHWC, block.norm2)
    feed = partial(native_mlp, normed, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)
    return _add_branch(block.drop_path, feed, tokens_BHWC)


def patch_embed(embed: PatchEmbed, image_B1HW: Tensor) -> Tensor:
    """`PatchEmbed.forward`, the convolution as a matrix product."""
    size = embed.proj.kernel_size[0]
    patches = image_B1HW[:, 0].unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3).flatten(3)
    tokens_BHWC = F.linear(patches, embed.proj.weight.flatten(1), embed.proj.bias)
    return native_layer_norm(tokens_BHWC, embed.norm.weight, embed.norm.bias, embed.norm.eps)


def patch_merging(merge: PatchMerging, squares: Tensor) -> Tensor:
    """Norm and reduction of `PatchMerging`: (…, 4·C) → (…, 2·C)."""
    norm = merge.norm
    return native_linear(native_layer_norm(squares, norm.weight, norm.bias, norm.eps), merge.reduction.weight, None)


def text_layer(layer: Any, hidden_TC: Tensor, segments: Segments, first_rows: Tensor | None = None) -> Tensor:
    """A layer of RoBERTa.

    Args:
        layer: `transformers`' `RobertaLayer`.
        hidden_TC: (rows, C).
        segments: whose tokens attend to whose.
        first_rows: compute only these rows, which are what the segments' queries are numbered by.

    Returns:
        (rows or first rows, C).
    """
    attention, output = layer.attention.self, layer.attention.output
    heads, scale = attention.num_attention_heads, attention.attention_head_size**-0.5
    dropout = attention.dropout.p if attention.training else 0.0
    if first_rows is None:
        qkv_TE, hidden_TC = native_joined_linears(hidden_TC, attention.query, attention.key, attention.value)
        mixed = native_segment_attention_qkv(qkv_TE, heads, segments, scale, dropout)
    else:
        kv_TE, hidden_TC = native_joined_linears(hidden_TC, attention.key, attention.value)
        hidden_TC = hidden_TC.index_select(0, first_rows)
        query = native_linear(hidden_TC, attention.query.weight, attention.query.bias)
        key, value = kv_TE.chunk(2, dim=1)
        mixed = native_segment_attention(query, key, value, heads, segments, scale, dropout)
    branch = native_linear(mixed, output.dense.weight, output.dense.bias)
    hidden_TC = _add_and_norm(branch, hidden_TC, output)
    first, second = layer.intermediate.dense, layer.output.dense
    branch, hidden_TC = native_mlp_passing(hidden_TC, first.weight, first.bias, second.weight, second.bias)
    return _add_and_norm(branch, hidden_TC, layer.output)


def _add_and_norm(branch: Tensor, residual: Tensor, output: Any) -> Tensor:
    norm = output.LayerNorm
    if output.training:
        branch = native_dropout(branch, output.dropout.p)
    return native_add_layer_norm(branch, residual, norm.weight, norm.bias, norm.eps)


def _norm_and_pass(tokens: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return native_layer_norm_residual(tokens, norm.weight, norm.bias, norm.eps)


def _add_branch(drop_path: DropPath, branch: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    """`tokens` plus the branch, whose own pass adds them unless it is dropped here and there."""
    if drop_path.training and drop_path.probability > 0.0:
        return tokens + drop_path(branch())
    return branch(residual=tokens)
