"""Run window attention with CPU kernels.

Each head of a window is read from the qkv projection's output and written to its place in the
output grid. Scores and softmax are in fp32; weights and their gradients are rounded to bf16 for the
products. The backward pass recomputes the weights from the softmax denominators. Gradients are
reproducible with the same number of threads.

Shape letters: B batch, H and W the token grid, A attention heads, D head dim, E = 3·A·D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.cpu_kernels.jit_build import is_ready, kernel

# Swin's windows of 8×8 tokens.
WINDOW = 8
MAX_DIM = 64


def supports_windows(window: int, head_dim: int) -> bool:
    """Return whether there are kernels for these sizes."""
    return window == WINDOW and head_dim % 8 == 0 and head_dim <= MAX_DIM


def native_window_attention(qkv_BHWE: Tensor, bias_ANN: Tensor, shift: int) -> Tensor:
    """Compute `clap_ds.model.window_attention.attend_windows` with the native kernel and autograd.

    Args:
        qkv_BHWE: (B, H, W, 3·A·D) bf16 on the CPU, H = W; D satisfies `supports_windows`.
        bias_ANN: (A, 64, 64) in any floating dtype, which its gradient has too; used in fp32.
        shift: below 8.
    """
    assert qkv_BHWE.shape[1] == qkv_BHWE.shape[2]
    assert bias_ANN.shape[1:] == (WINDOW**2, WINDOW**2)
    return _WindowAttention.apply(qkv_BHWE, bias_ANN, shift)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BHWE: Tensor, bias_ANN: Tensor, shift: int) -> Tensor:
        qkv_BHWE = qkv_BHWE.contiguous()
        # Its gradient is a sum over all windows, in fp32.
        bias = bias_ANN.float().contiguous()
        assert is_ready(qkv_BHWE)
        B, H, W, E = qkv_BHWE.shape
        A = len(bias)
        output_BHWC = qkv_BHWE.new_empty(B, H, W, E // 3)
        # Logarithms of the softmax denominators, from which the backward pass recomputes the weights.
        log_sums_BHWA = bias.new_empty(B, H, W, A)
        # Batch, side of the grid, heads, head dim, shift.
        ctx.sizes = (B, H, A, E // (3 * A), shift)
        ctx.bias_dtype = bias_ANN.dtype
        kernel("clap_window_attention_forward")(
            qkv_BHWE, bias, output_BHWC, log_sums_BHWA, *ctx.sizes
        )
        ctx.save_for_backward(qkv_BHWE, bias, log_sums_BHWA)
        return output_BHWC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BHWE, bias, log_sums_BHWA = ctx.saved_tensors
        d_output_BHWC = grads[0].contiguous()
        d_qkv_BHWE = torch.empty_like(qkv_BHWE)
        d_bias = torch.empty_like(bias)
        kernel("clap_window_attention_backward")(
            qkv_BHWE, bias, log_sums_BHWA, d_output_BHWC, d_qkv_BHWE, d_bias, *ctx.sizes
        )
        return d_qkv_BHWE, d_bias.to(ctx.bias_dtype), None
