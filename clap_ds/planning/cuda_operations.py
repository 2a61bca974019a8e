"""Dispatch CUDA's operations on fake CPU tensors, because fake CUDA tensors require a CUDA build of
PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.engine import loss
from clap_ds.model import text_attention

_torch_layer_norm = F.layer_norm


@contextmanager
def like_cuda(*, compiled: bool = False) -> Iterator[None]:
    """Replace operations by CUDA's, for fake CPU tensors that say they are CUDA's; in `compiled`
    towers dropout has no mask."""
    scaled: Any = {"native_dropout": lambda input, p, _: [input / (1 - p)]} if compiled else {}
    with (
        mock.patch.object(Tensor, "is_cuda", True),
        cuda_functions(),
        mock.patch.dict(vars(torch), scaled),
    ):
        yield


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Replace functions by those that CUDA tensors run."""
    with (
        mock.patch.multiple(
            F, dropout=_dropout, layer_norm=_layer_norm, scaled_dot_product_attention=_attention
        ),
        mock.patch.object(text_attention, "_attend_padded", _attention),
        mock.patch.multiple(loss, **_LOSS_KERNELS),
    ):
        yield


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with flash attention or, with a mask or in fp32, the
    memory-efficient kernel. PyTorch converts the mask for it, and pads its last dimension to a
    multiple of 16."""
    if mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout)[0]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
                mask.logical_not(), -torch.inf
            )
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % 16))[..., :length].to(query.dtype)
        mask = mask.expand(*query.shape[:-1], length)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, query.requires_grad, dropout)[
        0
    ]  # the backward pass needs its sums


def _one_kernel(name: str) -> Any:
    """Wrap a function of the loss, which runs as one compiled kernel, as a single operation."""
    function = getattr(loss, name).__wrapped__
    operation = torch.library.custom_op(f"compiled::{name.strip('_')}", function, mutates_args=())
    operation.register_fake(function)
    return operation


_LOSS_KERNELS: Any = {name: _one_kernel(name) for name in ("_row_sums", "_weights")}


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _layer_norm(
    input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (
            each if each is None else each.float() for each in (input, weight, bias)
        )
    return _torch_layer_norm(input, shape, weight, bias, eps)
