"""Make a model use this project's CPU kernels.

Modules become subclasses of themselves with the same parameters, names and hooks, but another
forward pass. It computes a whole block with the weights of the inner modules, which aren't called.
Results differ from torch's bf16 only by rounding, which is rarer: sums, GELU and residuals stay in
fp32 until they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clap_ds.cpu_kernels.elementwise import (
    fits_norm,
    native_dropout,
    native_layer_norm,
    native_mel_power,
)
from clap_ds.cpu_kernels.jit_build import executable, unavailable
from clap_ds.cpu_kernels.linear import fits_linears, native_linears, native_mlp
from clap_ds.cpu_kernels.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from clap_ds.cpu_kernels.window_attention import fits_windows, native_window_attention
from clap_ds.model.mel import LogMel
from clap_ds.model.packed import Layout
from clap_ds.model.patch_embed import PatchEmbed
from clap_ds.model.swin import DropPath, PatchMerging, SwinBlock
from clap_ds.model.text import TextLayer


def report(setting: Literal["auto", "off"]) -> str:
    """Return `native` and the implementation if bf16 models on this CPU use these kernels with this
    `clap.cpu_kernels`; else `torch` and the reason."""
    reason = 'clap.cpu_kernels is "off"' if setting == "off" else unavailable()
    return f"torch: {reason}" if reason else f"native ({executable()[0]})"


def convert(model: nn.Module) -> None:
    """Convert a model in place to CPU kernels as far as they exist. Do nothing if they can't
    run."""
    if unavailable():
        return
    native_by_plain = {native.__bases__[-1]: native for native in NATIVE}
    for module in model.modules():
        native = native_by_plain.get(type(module))
        if native is not None and native.fits(module):
            module.__class__ = native


@contextmanager
def reverted(model: nn.Module) -> Iterator[None]:
    """Run a converted model, or part of one, temporarily with torch's operations, as FLOP counters
    require."""
    converted = [(module, type(module)) for module in model.modules() if isinstance(module, NATIVE)]
    for module, native in converted:
        module.__class__ = native.__bases__[-1]
    try:
        yield
    finally:
        for module, native in converted:
            module.__class__ = native


class NativeModule(nn.Module):
    """Run a module with kernels (`run`) if its weights are bf16 on a CPU and torch.compile isn't
    tracing; else use its last base, the original class. `fits` returns whether there are kernels
    for its sizes and options."""

    run: Callable[..., Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = next(self.parameters())
        if weight.dtype == torch.bfloat16 and weight.is_cpu and not torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        return super().forward(*args, **kwargs)


class NativeLogMel(LogMel):
    """Apply the mel filters with a kernel, in fp32 for any model dtype."""

    def fits(self) -> bool:
        return True

    def mel_power(self, spectrum_BKT: Tensor) -> Tensor:
        known = (
            spectrum_BKT.dtype == torch.complex64
            and spectrum_BKT.is_cpu
            and not torch.compiler.is_compiling()
        )
        if known and not (spectrum_BKT.requires_grad and torch.is_grad_enabled()):
            return native_mel_power(spectrum_BKT.transpose(1, 2), self.mel_filters)
        return super().mel_power(spectrum_BKT)


class NativePatchEmbed(NativeModule, PatchEmbed):
    def fits(self) -> bool:
        return fits_norm(self.proj.out_channels)

    def run(self, image_B1HW: Tensor) -> Tensor:
        return _norm(self.project(image_B1HW), self.norm)[0]


class NativePatchMerging(NativeModule, PatchMerging):
    def fits(self) -> bool:
        return fits_norm(self.reduction.in_features) and fits_linears(self.reduction)

    def run(self, tokens_BHWC: Tensor) -> Tensor:
        return native_linears(
            _norm(self.squares(tokens_BHWC), self.norm)[0], self.reduction.weight, None
        )[0]


class NativeSwinBlock(NativeModule, SwinBlock):
    def fits(self) -> bool:
        """Return False also if attention or MLP are configured to use other kernels."""
        attention = self.attention
        channels = self.attention.proj.in_features
        num_heads = attention.relative_position_bias.shape[1]
        return (
            (attention.kernel, self.mlp.kernel) == ("matmul", "torch")
            and fits_norm(channels)
            and fits_linears(attention.proj, self.mlp.fc1)
            and fits_windows(attention.window, channels // num_heads)
        )

    def run(self, tokens_BHWC: Tensor, mask_GNN: Tensor | None) -> Tensor:
        attention = self.attention
        mlp = self.mlp
        normed, tokens_BHWC = _norm(tokens_BHWC, self.norm1)
        qkv_BHWE, _ = native_linears(normed, attention.qkv.weight, attention.qkv.bias)
        mixed = native_window_attention(qkv_BHWE, attention.position_bias(), self.shift)
        project = partial(native_linears, mixed, attention.proj.weight, attention.proj.bias)
        tokens_BHWC = _add_branch(self.drop_path, project, tokens_BHWC)
        normed, tokens_BHWC = _norm(tokens_BHWC, self.norm2)
        feed = partial(
            native_mlp, normed, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias
        )
        return _add_branch(self.drop_path, feed, tokens_BHWC)


class NativeTextLayer(NativeModule, TextLayer):
    def fits(self) -> bool:
        attention: Any = self.attention.self
        return (
            (attention.kernel, self.intermediate.kernel) == ("torch", "torch")
            and fits_norm(attention.query.in_features)
            and fits_linears(attention.query, self.intermediate.dense)
            and attention.query.in_features // self.num_heads in HEAD_DIMS
        )

    def run(
        self, hidden_BLC: Tensor, mask_B11L: Tensor | None = None, layout: Layout | None = None
    ) -> Tensor:
        first_only = self.first_only
        segments = _segments(hidden_BLC, mask_B11L, layout, first_only=first_only)
        attention: Any = self.attention.self
        query, *others = (
            (each.weight, each.bias) for each in (attention.query, attention.key, attention.value)
        )
        hidden_TC = hidden_BLC.flatten(0, 1)
        projected, hidden_TC = native_linears(
            hidden_TC, *([] if first_only else query), *others[0], *others[1]
        )
        tensors = [projected]
        if first_only:
            hidden_TC = hidden_TC.index_select(0, segments.key_start)
            tensors = [native_linears(hidden_TC, *query)[0], projected]
        heads = self.num_heads
        scale = (hidden_BLC.shape[-1] // self.num_heads) ** -0.5
        dropout = attention.dropout.p if attention.training else 0.0
        mixed = native_segment_attention(tensors, heads, segments, scale, dropout)
        output = self.attention.output
        first = self.intermediate.dense
        second = self.output.dense
        branch, _ = native_linears(mixed, output.dense.weight, output.dense.bias)
        hidden_TC = _add_and_norm(branch, hidden_TC, output)
        branch, hidden_TC = native_mlp(
            hidden_TC, first.weight, first.bias, second.weight, second.bias
        )
        return _add_and_norm(branch, hidden_TC, self.output).unflatten(0, (len(hidden_BLC), -1))


NATIVE: tuple[Any, ...] = (
    NativeLogMel,
    NativePatchEmbed,
    NativePatchMerging,
    NativeSwinBlock,
    NativeTextLayer,
)


def _segments(
    hidden_BLC: Tensor, mask_B11L: Tensor | None, layout: Layout | None, *, first_only: bool
) -> Segments:
    """Return the segments of right-padded captions, or of packed ones including padding."""
    if layout is not None:
        bounds, num_captions, _ = layout.packing
        count = num_captions if first_only else len(bounds) - 1
        return Segments.of_captions(bounds[:count], bounds.diff()[:count], first_only=first_only)
    batch, length, _ = hidden_BLC.shape
    start = torch.arange(0, batch * length, length, dtype=torch.int32)
    keys = None if mask_B11L is None else mask_B11L[:, 0, 0].sum(dim=1).int()
    return Segments.of_captions(start, torch.full_like(start, length), keys, first_only=first_only)


def _norm(x: Tensor, norm: Any, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return native_layer_norm(x, norm.weight, norm.bias, norm.eps, residual)


def _add_and_norm(branch: Tensor, residual: Tensor, output: Any) -> Tensor:
    if output.training:
        branch = native_dropout(branch, output.dropout.p)
    return _norm(branch, output.LayerNorm, residual)[0]


def _add_branch(
    drop_path: DropPath, branch: Callable[..., tuple[Tensor, Tensor]], tokens: Tensor
) -> Tensor:
    """Return `tokens` plus the branch, fused unless drop path applies."""
    if drop_path.training and drop_path.probability > 0.0:
        return tokens + drop_path(branch()[0])
    return branch(residual=tokens)[0]
