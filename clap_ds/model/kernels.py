"""Choose the kernels of a model's blocks (`clap.model.attention_impl`, `mlp_impl` and
`text_attention_impl`)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch.utils._triton import has_triton_package

from clap_ds.config.schema import ModelSettings

MAX_CAPTION_TOKENS = 128
"""Most tokens per caption for Triton's text attention: a program holds all keys and values of a
caption and head."""


class Kernels(NamedTuple):
    """Kernels by part of a block: window `attention` (see `window_attention.py`), both towers'
    `mlp`, and `text_attention` (`torch` or `triton`)."""

    attention: str
    mlp: str
    text_attention: str


def torch_kernels(device: torch.device) -> Kernels:
    """Return the fastest kernels that need no compilation."""
    return Kernels("matmul" if device.type == "cpu" else "sdpa", "torch", "torch")


def kernels_for(settings: ModelSettings, device: torch.device) -> Kernels:
    """Return a model's kernels on a device; `auto` is Triton on CUDA if it is installed. Raises
    ValueError if Triton is required but can't run."""
    on_gpu = device.type == "cuda"
    installed = has_triton_package()
    automatic = (
        Kernels("triton", "triton", "triton") if on_gpu and installed else torch_kernels(device)
    )
    asked: dict[str, Any] = {part: getattr(settings, f"{part}_impl") for part in Kernels._fields}
    for part, kernel in asked.items():
        if kernel == "triton" and not (
            installed and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")
        ):
            raise ValueError(
                f"clap.model.{part}_impl: 'triton' needs a GPU and the triton package; use 'auto'"
            )
    return automatic._replace(
        **{part: kernel for part, kernel in asked.items() if kernel != "auto"}
    )


def supports_captions(dim: int, longest: int) -> bool:
    """Return whether Triton's text attention supports heads of `dim` channels and captions of up to
    `longest` tokens."""
    return longest <= MAX_CAPTION_TOKENS and dim in (16, 32, 64, 128)
