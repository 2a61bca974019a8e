"""Compute attention within the windows of a square token grid, with one of several kernels.

- `sdpa`: PyTorch's fused attention. As the position bias needs a gradient, PyTorch uses separate operations on CPUs and its
  memory-efficient kernel on CUDA. All FLOP counters support it, so counted models use it.
- `matmul`: for CPUs, batched matrix products, one softmax and a manual backward pass. Tensors stay in bf16 (products
  accumulate and softmax computes in fp32), and one copy partitions, shifts and splits heads.
- `triton`: one CUDA kernel forward and one backward that read and write the grid directly (`window_attention_triton.py`).
  On an H200 6 to 19 times as fast as `sdpa` forward, 4 to 8 times backward (`results/h200`).

Shape letters: B batch, H and W the token grid, G windows of a clip, N tokens of a window, A attention heads, D head dim,
C = A·D.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.model.windows import merge_windows, partition_windows

MOST_BATCHED = 65_535
"""Largest batch that `_sdpa` gives to PyTorch: the limit of a CUDA grid's third dimension, which its memory-efficient kernels
use for the batch. PyTorch splits larger batches, but fails to add the parts' gradients of the bias, as shapes differ
(`_scaled_dot_product_efficient_attention_backward_cuda`)."""


def attend_windows(
    qkv_BHWE: Tensor, bias_ANN: Tensor, mask_GNN: Tensor | None, window: int, shift: int, kernel: str
) -> Tensor:
    """Apply softmax attention of every token over its window's tokens; return (B, H, W, A·D).

    Args:
        qkv_BHWE: (B, H, W, 3·A·D), queries, keys and values, each split into heads; H = W, a multiple of `window`.
        bias_ANN: added to the scores after their scaling by D^-1/2. Any floating dtype.
        mask_GNN: added to the scores of shifted windows; required if `shift` > 0, otherwise ignored.
        shift: tokens by which the grid is moved cyclically up and left under the windows. The output is moved back.
    """
    assert shift == 0 or mask_GNN is not None
    bias_ANN = bias_ANN.to(qkv_BHWE.dtype)
    mask_GNN = mask_GNN.to(qkv_BHWE.dtype) if shift and mask_GNN is not None else None
    if kernel == "triton":
        from clap_ds.model.window_attention_triton import triton_window_attention

        return triton_window_attention(qkv_BHWE, bias_ANN, window, shift)
    if kernel == "matmul":
        return MatmulWindowAttention.apply(qkv_BHWE, bias_ANN, mask_GNN, window, shift)
    if shift:
        qkv_BHWE = qkv_BHWE.roll((-shift, -shift), dims=(1, 2))
    windows = partition_windows(qkv_BHWE, window).unflatten(3, (3, len(bias_ANN), -1))
    mixed_BHWC = merge_windows(_sdpa(windows, bias_ANN, mask_GNN), qkv_BHWE.shape[1])
    return mixed_BHWC.roll((shift, shift), dims=(1, 2)) if shift else mixed_BHWC


def _sdpa(qkv_BGN3AD: Tensor, bias_ANN: Tensor, mask_GNN: Tensor | None) -> Tensor:
    B, G, N, _, A, D = qkv_BGN3AD.shape
    if mask_GNN is None and B * G > MOST_BATCHED:
        return torch.cat([_sdpa(part, bias_ANN, None) for part in qkv_BGN3AD.split(MOST_BATCHED // G)])
    qkv = qkv_BGN3AD.permute(3, 0, 1, 4, 2, 5)
    if mask_GNN is None:
        (q, k, v), bias = qkv.flatten(1, 2), bias_ANN  # (B·G, A, N, D): one bias for every window
    else:  # (B, G·A, N, D): the bias differs by window
        (q, k, v), bias = qkv.flatten(2, 3), (bias_ANN + mask_GNN[:, None]).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, bias[None])
    return mixed.view(B, G, A, N, D).transpose(2, 3).flatten(3)


def _shifted_pieces(window: int, shift: int) -> list[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Return pairs of slices of the shifted windows and of the grid that hold the same tokens, for one axis split into
    (window, place in it). Together they cover the axis."""
    everything, late, early = slice(None), slice(window - shift, None), slice(0, shift)
    pieces = [((everything, slice(0, window - shift)), (everything, slice(shift, None)))]
    pieces += [((slice(0, -1), late), (slice(1, None), early)), ((slice(-1, None), late), (slice(0, 1), early))]
    return pieces if shift else pieces[:1]


def _copy_windows(windows: Tensor, tokens: Tensor, window: int, shift: int, *, to_windows: bool) -> None:
    """Copy between (S, B, G, A, N, D) windows and (B, H, W, S, A, D) tokens, with shift, in either direction."""
    count = tokens.shape[1] // window
    tiles = tokens.unflatten(2, (count, window)).unflatten(1, (count, window)).permute(5, 0, 1, 2, 3, 4, 6, 7)
    inside = windows.unflatten(2, (count, count)).unflatten(5, (window, window)).permute(0, 1, 2, 5, 3, 6, 4, 7)
    for (row, grid_row), (column, grid_column) in itertools.product(_shifted_pieces(window, shift), repeat=2):
        ours, theirs = inside[:, :, *row, *column], tiles[:, :, *grid_row, *grid_column]
        ours.copy_(theirs) if to_windows else theirs.copy_(ours)


class MatmulWindowAttention(torch.autograd.Function):
    """The `matmul` kernel. Saves q, k, v in window order and the attention weights for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BHWE: Tensor, bias_ANN: Tensor, mask_GNN: Tensor | None, window: int, shift: int
    ) -> Tensor:
        B, H, W, E = qkv_BHWE.shape
        A, N, _ = bias_ANN.shape
        G, D = H * W // N, E // (3 * A)
        windows = qkv_BHWE.new_empty(3, B, G, A, N, D)
        _copy_windows(windows, qkv_BHWE.view(B, H, W, 3, A, D), window, shift, to_windows=True)
        q, k, v = windows.flatten(1, 3)
        bias = bias_ANN[None] if mask_GNN is None else bias_ANN + mask_GNN[:, None]
        scores = torch.bmm(q * D**-0.5, k.transpose(1, 2)).view(B, G, A, N, N).add_(bias)
        weights = scores.softmax(dim=-1).flatten(0, 2)
        mixed = torch.bmm(weights, v)
        output = qkv_BHWE.new_empty(B, H, W, 1, A, D)
        _copy_windows(mixed.view(1, B, G, A, N, D), output, window, shift, to_windows=False)
        ctx.save_for_backward(windows, weights)
        ctx.geometry = window, shift
        return output.view(B, H, W, A * D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        windows, weights = ctx.saved_tensors
        window, shift = ctx.geometry
        _, B, G, A, N, D = windows.shape
        q, k, v = windows.flatten(1, 3)
        _, H, W, C = grads[0].shape
        d_mixed = windows.new_empty(1, B, G, A, N, D)
        _copy_windows(d_mixed, grads[0].view(B, H, W, 1, A, D), window, shift, to_windows=True)
        d_mixed = d_mixed.flatten(0, 3)
        d_q, d_k, d_v = d_windows = torch.empty_like(windows).flatten(1, 3)
        torch.bmm(weights.transpose(1, 2), d_mixed, out=d_v)
        d_weights = torch.bmm(d_mixed, v.transpose(1, 2))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        torch.bmm(d_scores, k, out=d_q).mul_(D**-0.5)
        torch.bmm(d_scores.transpose(1, 2), q, out=d_k).mul_(D**-0.5)
        d_qkv = windows.new_empty(B, H, W, 3, A, D)
        _copy_windows(d_windows.view_as(windows), d_qkv, window, shift, to_windows=False)
        d_bias = d_scores.view(B * G, A, N, N).sum(dim=0) if ctx.needs_input_grad[1] else None
        return d_qkv.view(B, H, W, 3 * C), d_bias, None, None, None
