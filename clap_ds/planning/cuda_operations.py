"""Dispatch CUDA's operations on fake CPU tensors, because fake CUDA tensors require a CUDA build of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
_layer_norm, _softmax = F.layer_norm, Tensor.softmax


@contextmanager
def like_cuda() -> Iterator[None]:
    """Replace operations by CUDA's, for fake CPU tensors that say they are CUDA's."""
    with mock.patch.object(Tensor, "is_cuda", True), cuda_functions():
        yield


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Replace functions by those that CUDA tensors run."""
    replaced = [
        (F, "scaled_dot_product_attention", efficient_attention),
        (F, "dropout", _dropout),
        (F, "layer_norm", _autocast_layer_norm),
        (Tensor, "softmax", _autocast_softmax),
        (text_attention, "_attend_padded", efficient_attention),
        (tiled_logits, "compiled_on_gpu", lambda function, *arguments: _one_kernel(function)(*arguments)),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Run `F.scaled_dot_product_attention` with flash attention or, with a mask or in fp32, the memory-efficient kernel,
    converting the mask for it."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        length = attn_mask.shape[-1]
        if short := -length % MASK_ALIGNMENT:
            attn_mask = F.pad(attn_mask, (0, short))[..., :length]
        attn_mask = attn_mask.expand(*query.shape[:-1], length)
    elif query.dtype != torch.float32:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(query, key, value, dropout_p, is_causal, scale=scale)[0]
    given = (each for each in (query, key, value, attn_mask) if each is not None)
    keep_sums = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, attn_mask, keep_sums, dropout_p, is_causal, scale=scale)[0]


@cache
def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function as a single operation."""
    operation = torch.library.custom_op(f"compiled::{function.__name__.strip('_')}", function, mutates_args=())
    operation.register_fake(function)
    return operation


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _autocast_layer_norm(
    input: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
        weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    return _layer_norm(input, shape, weight, bias, eps)


def _autocast_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = dtype or torch.float32
    if input.dtype == torch.float16 and dtype == torch.float32:  # one kernel for fp16, two for bf16
        return torch.ops.aten._softmax(input, dim, True)
    return _softmax(input, dim, dtype)
