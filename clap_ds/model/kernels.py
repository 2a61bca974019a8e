"""Choose the kernels of a model's blocks: the only place that decides which ones run.

- `select_kernels` reads `clap.model.attention_impl`, `mlp_impl` and `text_attention_impl` before
  the model is built. Each block stores its choice as `kernel`.
- On CUDA, the engine tries the Triton kernels at each site of `kernel_sites`, and replaces those
  that fail by their `substitute` (`clap_ds.engine.kernel_fallback`).
- On CPUs, `clap_ds.cpu_kernels.patch_model` replaces whole blocks that have `torch_kernels`.
- FLOP counters only see torch's kernels: `without_triton` replaces Triton's for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from clap_ds.config.schema import ModelSettings

MAX_CAPTION_TOKENS = 128
"""Most tokens per caption for Triton's text attention: a program holds all keys and values of a
caption and head."""
HEAD_DIMS = (16, 32, 64, 128)
"""Channels per head that Triton's text attention supports."""
LEAST_CAPABILITY = (8, 0)
"""First CUDA compute capability on which `auto` takes Triton's text attention and products of
MLPs, and with PyTorch's flash attention."""


class Kernels(NamedTuple):
    """Kernels by part of a block: window `attention` (see `window_attention.py`), both towers'
    `mlp` (`torch`, `triton_gelu` or `triton`, see `mlp_triton.py`), and `text_attention` (`torch`
    or `triton`)."""

    attention: str
    mlp: str
    text_attention: str


def torch_kernels(device: torch.device) -> Kernels:
    """Return the fastest kernels that need no compilation."""
    return Kernels("matmul" if device.type == "cpu" else "sdpa", "torch", "torch")


def select_kernels(settings: ModelSettings, device: torch.device) -> Kernels:
    """Return a model's kernels on a device; `auto` is Triton on CUDA if it is installed. Raises
    ValueError if Triton is required but can't run."""
    on_gpu = device.type == "cuda"
    # Triton's interpreter runs the same kernels on CPU tensors, for tests.
    can_run = has_triton_package() and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")
    # `auto` means Triton where it can run, else torch's.
    kernels = torch_kernels(device)
    if on_gpu and can_run:
        kernels = Kernels("triton", "triton", "triton")
    for part in Kernels._fields:
        setting = getattr(settings, f"{part}_impl")
        if setting.startswith("triton") and not can_run:
            raise ValueError(
                f"clap.model.{part}_impl: {setting!r} needs a GPU and the triton package; use 'auto'"
            )
        if setting != "auto":
            kernels = kernels._replace(**{part: setting})
    return kernels


def substitute(part: str, kernel: str, device: torch.device) -> str:
    """Return the kernel that replaces one of Triton's that doesn't run."""
    if part == "mlp" and kernel == "triton":
        # It needs neither tensor cores nor shared memory.
        return "triton_gelu"
    return str(getattr(torch_kernels(device), part))


def supports_captions(head_dim: int, longest: int) -> bool:
    """Return whether Triton's text attention supports heads of `head_dim` channels and captions of
    up to `longest` tokens."""
    return longest <= MAX_CAPTION_TOKENS and head_dim in HEAD_DIMS


def text_attention_problem(
    head_dim: int, longest: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Return why `auto` takes torch's text attention rather than Triton's, or None.

    Arguments are those of `supports_captions`, the dtype of queries, keys and values, and the GPU's
    CUDA compute capability (None: Triton's interpreter).
    """
    if not supports_captions(head_dim, longest):
        return f"it doesn't support {longest} tokens per caption with {head_dim} channels per head"
    # In fp32 a program's keys and values don't fit in registers.
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs 16-bit tensors, found {str(dtype).removeprefix('torch.')}"
    return product_problem(capability)


def product_problem(capability: tuple[int, int] | None) -> str | None:
    """Return why `auto` doesn't take Triton kernels with products on a GPU of this CUDA compute
    capability (None: Triton's interpreter), or None."""
    # Older GPUs have less shared memory than kernels take, or no tensor cores for them.
    if capability is not None and capability < LEAST_CAPABILITY:
        return "it needs a GPU of compute capability 8.0 or more"
    return None


class KernelSite(NamedTuple):
    """Modules of one size that use the same kernel."""

    part: str
    """Field of `Kernels`."""
    name: str
    modules: list[Any]
    function: Callable[[Tensor], Tensor]
    """A module's forward pass of one input."""
    tokens: Tensor
    """Such an input, zeros."""


def kernel_sites(model: Any) -> list[KernelSite]:
    """Return all sites of a `ClapModel`."""
    sites = []
    for number, stage in enumerate(model.audio.stages):
        blocks = list(stage.blocks)
        # The last block of a stage is shifted if any is, so it needs the most of a kernel.
        last = blocks[-1]
        width = last.mlp.fc1.in_features
        tokens = last.mlp.fc1.weight.new_zeros(1, stage.grid, stage.grid, width)
        attention = partial(last.attention, mask_GNN=stage.mask, shift=last.shift)
        name = f"stage {number}"
        attentions = [block.attention for block in blocks]
        sites.append(KernelSite("attention", name, attentions, attention, tokens))
        sites.append(KernelSite("mlp", name, [block.mlp for block in blocks], last.mlp, tokens))
    layers = model.text.blocks()
    attentions = [layer.attention.self for layer in layers]
    # The longest caption that the kernel supports needs the most of it.
    weight = layers[-1].intermediate.dense.weight
    tokens = weight.new_zeros(1, MAX_CAPTION_TOKENS, weight.shape[1])
    sites.append(KernelSite("mlp", "text layers", layers, layers[-1].mlp, tokens))
    sites.append(KernelSite("text_attention", "text layers", attentions, attentions[-1], tokens))
    return sites


@contextmanager
def without_triton(model: Any, device: torch.device) -> Iterator[None]:
    """Run a `ClapModel` temporarily with torch's kernels in place of Triton's."""
    replaced = []
    for site in kernel_sites(model):
        for module in site.modules:
            if module.kernel.startswith("triton"):
                replaced.append((module, module.kernel))
                module.kernel = getattr(torch_kernels(device), site.part)
    try:
        # Modules are changed, as FLOP counters run the model itself.
        yield
    finally:
        for module, kernel in replaced:
            module.kernel = kernel
