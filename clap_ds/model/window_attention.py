"""Compute attention within the windows of a square token grid, with one of several kernels.

- `sdpa`: PyTorch's fused attention. As the position bias needs a gradient, PyTorch uses separate
  operations on CPUs and its memory-efficient kernel on CUDA. All FLOP counters support it, so
  counted models use it.
- `matmul`: for CPUs, batched matrix products, one softmax and a manual backward pass. Tensors stay
  in bf16 (products accumulate and softmax computes in fp32).
- `triton`: one CUDA kernel forward and one backward that read and write the grid directly
  (`window_attention_triton.py`). On an H200 6 to 19 times as fast as `sdpa` forward, 4 to 8 times
  backward (`results/h200`).

Shape letters: B batch, H and W the token grid, G windows of a clip, N tokens of a window, A
attention heads, D head dim, C = A·D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.model.shifted_windows import from_windows, to_windows

MAX_BATCH = 65_535
"""Largest batch given to PyTorch at once: the limit of a CUDA grid's third dimension, which its
memory-efficient kernels use for the batch. PyTorch splits larger batches, but fails to add the
parts' gradients of the bias."""


def attend_windows(
    qkv_BHWE: Tensor,
    bias_ANN: Tensor,
    mask_GNN: Tensor | None,
    window: int,
    shift: int,
    kernel: str,
    qkv_bias_E: Tensor | None = None,
) -> Tensor:
    """Apply softmax attention of every token over its window's tokens; return (B, H, W, A·D).

    Args:
        qkv_BHWE: (B, H, W, 3·A·D), queries, keys and values, each split into heads; H = W, a
            multiple of `window`.
        bias_ANN: added to the scores after their scaling by D^-1/2. Any floating dtype.
        mask_GNN: added to the scores of shifted windows; required if `shift` > 0, otherwise
            ignored.
        shift: tokens by which the grid is moved cyclically up and left under the windows. The
            output is moved back.
        qkv_bias_E: for `triton`, the bias of the linear layer that computed qkv, if that layer used
            it detached. It has no effect on the output. It only receives its gradient, which the
            kernel sums.
    """
    assert shift == 0 or mask_GNN is not None
    bias_ANN = bias_ANN.to(qkv_BHWE.dtype)
    if shift == 0:
        mask_GNN = None
    elif mask_GNN is not None:
        mask_GNN = mask_GNN.to(qkv_BHWE.dtype)
    if kernel == "triton":
        from clap_ds.model.window_attention_triton import triton_window_attention

        # The kernel computes the mask from coordinates.
        return triton_window_attention(qkv_BHWE, bias_ANN, qkv_bias_E, window, shift)
    if kernel == "matmul":
        return MatmulWindowAttention.apply(qkv_BHWE, bias_ANN, mask_GNN, window, shift)
    windows_SBGAND = to_windows(qkv_BHWE, window, shift, 3, len(bias_ANN))
    if mask_GNN is None:
        # (S, B·G, A, N, D): every window has the same bias.
        batches = windows_SBGAND.flatten(1, 2).split(MAX_BATCH, dim=1)
        bias = bias_ANN
    else:
        # (S, B, G·A, N, D): the bias differs by window.
        batches = (windows_SBGAND.flatten(2, 3),)
        bias = (bias_ANN + mask_GNN[:, None]).flatten(0, 1)
    mixed = [F.scaled_dot_product_attention(q, k, v, bias[None]) for q, k, v in batches]
    # Usually one: 65,535 windows are 1,023 clips of HTSAT's first stage.
    whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return from_windows(whole.view(1, *windows_SBGAND.shape[1:]), shift)


class MatmulWindowAttention(torch.autograd.Function):
    """The `matmul` kernel. Saves q, k, v in window order and the attention weights for the backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BHWE: Tensor,
        bias_ANN: Tensor,
        mask_GNN: Tensor | None,
        window: int,
        shift: int,
    ) -> Tensor:
        windows_SBGAND = to_windows(qkv_BHWE, window, shift, 3, len(bias_ANN)).contiguous()
        _, B, G, A, N, D = windows_SBGAND.shape
        # Each (B·G·A, N, D), for batched matrix products.
        q, k, v = windows_SBGAND.flatten(1, 3)
        bias = bias_ANN[None] if mask_GNN is None else bias_ANN + mask_GNN[:, None]
        scores = torch.bmm(q * D**-0.5, k.transpose(1, 2))
        scores = scores.view(B, G, A, N, N).add_(bias)
        weights = scores.softmax(dim=-1).flatten(0, 2)
        ctx.save_for_backward(windows_SBGAND, weights)
        ctx.geometry = window, shift
        mixed = torch.bmm(weights, v)
        return from_windows(mixed.view(1, B, G, A, N, D), shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        windows_SBGAND, weights = ctx.saved_tensors
        window, shift = ctx.geometry
        _, B, G, A, N, D = windows_SBGAND.shape
        q, k, v = windows_SBGAND.flatten(1, 3)
        d_mixed = to_windows(grads[0], window, shift, 1, A).contiguous().flatten(0, 3)

        # Products write to the views d_q, d_k and d_v of one tensor.
        d_windows_SBGAND = torch.empty_like(windows_SBGAND)
        d_q, d_k, d_v = d_windows_SBGAND.flatten(1, 3)
        # mixed = weights · v
        torch.bmm(weights.transpose(1, 2), d_mixed, out=d_v)
        d_weights = torch.bmm(d_mixed, v.transpose(1, 2))
        # weights = softmax(q · kᵀ · D^-½ + bias)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        torch.bmm(d_scores, k, out=d_q).mul_(D**-0.5)
        torch.bmm(d_scores.transpose(1, 2), q, out=d_k).mul_(D**-0.5)
        d_bias_ANN = None
        if ctx.needs_input_grad[1]:
            d_bias_ANN = d_scores.view(B * G, A, N, N).sum(dim=0)
        return from_windows(d_windows_SBGAND, shift), d_bias_ANN, None, None, None
