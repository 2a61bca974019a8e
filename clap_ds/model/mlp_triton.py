"""Compute an audio block's MLP (linear, GELU, linear) with one Triton kernel forward and one
backward, for CUDA.

With few channels and many tokens, the MLP is bound by the memory traffic of its hidden activations,
four times as wide as its input. The forward kernel holds a block of tokens and loops over chunks of
hidden units. It stores no hidden activation; only the input is saved for the backward pass. The
backward kernel recomputes the hidden units and computes the input's gradient. It writes GELU's
output and the gradient of its input once, in the tensors' dtype. PyTorch computes the weights'
gradients from these. Partial sums of the biases' gradients are added in a fixed order, so that
results are deterministic.

Products take the tensors' dtype and accumulate in fp32. GELU's output is rounded for the second
product, as in PyTorch. On an H200, 2.5 million tokens of 96 channels take 1.6 ms forward and 4.6 ms
backward; PyTorch's compiled operations take 3.0 and 4.8 ms (`results/h200`). Under
`TRITON_INTERPRET=1` the same code runs on CPU tensors, for tests. Shape letters: T tokens, C
channels, M hidden units.
"""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from clap_ds.model.gelu_triton import linear_gelu
from clap_ds.model.triton_common import Launch, dot, gelu_factors, must_widen

MAX_DIM = 128
"""Largest number of channels; with more, the backward kernel is slower than PyTorch's operations
(`results/h200`)."""
FORWARD_BLOCK = 128
BACKWARD_BLOCK = 64
CHUNK = 32


def supports(dim: int, hidden: int) -> bool:
    """Return whether the kernels support `dim` channels and `hidden` units."""
    rest = _parts(dim)[1]
    return (
        dim <= MAX_DIM
        and rest >= 16
        and rest == triton.next_power_of_2(rest)
        and hidden % CHUNK == 0
    )


FORWARD = Launch(8, 2, 128)
BACKWARD = Launch(4, 2, 168)
"""Maximize resident programs on sm_90a and sm_100 with almost no spills (`results/triton`)."""


def _parts(dim: int) -> tuple[int, int]:
    """Split channels into two powers of two, as Triton's blocks require: 96 = 64 + 32."""
    first = triton.next_power_of_2(-(-dim // 2))
    return first, dim - first


@triton.jit
def _load(ptr, rows, stride, start, inside, SIZE: tl.constexpr):
    """Load (rows, SIZE) from column `start`, 0 in rows that aren't inside."""
    columns = start + tl.arange(0, SIZE)
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _load_all(ptr, rows, stride, start, SIZE: tl.constexpr):
    return tl.load(ptr + rows[:, None] * stride + (start + tl.arange(0, SIZE))[None, :])


@triton.jit
def _forward_kernel(
    tokens_ptr,
    weight1_ptr,
    bias1_ptr,
    weight2_ptr,
    bias2_ptr,
    output_ptr,
    num_tokens,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Process one block of tokens per program."""
    DIM: tl.constexpr = FIRST + REST
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_tokens
    a = tl.arange(0, FIRST)
    b = FIRST + tl.arange(0, REST)
    tokens_a = _load(tokens_ptr, rows, DIM, 0, inside, FIRST)
    tokens_b = _load(tokens_ptr, rows, DIM, FIRST, inside, REST)
    output_a = tl.zeros((BLOCK, FIRST), dtype=tl.float32) + tl.load(bias2_ptr + a)[None, :].to(
        tl.float32
    )
    output_b = tl.zeros((BLOCK, REST), dtype=tl.float32) + tl.load(bias2_ptr + b)[None, :].to(
        tl.float32
    )
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        weight1_a = _load_all(weight1_ptr, units, DIM, 0, FIRST)
        weight1_b = _load_all(weight1_ptr, units, DIM, FIRST, REST)
        hidden = dot(tokens_a, tl.trans(weight1_a), WIDEN) + dot(
            tokens_b, tl.trans(weight1_b), WIDEN
        )
        hidden += tl.load(bias1_ptr + units)[None, :].to(tl.float32)
        active = (hidden * gelu_factors(hidden, WIDEN)[0]).to(tokens_a.dtype)
        output_a += dot(active, tl.trans(_load_all(weight2_ptr, a, HIDDEN, start, CHUNK)), WIDEN)
        output_b += dot(active, tl.trans(_load_all(weight2_ptr, b, HIDDEN, start, CHUNK)), WIDEN)
    place = output_ptr + rows[:, None] * DIM
    tl.store(place + a[None, :], output_a.to(tokens_a.dtype), mask=inside[:, None])
    tl.store(place + b[None, :], output_b.to(tokens_a.dtype), mask=inside[:, None])


@triton.jit
def _backward_kernel(
    tokens_ptr,
    weight1_ptr,
    bias1_ptr,
    weight2_ptr,
    d_output_ptr,
    d_tokens_ptr,
    active_ptr,
    d_hidden_ptr,
    d_biases_ptr,
    num_tokens,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Process one block of tokens per program. Each writes its partial bias gradients, (HIDDEN +
    DIM), separately."""
    DIM: tl.constexpr = FIRST + REST
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_tokens
    a = tl.arange(0, FIRST)
    b = FIRST + tl.arange(0, REST)
    share_ptr = d_biases_ptr + tl.program_id(0).to(tl.int64) * (HIDDEN + DIM)
    tokens_a = _load(tokens_ptr, rows, DIM, 0, inside, FIRST)
    tokens_b = _load(tokens_ptr, rows, DIM, FIRST, inside, REST)
    d_output_a = _load(d_output_ptr, rows, DIM, 0, inside, FIRST)
    d_output_b = _load(d_output_ptr, rows, DIM, FIRST, inside, REST)
    tl.store(share_ptr + HIDDEN + a, tl.sum(d_output_a.to(tl.float32), axis=0))
    tl.store(share_ptr + HIDDEN + b, tl.sum(d_output_b.to(tl.float32), axis=0))
    d_tokens_a = tl.zeros((BLOCK, FIRST), dtype=tl.float32)
    d_tokens_b = tl.zeros((BLOCK, REST), dtype=tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        weight1_a = _load_all(weight1_ptr, units, DIM, 0, FIRST)
        weight1_b = _load_all(weight1_ptr, units, DIM, FIRST, REST)
        hidden = dot(tokens_a, tl.trans(weight1_a), WIDEN) + dot(
            tokens_b, tl.trans(weight1_b), WIDEN
        )
        hidden += tl.load(bias1_ptr + units)[None, :].to(tl.float32)
        below, slope = gelu_factors(hidden, WIDEN)
        place = rows[:, None] * HIDDEN + units[None, :]
        tl.store(active_ptr + place, (hidden * below).to(tokens_a.dtype), mask=inside[:, None])
        d_active = dot(d_output_a, _load_all(weight2_ptr, a, HIDDEN, start, CHUNK), WIDEN)
        d_active += dot(d_output_b, _load_all(weight2_ptr, b, HIDDEN, start, CHUNK), WIDEN)
        d_hidden = d_active * slope
        tl.store(share_ptr + units, tl.sum(d_hidden, axis=0))
        d_hidden = d_hidden.to(tokens_a.dtype)
        tl.store(d_hidden_ptr + place, d_hidden, mask=inside[:, None])
        d_tokens_a += dot(d_hidden, weight1_a, WIDEN)
        d_tokens_b += dot(d_hidden, weight1_b, WIDEN)
    place = d_tokens_ptr + rows[:, None] * DIM
    tl.store(place + a[None, :], d_tokens_a.to(tokens_a.dtype), mask=inside[:, None])
    tl.store(place + b[None, :], d_tokens_b.to(tokens_a.dtype), mask=inside[:, None])


def _constants(tokens_TC: Tensor, weight1_MC: Tensor, block: int) -> dict[str, Any]:
    M, C = weight1_MC.shape
    assert supports(C, M)
    first, rest = _parts(C)
    sizes = {"FIRST": first, "REST": rest, "HIDDEN": M, "BLOCK": block, "CHUNK": CHUNK}
    return {**sizes, "WIDEN": must_widen(tokens_TC.device)}


@torch.library.custom_op("clap_ds::mlp", mutates_args=())
def _forward(
    tokens_TC: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, bias2_C: Tensor
) -> Tensor:
    tensors = [each.contiguous() for each in (tokens_TC, weight1_MC, bias1_M, weight2_CM, bias2_C)]
    output_TC = torch.empty_like(tensors[0])
    constants = _constants(tokens_TC, weight1_MC, FORWARD_BLOCK)
    grid = (triton.cdiv(len(tokens_TC), FORWARD_BLOCK),)
    _forward_kernel[grid](*tensors, output_TC, len(tokens_TC), **constants, **FORWARD.options())
    return output_TC


@_forward.register_fake
def _(tokens_TC: Tensor, *_: Any) -> Tensor:
    return tokens_TC.new_empty(tokens_TC.shape)


@torch.library.custom_op("clap_ds::mlp_backward", mutates_args=())
def _backward(
    tokens_TC: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, d_output_TC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the input's gradient, GELU's output and the gradient of its input, (T, M) each, and
    partial sums of the biases' gradients, (programs, M + C) in fp32."""
    tensors = [
        each.contiguous() for each in (tokens_TC, weight1_MC, bias1_M, weight2_CM, d_output_TC)
    ]
    results = _backward_results(tokens_TC, weight1_MC)
    constants = _constants(tokens_TC, weight1_MC, BACKWARD_BLOCK)
    _backward_kernel[(len(results[3]),)](
        *tensors, *results, len(tokens_TC), **constants, **BACKWARD.options()
    )
    return results


@_backward.register_fake
def _(tokens_TC: Tensor, weight1_MC: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward_results(tokens_TC, weight1_MC)


def _backward_results(
    tokens_TC: Tensor, weight1_MC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (T, C), M = tokens_TC.shape, len(weight1_MC)
    active_TM = tokens_TC.new_empty(T, M)
    d_hidden_TM = tokens_TC.new_empty(T, M)
    shares = tokens_TC.new_empty(-(-T // BACKWARD_BLOCK), M + C, dtype=torch.float32)
    return tokens_TC.new_empty(T, C), active_TM, d_hidden_TM, shares


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _bias2_C = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, d_output_TC: Tensor) -> tuple[Tensor | None, ...]:
    tokens_TC, weight1_MC, bias1_M, weight2_CM = saved = (
        ctx.saved_tensors
    )  # readable once with activation checkpointing
    d_tokens_TC, active_TM, d_hidden_TM, shares = _backward(*saved, d_output_TC)
    d_bias1_M, d_bias2_C = (
        shares.sum(dim=0).to(bias1_M.dtype).split([len(weight1_MC), len(weight2_CM)])
    )
    # As a product's second operand, Inductor stores `d_output_TC` once, for the kernel, too.
    d_weight1_MC = d_hidden_TM.T @ tokens_TC
    d_weight2_CM = (active_TM.T @ d_output_TC).T.contiguous()
    return d_tokens_TC, d_weight1_MC, d_bias1_M, d_weight2_CM, d_bias2_C


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.clap_ds.mlp)
def _forward_flops(tokens: Sequence[int], weight1: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * 2 * math.prod(tokens) * weight1[0]


@register_flop_formula(torch.ops.clap_ds.mlp_backward)
def _backward_flops(tokens: Sequence[int], weight1: Sequence[int], *_: Any, **__: Any) -> int:
    """Count the recomputed hidden units too, but not the weights' gradients, which are separate
    matmuls."""
    return 3 * 2 * math.prod(tokens) * weight1[0]


def triton_mlp(
    tokens: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, bias2_C: Tensor
) -> Tensor:
    """Compute `F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)` with the
    kernels, with autograd, as one operation for torch.compile. Casts under autocast like
    `F.linear`. If C and M don't pass `supports`, only the backward pass of GELU and the first bias
    has a kernel."""
    if not supports(weight1_MC.shape[1], weight1_MC.shape[0]):
        return F.linear(linear_gelu(tokens, weight1_MC, bias1_M), weight2_CM, bias2_C)
    device = tokens.device.type
    tensors = [tokens.flatten(0, -2), weight1_MC, bias1_M, weight2_CM, bias2_C]
    if torch.is_autocast_enabled(device):
        tensors = [each.to(torch.get_autocast_dtype(device)) for each in tensors]
    return _forward(*tensors).view(tokens.shape)
