"""Make a model use this project's CPU kernels.

Modules become subclasses of themselves with the same parameters, names and hooks, but another
forward pass. It computes a whole block with the weights of the inner modules, which aren't called.
Results differ from torch's bf16 only by rounding, which is rarer: sums, GELU and residuals stay in
fp32 until they are stored. Shape letters: see `clap_ds.model.htsat` and `clap_ds.model.text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clap_ds.cpu_kernels.elementwise import (
    native_dropout,
    native_layer_norm,
    native_mel_power,
    supports_norm,
)
from clap_ds.cpu_kernels.jit_build import supported_implementations, unavailable
from clap_ds.cpu_kernels.linear import native_linears, native_mlp, supports_linears
from clap_ds.cpu_kernels.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from clap_ds.cpu_kernels.window_attention import native_window_attention, supports_windows
from clap_ds.model.mel import LogMel
from clap_ds.model.packed import PackedLayout
from clap_ds.model.patch_embed import PatchEmbed
from clap_ds.model.swin import DropPath, PatchMerging, SwinBlock
from clap_ds.model.text import BranchOutput, SelfAttention, TextLayer


def report(setting: Literal["auto", "off"]) -> str:
    """Return `native` and the implementation if bf16 models on this CPU use these kernels with this
    `clap.cpu_kernels`; else `torch` and the reason."""
    reason = 'clap.cpu_kernels is "off"' if setting == "off" else unavailable()
    return f"torch: {reason}" if reason else f"native ({supported_implementations()[0]})"


def patch_model(model: nn.Module) -> None:
    """Convert a model in place to CPU kernels as far as they exist. Do nothing if they can't
    run."""
    if unavailable():
        return
    # The original class is the last base of its native subclass.
    native_by_plain = {native.__bases__[-1]: native for native in NATIVE}
    for module in model.modules():
        native = native_by_plain.get(type(module))
        if native is not None and native.is_supported(module):
            # The object stays, with its parameters, hooks and place in the model.
            module.__class__ = native


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Run a patched model, or part of one, temporarily with torch's operations, as FLOP counters
    require."""
    patched = [(module, type(module)) for module in model.modules() if isinstance(module, NATIVE)]
    for module, native in patched:
        module.__class__ = native.__bases__[-1]
    try:
        yield
    finally:
        for module, native in patched:
            module.__class__ = native


class NativeModule(nn.Module):
    """A module that runs with kernels (`run`) if its weights are bf16 on a CPU and torch.compile
    isn't tracing; else as its last base, the original class. `is_supported` returns whether there
    are kernels for its sizes and options."""

    run: Callable[..., Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Conditions can change during a module's life: casts, compilation, moves.
        weight = next(self.parameters())
        if weight.dtype == torch.bfloat16 and weight.is_cpu and not torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        return super().forward(*args, **kwargs)


class NativeLogMel(LogMel):
    """A front end that applies the mel filters with a kernel, in fp32 for any model dtype."""

    def is_supported(self) -> bool:
        return True

    def mel_power(self, spectrum_BKT: Tensor) -> Tensor:
        # The kernel has no backward pass, and isn't for models in fp64.
        needs_gradient = spectrum_BKT.requires_grad and torch.is_grad_enabled()
        is_eager = spectrum_BKT.is_cpu and not torch.compiler.is_compiling()
        if is_eager and spectrum_BKT.dtype == torch.complex64 and not needs_gradient:
            return native_mel_power(spectrum_BKT.transpose(1, 2), self.mel_filters)
        return super().mel_power(spectrum_BKT)


class NativePatchEmbed(NativeModule, PatchEmbed):
    """An embedding with a native norm; its convolution is one product of torch's."""

    def is_supported(self) -> bool:
        return supports_norm(self.proj.out_channels)

    def run(self, image_B1HW: Tensor) -> Tensor:
        # Without a residual, the second output is the input.
        return _norm(self.project(image_B1HW), self.norm)[0]


class NativePatchMerging(NativeModule, PatchMerging):
    """A native norm and linear layer."""

    def is_supported(self) -> bool:
        return supports_norm(self.reduction.in_features) and supports_linears(self.reduction)

    def run(self, tokens_BHWC: Tensor) -> Tensor:
        normed, _ = _norm(self.gather_2x2(tokens_BHWC), self.norm)
        return native_linears(normed, self.reduction.weight, None)[0]


class NativeSwinBlock(NativeModule, SwinBlock):
    """An audio block with fused residuals. Layer norms return their input, too, so that its other
    gradient is added in the same pass."""

    def is_supported(self) -> bool:
        """Return False also if attention or MLP are configured to use other kernels."""
        attention = self.attention
        channels = attention.proj.in_features
        num_heads = attention.relative_position_bias.shape[1]
        return (
            attention.kernel == "matmul"
            and self.mlp.kernel == "torch"
            and supports_norm(channels)
            and supports_linears(attention.proj, self.mlp.fc1)
            and supports_windows(attention.window, channels // num_heads)
        )

    def run(self, tokens_BHWC: Tensor, mask_GNN: Tensor | None) -> Tensor:
        """Compute the block. The kernel computes the mask itself."""
        attention = self.attention
        # norm1 → qkv → attention → projection + residual
        normed, tokens_BHWC = _norm(tokens_BHWC, self.norm1)
        qkv_BHWE, _ = native_linears(normed, *_parameters(attention.qkv))
        mixed = native_window_attention(qkv_BHWE, attention.position_bias(), self.shift)
        project = partial(native_linears, mixed, *_parameters(attention.proj))
        tokens_BHWC = _add_branch(self.drop_path, project, tokens_BHWC)

        # norm2 → MLP + residual
        normed, tokens_BHWC = _norm(tokens_BHWC, self.norm2)
        parameters = (*_parameters(self.mlp.fc1), *_parameters(self.mlp.fc2))
        mlp = partial(native_mlp, normed, *parameters)
        return _add_branch(self.drop_path, mlp, tokens_BHWC)


class NativeTextLayer(NativeModule, TextLayer):
    """A text layer on rows of all captions, (T, C), padded ones included."""

    def is_supported(self) -> bool:
        """Return False also if attention or MLP are configured to use other kernels."""
        attention: SelfAttention = self.attention.self
        width = attention.query.in_features
        return (
            attention.kernel == "torch"
            and self.kernel == "torch"
            and supports_norm(width)
            and supports_linears(attention.query, self.intermediate.dense)
            and attention.head_dim in HEAD_DIMS
        )

    def run(
        self,
        hidden_BLC: Tensor,
        mask_B11L: Tensor | None = None,
        layout: PackedLayout | None = None,
    ) -> Tensor:
        segments = _segments(hidden_BLC, mask_B11L, layout, first_only=self.first_only)
        mixed_TC, hidden_TC = self._attend(hidden_BLC.flatten(0, 1), segments)
        output: BranchOutput = self.attention.output
        # projection → dropout → + residual → norm
        branch_TC, _ = native_linears(mixed_TC, *_parameters(output.dense))
        hidden_TC = _add_and_norm(branch_TC, hidden_TC, output)

        # MLP → dropout → + residual → norm
        parameters = (*_parameters(self.intermediate.dense), *_parameters(self.output.dense))
        branch_TC, hidden_TC = native_mlp(hidden_TC, *parameters)
        hidden_TC = _add_and_norm(branch_TC, hidden_TC, self.output)
        return hidden_TC.unflatten(0, (len(hidden_BLC), -1))

    def _attend(self, hidden_TC: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return attention and the residual, of all rows or, with `first_only`, of each caption's
        first token, (B, C)."""
        attention: SelfAttention = self.attention.self
        query = _parameters(attention.query)
        key_value = (*_parameters(attention.key), *_parameters(attention.value))
        # Keys and values of all tokens, but queries of first ones only.
        if self.first_only:
            kv_TE, hidden_TC = native_linears(hidden_TC, *key_value)
            hidden_TC = hidden_TC.index_select(0, segments.key_start)
            q_BC, _ = native_linears(hidden_TC, *query)
            tensors = [q_BC, kv_TE]
        else:
            qkv_TE, hidden_TC = native_linears(hidden_TC, *query, *key_value)
            tensors = [qkv_TE]
        scale = attention.head_dim**-0.5
        dropout = attention.dropout.p if attention.training else 0.0
        mixed = native_segment_attention(tensors, attention.num_heads, segments, scale, dropout)
        return mixed, hidden_TC


NATIVE: tuple[Any, ...] = (
    NativeLogMel,
    NativePatchEmbed,
    NativePatchMerging,
    NativeSwinBlock,
    NativeTextLayer,
)


def _segments(
    hidden_BLC: Tensor, mask_B11L: Tensor | None, layout: PackedLayout | None, *, first_only: bool
) -> Segments:
    """Return the segments of attention: right-padded captions, or packed ones. `first_only`: of
    which only first tokens are queries, as they are pooled."""
    if layout is not None:
        cu_seqlens, num_captions, _longest = layout.packing
        # Captions that only fill the row aren't pooled, but other layers compute them.
        count = num_captions if first_only else len(cu_seqlens) - 1
        lengths = cu_seqlens.diff()[:count]
        return Segments.of_captions(cu_seqlens[:count], lengths, first_only=first_only)
    batch, length, _ = hidden_BLC.shape
    # Padded captions are segments of equal length, of which real tokens are keys.
    start = torch.arange(0, batch * length, length, dtype=torch.int32)
    lengths = torch.full_like(start, length)
    num_keys = None if mask_B11L is None else mask_B11L[:, 0, 0].sum(dim=1).int()
    return Segments.of_captions(start, lengths, num_keys, first_only=first_only)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    return linear.weight, linear.bias


def _norm(x: Tensor, norm: nn.LayerNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return native_layer_norm(x, norm.weight, norm.bias, norm.eps, residual)


def _add_and_norm(branch: Tensor, residual: Tensor, output: BranchOutput) -> Tensor:
    # The kernel adds the residual and normalizes in one pass.
    if output.training:
        branch = native_dropout(branch, output.dropout.p)
    return _norm(branch, output.LayerNorm, residual)[0]


def _add_branch(
    drop_path: DropPath, branch: Callable[..., tuple[Tensor, Tensor]], tokens: Tensor
) -> Tensor:
    """Return `tokens` plus the branch, fused unless drop path applies."""
    # Drop path scales the branch alone, so that it must be apart.
    if drop_path.training and drop_path.probability > 0.0:
        return tokens + drop_path(branch()[0])
    return branch(residual=tokens)[0]
