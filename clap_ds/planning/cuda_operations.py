"""CUDA's operations on fake CPU tensors, because fake CUDA tensors require a CUDA build of
PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.engine import loss
from clap_ds.flop_count.counters import replaced_attributes
from clap_ds.model import text_attention

_torch_layer_norm = F.layer_norm


@contextmanager
def cuda_semantics(*, compiled: bool = False, has_flash: bool = True) -> Iterator[None]:
    """Replace operations by CUDA's, for fake CPU tensors that report to be CUDA's.

    In `compiled` towers dropout has no mask. Older GPUs have no flash attention.
    """
    # With a mask, the forward pass stores it for the backward pass.
    dropout: Any = {"native_dropout": _dropout_without_mask} if compiled else {}
    with (
        replaced_attributes(Tensor, is_cuda=True),
        replaced_attributes(torch, **dropout),
        cuda_functions(has_flash=has_flash),
    ):
        yield


@contextmanager
def cuda_functions(*, has_flash: bool = True) -> Iterator[None]:
    """Replace functions by those that CUDA tensors run."""
    attention = _attention if has_flash else _efficient_attention
    with (
        replaced_attributes(
            F, dropout=_dropout, layer_norm=_layer_norm, scaled_dot_product_attention=attention
        ),
        replaced_attributes(text_attention, _attend_padded=attention),
        replaced_attributes(loss, **_LOSS_KERNELS),
    ):
        yield


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with flash attention or, with a mask or in fp32, the
    memory-efficient kernel."""
    if mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout)[0]
    return _efficient_attention(query, key, value, mask, dropout)


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Run the memory-efficient kernel. PyTorch converts the mask for it, and pads its last
    dimension to a multiple of 16."""
    if mask is not None:
        # A mask of booleans becomes one that is added to the scores.
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=query.dtype)
            mask = bias.masked_fill_(mask.logical_not(), -torch.inf)
        length = mask.shape[-1]
        # The padding is only memory: its view has the original length.
        mask = F.pad(mask, (0, -length % 16))[..., :length].to(query.dtype)
        mask = mask.expand(*query.shape[:-1], length)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    # The backward pass needs the log-sum-exps.
    computes_sums = query.requires_grad
    return attend(query, key, value, mask, computes_sums, dropout)[0]


def _as_one_kernel(name: str) -> Any:
    """Wrap a function of the loss, which runs as one compiled kernel, as a single operation."""
    function = getattr(loss, name).__wrapped__
    operation = torch.library.custom_op(f"compiled::{name.strip('_')}", function, mutates_args=())
    operation.register_fake(function)
    return operation


# What the loss computes between its products, by name in `loss`.
_LOSS_KERNELS: Any = {name: _as_one_kernel(name) for name in ("_row_sums", "_weights")}


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p:
        return input
    return torch.native_dropout(input, p, training)[0]


def _dropout_without_mask(input: Tensor, p: float, _: bool) -> list[Tensor]:
    """Stand in for `torch.native_dropout` in a fused kernel, which draws the mask again."""
    return [input / (1 - p)]


def _layer_norm(
    input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    # On CUDA, autocast runs it in fp32.
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    return _torch_layer_norm(input, shape, weight, bias, eps)
