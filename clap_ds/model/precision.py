"""Keep selected tensors in fp32 when `Module.to` casts a model to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


def at_least_fp32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap an argument of `nn.Module._apply`: floating tensors change device but keep at least 32
    bits."""

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        return (
            tensor.to(converted.device)
            if converted.dtype in (torch.bfloat16, torch.float16)
            else converted
        )

    return apply


class Fp32BatchNorm(nn.BatchNorm1d):
    """The base of batch norms that keep parameters and statistics in fp32 when `Module.to` casts to
    16 bits. Subclasses compute in the statistics' dtype, even if the parameters' `.data` is
    cast."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(at_least_fp32(fn), recurse)
