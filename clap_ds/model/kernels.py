"""Choose the kernels of window attention and of MLPs (`clap.model.attention_impl`, `clap.model.mlp_impl`)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch.utils._triton import has_triton_package

from clap_ds.config.schema import ModelSettings


class Kernels(NamedTuple):
    """Kernels by part of a block: `attention` (see `window_attention.py`) and `mlp` (`torch` or `triton`), also of the text
    tower's layers."""

    attention: str
    mlp: str


def torch_kernels(device: torch.device) -> Kernels:
    """Return the fastest kernels that need no compilation."""
    return Kernels("matmul" if device.type == "cpu" else "sdpa", "torch")


def kernels_for(settings: ModelSettings, device: torch.device) -> Kernels:
    """Return a model's kernels on a device; `auto` is Triton on CUDA if it is installed. Raises ValueError if Triton is
    required but can't run."""
    on_gpu, installed = device.type == "cuda", has_triton_package()
    automatic = Kernels("triton", "triton") if on_gpu and installed else torch_kernels(device)
    asked: dict[str, Any] = {part: getattr(settings, f"{part}_impl") for part in Kernels._fields}
    for part, kernel in asked.items():
        if kernel == "triton" and not (installed and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")):
            raise ValueError(f"clap.model.{part}_impl: 'triton' needs a GPU and the triton package; use 'auto'")
    return automatic._replace(**{part: kernel for part, kernel in asked.items() if kernel != "auto"})
