"""Keep selected tensors in fp32 when `Module.to` casts a model to 16 bits: batch norms and others.

Running statistics move by small steps, which 16 bits would round away. Shape letters: see
`htsat.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_fp32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap an argument of `nn.Module._apply`: floating tensors change device but keep at least 32
    bits."""

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        if converted.dtype in (torch.bfloat16, torch.float16):
            return tensor.to(converted.device)
        return converted

    return apply


class Fp32BatchNorm(nn.BatchNorm1d):
    """The base of batch norms that keep parameters and statistics in fp32 when `Module.to` casts to
    16 bits. Subclasses compute in the statistics' dtype, even if the parameters' `.data` is
    cast."""

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(at_least_fp32(fn), recurse)


class MelBatchNorm(Fp32BatchNorm):
    """Batch normalization over mel bins."""

    def forward(self, log_mel_BTF: Tensor) -> Tensor:
        """Normalize (B, T, F) dB to (B, F, T), in the dtype of the statistics."""
        dtype = self.running_mean.dtype
        if self.training:
            self.num_batches_tracked.add_(1)
        # Autocast would compute in bf16.
        with torch.autocast(log_mel_BTF.device.type, enabled=False):
            return F.batch_norm(
                log_mel_BTF.transpose(1, 2).to(dtype),
                self.running_mean,
                self.running_var,
                self.weight.to(dtype),
                self.bias.to(dtype),
                self.training,
                self.momentum,
                self.eps,
            )


class MaskedBatchNorm(Fp32BatchNorm):
    """`nn.BatchNorm2d` of selected rows, channels last. With one value per channel, for which torch
    raises an error, it keeps the running statistics."""

    def forward(self, x_BHWC: Tensor, counts_B: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize in the dtype of the statistics. In training these are from rows with a true
        `counts_B`, at least one."""
        dtype = self.running_mean.dtype
        with torch.autocast(x_BHWC.device.type, enabled=False):
            x_BHWC = x_BHWC.to(dtype)
            mean_C = self.running_mean
            variance_C = self.running_var
            if self.training:
                mean_C, variance_C = self._batch_statistics(x_BHWC, counts_B.to(dtype))
            scale_C = self.weight.to(dtype) * (variance_C + self.eps).rsqrt()
            # (x - mean) / √(variance + eps) · weight + bias, with the factors joined.
            return (x_BHWC - mean_C) * scale_C + self.bias.to(dtype)

    def _batch_statistics(self, x_BHWC: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each channel over the rows that count, and update the running
        ones."""
        # 1 for rows that count, 0 for others.
        weight_B111 = counts_B[:, None, None, None]
        num_values = weight_B111.sum() * (x_BHWC.shape[1] * x_BHWC.shape[2])
        mean_C = (x_BHWC * weight_B111).sum(dim=(0, 1, 2)) / num_values
        squares_BHWC = (x_BHWC - mean_C).square() * weight_B111
        variance_C = squares_BHWC.sum(dim=(0, 1, 2)) / num_values

        self.num_batches_tracked.add_(1)
        # A single value has no variance: then the running statistics stay.
        momentum = torch.where(num_values > 1, self.momentum, 0.0)
        # As in torch, the batch is normalized by the biased variance, and the unbiased one is
        # recorded.
        unbiased_C = variance_C.detach() * num_values / (num_values - 1).clamp(min=1)
        self.running_mean.lerp_(mean_C.detach(), momentum)
        self.running_var.lerp_(unbiased_C, momentum)
        return mean_C, variance_C
