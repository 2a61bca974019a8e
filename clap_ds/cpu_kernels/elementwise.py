"""Run layer norm with residual, dropout and mel power in one pass over memory, with CPU kernels.

They fuse the residual of pre-norm and post-norm blocks, for which torch needs another pass over the
activations in each direction. All threads draw dropout's mask; in torch, only one does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clap_ds.cpu_kernels.jit_build import is_ready, kernel

# A thread's buffers have this size.
MAX_CHANNELS = 4096


def supports_norm(channels: int) -> bool:
    """Return whether there are kernels for this number of channels."""
    # A vector has 16 fp32 numbers.
    return 0 < channels <= MAX_CHANNELS and channels % 16 == 0


def native_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `F.layer_norm` of `x + residual` over the last dimension.

    Args:
        x: (..., C) bf16 on the CPU; `supports_norm(C)`.
        weight, bias: (C,) bf16.
        eps: added to the variance.
        residual: like `x`.

    Returns:
        The normalized rows, and `x + residual` rounded to bf16 as in torch; without a residual `x`
        itself, which must not be modified in place. The second output's gradient is added in the
        same pass.
    """
    return _LayerNorm.apply(x, residual, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        # Without this, an unused second output's gradient would be a tensor of zeros.
        ctx.set_materialize_grads(False)
        passed = x.view_as(x)
        x = x.contiguous()
        total = None
        if residual is not None:
            residual = residual.contiguous()
            assert residual.shape == x.shape
            total = passed = torch.empty_like(x)
        assert is_ready(x, residual, weight, bias)
        y = torch.empty_like(x)
        channels = x.shape[-1]
        num_rows = x.numel() // channels
        # Mean and reciprocal of the standard deviation of each row, in fp32.
        statistics = torch.empty(2, num_rows)
        kernel("clap_layer_norm")(
            x, residual, total, weight, bias, y, statistics, num_rows, channels, float(eps)
        )
        ctx.save_for_backward(x if total is None else total, weight, statistics)
        ctx.has_residual = residual is not None
        return y, passed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_passed: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, statistics = ctx.saved_tensors
        dx = torch.empty_like(x)
        d_weight = torch.empty_like(weight)
        d_bias = torch.empty_like(weight)
        dy = dy.contiguous()
        if d_passed is not None:
            d_passed = d_passed.contiguous()
        channels = x.shape[-1]
        kernel("clap_layer_norm_backward")(
            dy,
            d_passed,
            x,
            weight,
            statistics,
            dx,
            d_weight,
            d_bias,
            x.numel() // channels,
            channels,
        )
        # The residual's gradient is the same, as it is a term of the sum.
        return dx, dx if ctx.has_residual else None, d_weight, d_bias, None


def draw_seed() -> int:
    """Draw a seed for a mask from torch's generator."""
    # From torch's generator, so that `torch.manual_seed` determines masks.
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def native_dropout(x: Tensor, probability: float) -> Tensor:
    """Apply training's `F.dropout` to a multiple of 16 bf16 elements on the CPU; `probability` is
    below 1."""
    assert x.numel() % 16 == 0
    if probability == 0.0:
        return x
    return _Dropout.apply(x, draw_seed(), float(probability))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *mask: int | float) -> Tensor:
        # Seed and probability, from which the backward pass draws the same mask.
        ctx.mask = mask
        x = x.contiguous()
        assert is_ready(x)
        y = torch.empty_like(x)
        kernel("clap_dropout")(x, y, x.numel(), *mask)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Dropout is linear, so a gradient gets the same mask and scale.
        return _Dropout.apply(grads[0], *ctx.mask), None, None


def native_mel_power(spectrum_BTK: Tensor, filters_FK: Tensor) -> Tensor:
    """Multiply squared magnitudes of complex64 spectra (batch, frames, frequencies) by fp32 filters
    (mel bins, frequencies) on the CPU, without gradients: (batch, frames, mel bins) fp32."""
    spectrum_BTK = spectrum_BTK.contiguous()
    filters_FK = filters_FK.contiguous()
    B, T, K = spectrum_BTK.shape
    F = len(filters_FK)
    # A filter is zero except for frequencies from `start` to `end`.
    is_used_FK = (filters_FK != 0).int()
    start_F = is_used_FK.argmax(dim=1).int()
    end_F = (K - is_used_FK.flip(1).argmax(dim=1)).int()
    mel_BTF = filters_FK.new_empty(B, T, F)
    kernel("clap_mel_power")(spectrum_BTK, filters_FK, start_F, end_F, mel_BTF, B * T, K, F)
    return mel_BTF
