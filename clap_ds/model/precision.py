"""Keeps chosen tensors in fp32 when a model is cast to 16 bits by `Module.to`. Casts by other means are the engine's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_least_fp32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`convert` (what `nn.Module._apply` is given) without its rounding: floating tensors move but keep 32 bits or more."""

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        return tensor.to(converted.device) if converted.dtype in (torch.bfloat16, torch.float16) else converted

    return apply
