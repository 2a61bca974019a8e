"""Dispatch CUDA's operations on fake CPU tensors, because fake CUDA tensors require a CUDA build of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.engine import tiled_logits
from clap_ds.model import text_attention

MASK_ALIGNMENT = 16
"""Elements to which PyTorch pads the last dimension of memory-efficient attention's bias."""
_layer_norm = F.layer_norm


@contextmanager
def like_cuda(*, compiled: bool = False) -> Iterator[None]:
    """Replace operations by CUDA's, for fake CPU tensors that say they are CUDA's; in `compiled` towers dropout has no mask."""
    dropout = mock.patch.object(F, "dropout", _maskless_dropout) if compiled else nullcontext()
    with mock.patch.object(Tensor, "is_cuda", True), cuda_functions(), dropout:
        yield


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Replace functions by those that CUDA tensors run."""
    operations: Any = {"scaled_dot_product_attention": efficient_attention, "dropout": _dropout}
    compiled: Any = {name: _one_kernel(getattr(tiled_logits, name).__wrapped__) for name in ("_row_sums", "_weights")}
    with (
        mock.patch.multiple(F, **operations, layer_norm=_autocast_layer_norm),
        mock.patch.object(text_attention, "_attend_padded", efficient_attention),
        mock.patch.multiple(tiled_logits, **compiled),
    ):
        yield


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with flash attention or, with a mask or in fp32, the memory-efficient kernel,
    converting the mask for it."""
    if mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout)[0]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % MASK_ALIGNMENT))[..., :length].to(query.dtype)
        mask = mask.expand(*query.shape[:-1], length)
    keep_sums = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (query, mask))
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, keep_sums, dropout)[0]


@cache
def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that runs as one compiled kernel as a single operation."""
    operation = torch.library.custom_op(f"compiled::{function.__name__.strip('_')}", function, mutates_args=())
    operation.register_fake(function)
    return operation


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _maskless_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return input / (1 - p) if training and p else input


def _autocast_layer_norm(input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (each if each is None else each.float() for each in (input, weight, bias))
    return _layer_norm(input, shape, weight, bias, eps)
