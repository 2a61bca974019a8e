"""Window attention on CPUs with bf16 matrix units (AMX), by `clap_ds/native/window_forward.cpp` and `window_backward.cpp`.

Windows are read from the qkv projection's output and written to the output's grid in place, one head of one window at a time,
and the mask of shifted windows is worked out from coordinates. Scores and softmax are in fp32; weights and their gradients are
rounded to bf16 for the products. The forward pass keeps the softmax denominators, from which the backward pass computes the
weights again. Gradients are the same from run to run with the same number of threads.

Shape letters as in `window_attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.native import library

WINDOW = 8
LARGEST_DIM = 64


def why_unsupported(dtype: torch.dtype, device: torch.device, window: int, dim: int) -> str:
    """What keeps `native_window_attention` from computing heads of `dim` channels; empty where it can."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"needs bf16 on a CPU, found {dtype} on {device.type}"
    if window != WINDOW:
        return f"needs windows of {WINDOW} × {WINDOW}, found {window} × {window}"
    if dim % 8 or dim > LARGEST_DIM:
        return f"needs a head dim that is a multiple of 8 up to {LARGEST_DIM}, found {dim}"
    return _unavailable()


@torch.compiler.assume_constant_result
def _unavailable() -> str:
    return library.unavailable()


def supports(dtype: torch.dtype, device: torch.device, window: int, dim: int) -> bool:
    """Whether `native_window_attention` can compute this here: bf16 on a CPU with AMX, windows of 8 × 8, a head dim that is a
    multiple of 8 up to 64."""
    return not why_unsupported(dtype, device, window, dim)


@torch.library.custom_op("clap_ds::native_window_attention", mutates_args=())
def _forward(qkv_BHWE: Tensor, bias_ANN: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    B, H, W, E = qkv_BHWE.shape
    A, N, _ = bias_ANN.shape
    output_BHWC = qkv_BHWE.new_empty(B, H, W, E // 3)
    log_sums_BGAN = bias_ANN.new_empty(B, H * W // N, A, N)
    run = library.kernel("clap_window_attention_forward")
    run(qkv_BHWE, bias_ANN, output_BHWC, log_sums_BGAN, B, H, A, E // (3 * A), shift)
    return output_BHWC, log_sums_BGAN


@_forward.register_fake
def _(qkv_BHWE: Tensor, bias_ANN: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    B, H, W, E = qkv_BHWE.shape
    A, N, _ = bias_ANN.shape
    return qkv_BHWE.new_empty(B, H, W, E // 3), bias_ANN.new_empty(B, H * W // N, A, N)


@torch.library.custom_op("clap_ds::native_window_attention_backward", mutates_args=())
def _backward(
    qkv_BHWE: Tensor, bias_ANN: Tensor, log_sums_BGAN: Tensor, d_output_BHWC: Tensor, shift: int, needs_d_bias: bool
) -> tuple[Tensor, Tensor]:
    B, H, _, E = qkv_BHWE.shape
    A = len(bias_ANN)
    d_qkv_BHWE = torch.empty_like(qkv_BHWE)
    d_bias_ANN = bias_ANN.new_empty(bias_ANN.shape if needs_d_bias else 0)
    run = library.kernel("clap_window_attention_backward")
    sizes = (B, H, A, E // (3 * A), shift)
    run(qkv_BHWE, bias_ANN, log_sums_BGAN, d_output_BHWC, d_qkv_BHWE, d_bias_ANN if needs_d_bias else None, *sizes)
    return d_qkv_BHWE, d_bias_ANN


@_backward.register_fake
def _(
    qkv_BHWE: Tensor, bias_ANN: Tensor, log_sums_BGAN: Tensor, d_output_BHWC: Tensor, shift: int, needs_d_bias: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv_BHWE), bias_ANN.new_empty(bias_ANN.shape if needs_d_bias else 0)


class NativeWindowAttention(torch.autograd.Function):
    """Keeps qkv, the bias in fp32 and one number per token and head for the backward pass."""

    @staticmethod
    def forward(ctx: Any, qkv_BHWE: Tensor, bias_ANN: Tensor, shift: int) -> Tensor:
        qkv_BHWE = qkv_BHWE.contiguous()
        bias = bias_ANN.float().contiguous()
        output_BHWC, log_sums_BGAN = _forward(qkv_BHWE, bias, shift)
        ctx.save_for_backward(qkv_BHWE, bias, log_sums_BGAN)
        ctx.shift, ctx.bias_dtype = shift, bias_ANN.dtype
        return output_BHWC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_d_bias = ctx.needs_input_grad[1]
        d_qkv_BHWE, d_bias_ANN = _backward(*ctx.saved_tensors, grads[0].contiguous(), ctx.shift, needs_d_bias)
        return d_qkv_BHWE, d_bias_ANN.to(ctx.bias_dtype) if needs_d_bias else None, None


def native_window_attention(qkv_BHWE: Tensor, bias_ANN: Tensor, window: int, shift: int) -> Tensor:
    """`clap_ds.model.window_attention.attend_windows` by the native kernel, with autograd.

    Args:
        qkv_BHWE: (B, H, W, 3·A·D) that the kernel `supports`, H = W.
        bias_ANN: (A, 64, 64) in any floating dtype, which is that of its gradient; used in fp32.
        window: 8.
        shift: below `window`.

    Returns:
        (B, H, W, A·D) in bf16.
    """
    _, H, W, _ = qkv_BHWE.shape
    assert supports(qkv_BHWE.dtype, qkv_BHWE.device, window, qkv_BHWE.shape[3] // (3 * len(bias_ANN)))
    assert qkv_BHWE.shape[3] % (3 * len(bias_ANN)) == 0
    assert bias_ANN.shape[1:] == (window**2, window**2)
    assert H == W
    assert H % window == 0
    assert 0 <= shift < window
    return NativeWindowAttention.apply(qkv_BHWE, bias_ANN, shift)
