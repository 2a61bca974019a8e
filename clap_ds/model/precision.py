"""Keeps chosen tensors in fp32 when a model is cast to 16 bits by `Module.to`. Casts by other means are the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


def at_least_fp32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`convert` (what `nn.Module._apply` is given) without its rounding: floating tensors move but keep 32 bits or more."""

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        return tensor.to(converted.device) if converted.dtype in (torch.bfloat16, torch.float16) else converted

    return apply


class Fp32BatchNorm(nn.BatchNorm1d):
    """Batch norm that is kept whole in fp32: casts of the model to 16 bits don't reach it, and it computes in fp32 even where
    something casts its parameters behind the module's back. The axes are its subclasses'."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(at_least_fp32(fn), recurse)
