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

from clap_ds.model import gelu_linear_triton
from clap_ds.model.gelu_triton import linear_gelu
from clap_ds.model.triton_common import Launch, dot, gelu_factors

MAX_DIM = 128
"""Largest number of channels; with more, the backward kernel is slower than PyTorch's operations
(`results/h200`)."""
FORWARD_BLOCK = 128
BACKWARD_BLOCK = 64
CHUNK = 32
"""Hidden units of a loop iteration."""
FORWARD = Launch(8, 2, 128)
BACKWARD = Launch(4, 2, 168)
"""Maximize resident programs on sm_90a and sm_100 with almost no spills (`results/triton`)."""


def supports(dim: int, hidden: int) -> bool:
    """Return whether the kernels support `dim` channels and `hidden` units."""
    _, second = _split_channels(dim)
    # Products need dimensions of at least 16: 96 = 64 + 32 has them, 36 = 32 + 4 hasn't.
    is_block = second >= 16 and second == triton.next_power_of_2(second)
    return dim <= MAX_DIM and is_block and hidden % CHUNK == 0


def _split_channels(dim: int) -> tuple[int, int]:
    """Split channels into two powers of two, as Triton's blocks require: 96 = 64 + 32."""
    first = triton.next_power_of_2(-(-dim // 2))
    return first, dim - first


@triton.jit
def _load_rows(ptr, rows, stride, start, mask, SIZE: tl.constexpr):
    """Load (rows, SIZE) from column `start`, 0 in masked rows."""
    columns = start + tl.arange(0, SIZE)
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _load(ptr, rows, stride, start, SIZE: tl.constexpr):
    """Load (rows, SIZE) from column `start`."""
    columns = start + tl.arange(0, SIZE)
    return tl.load(ptr + rows[:, None] * stride + columns[None, :])


@triton.jit
def _hidden_units(
    tokens_a,
    tokens_b,
    weight1_ptr,
    bias1_ptr,
    units,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Return a chunk of GELU's input, (tokens, units) in fp32, and its two blocks of weights."""
    DIM: tl.constexpr = FIRST + SECOND
    weight1_a = _load(weight1_ptr, units, DIM, 0, FIRST)
    weight1_b = _load(weight1_ptr, units, DIM, FIRST, SECOND)
    hidden = dot(tokens_a, tl.trans(weight1_a)) + dot(tokens_b, tl.trans(weight1_b))
    hidden += tl.load(bias1_ptr + units)[None, :].to(tl.float32)
    return hidden, weight1_a, weight1_b


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
    SECOND: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Process one block of tokens per program."""
    DIM: tl.constexpr = FIRST + SECOND
    # In 64 bits, as tensors may have more than 2³¹ elements.
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_tokens
    # Channels are two blocks, a and b, of FIRST and SECOND.
    a = tl.arange(0, FIRST)
    b = FIRST + tl.arange(0, SECOND)
    tokens_a = _load_rows(tokens_ptr, rows, DIM, 0, mask, FIRST)
    tokens_b = _load_rows(tokens_ptr, rows, DIM, FIRST, mask, SECOND)
    bias2_a = tl.load(bias2_ptr + a)[None, :].to(tl.float32)
    bias2_b = tl.load(bias2_ptr + b)[None, :].to(tl.float32)
    # Accumulated in fp32 over all chunks of hidden units.
    output_a = tl.zeros((BLOCK, FIRST), dtype=tl.float32) + bias2_a
    output_b = tl.zeros((BLOCK, SECOND), dtype=tl.float32) + bias2_b
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        hidden, _, _ = _hidden_units(
            tokens_a, tokens_b, weight1_ptr, bias1_ptr, units, FIRST, SECOND
        )
        # GELU's output is rounded, as in PyTorch.
        active = (hidden * gelu_factors(hidden)[0]).to(tokens_a.dtype)
        weight2_a = _load(weight2_ptr, a, HIDDEN, start, CHUNK)
        output_a += dot(active, tl.trans(weight2_a))
        weight2_b = _load(weight2_ptr, b, HIDDEN, start, CHUNK)
        output_b += dot(active, tl.trans(weight2_b))
    # Rounded once, at the end.
    row_ptr = output_ptr + rows[:, None] * DIM
    tl.store(row_ptr + a[None, :], output_a.to(tokens_a.dtype), mask=mask[:, None])
    tl.store(row_ptr + b[None, :], output_b.to(tokens_a.dtype), mask=mask[:, None])


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
    SECOND: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Process one block of tokens per program. Each writes its partial bias gradients, (HIDDEN +
    DIM), separately."""
    DIM: tl.constexpr = FIRST + SECOND
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_tokens
    a = tl.arange(0, FIRST)
    b = FIRST + tl.arange(0, SECOND)
    tokens_a = _load_rows(tokens_ptr, rows, DIM, 0, mask, FIRST)
    tokens_b = _load_rows(tokens_ptr, rows, DIM, FIRST, mask, SECOND)
    d_output_a = _load_rows(d_output_ptr, rows, DIM, 0, mask, FIRST)
    d_output_b = _load_rows(d_output_ptr, rows, DIM, FIRST, mask, SECOND)
    # The second bias's gradient is the sum of the output's. Masked rows are zeros.
    sums_ptr = d_biases_ptr + tl.program_id(0).to(tl.int64) * (HIDDEN + DIM)
    tl.store(sums_ptr + HIDDEN + a, tl.sum(d_output_a.to(tl.float32), axis=0))
    tl.store(sums_ptr + HIDDEN + b, tl.sum(d_output_b.to(tl.float32), axis=0))
    d_tokens_a = tl.zeros((BLOCK, FIRST), dtype=tl.float32)
    d_tokens_b = tl.zeros((BLOCK, SECOND), dtype=tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        hidden, weight1_a, weight1_b = _hidden_units(
            tokens_a, tokens_b, weight1_ptr, bias1_ptr, units, FIRST, SECOND
        )
        cdf, slope = gelu_factors(hidden)
        offsets = rows[:, None] * HIDDEN + units[None, :]
        tl.store(active_ptr + offsets, (hidden * cdf).to(tokens_a.dtype), mask=mask[:, None])
        d_active = dot(d_output_a, _load(weight2_ptr, a, HIDDEN, start, CHUNK))
        d_active += dot(d_output_b, _load(weight2_ptr, b, HIDDEN, start, CHUNK))
        # GELU's derivative times the gradient of its output.
        d_hidden = d_active * slope
        tl.store(sums_ptr + units, tl.sum(d_hidden, axis=0))
        # What PyTorch multiplies for the first weight's gradient.
        d_hidden = d_hidden.to(tokens_a.dtype)
        tl.store(d_hidden_ptr + offsets, d_hidden, mask=mask[:, None])
        d_tokens_a += dot(d_hidden, weight1_a)
        d_tokens_b += dot(d_hidden, weight1_b)
    row_ptr = d_tokens_ptr + rows[:, None] * DIM
    tl.store(row_ptr + a[None, :], d_tokens_a.to(tokens_a.dtype), mask=mask[:, None])
    tl.store(row_ptr + b[None, :], d_tokens_b.to(tokens_a.dtype), mask=mask[:, None])


def _constants(weight1_MC: Tensor, block: int) -> dict[str, Any]:
    """Return a kernel's compile-time arguments."""
    M, C = weight1_MC.shape
    assert supports(C, M)
    first, second = _split_channels(C)
    return {
        "FIRST": first,
        "SECOND": second,
        "HIDDEN": M,
        "BLOCK": block,
        "CHUNK": CHUNK,
    }


@torch.library.custom_op("clap_ds::mlp", mutates_args=())
def _forward(
    tokens_TC: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, bias2_C: Tensor
) -> Tensor:
    inputs = (tokens_TC, weight1_MC, bias1_M, weight2_CM, bias2_C)
    output_TC = tokens_TC.new_empty(tokens_TC.shape)
    # One program per block of tokens.
    grid = (triton.cdiv(len(tokens_TC), FORWARD_BLOCK),)
    _forward_kernel[grid](
        *(tensor.contiguous() for tensor in inputs),
        output_TC,
        len(tokens_TC),
        **_constants(weight1_MC, FORWARD_BLOCK),
        **FORWARD.options(),
    )
    return output_TC


@_forward.register_fake
def _(tokens_TC: Tensor, *_: Any) -> Tensor:
    return tokens_TC.new_empty(tokens_TC.shape)


@torch.library.custom_op("clap_ds::mlp_backward", mutates_args=())
def _backward(
    tokens_TC: Tensor, weight1_MC: Tensor, bias1_M: Tensor, weight2_CM: Tensor, d_output_TC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the tokens, (T, C), GELU's output and the gradient of GELU's input,
    (T, M) each, and sums of the biases' gradients per block of tokens, (blocks, M + C) in fp32."""
    inputs = (tokens_TC, weight1_MC, bias1_M, weight2_CM, d_output_TC)
    outputs = _allocate(tokens_TC, weight1_MC)
    grid = (triton.cdiv(len(tokens_TC), BACKWARD_BLOCK),)
    _backward_kernel[grid](
        *(tensor.contiguous() for tensor in inputs),
        *outputs,
        len(tokens_TC),
        **_constants(weight1_MC, BACKWARD_BLOCK),
        **BACKWARD.options(),
    )
    return outputs


@_backward.register_fake
def _allocate(
    tokens_TC: Tensor, weight1_MC: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, C = tokens_TC.shape
    M = len(weight1_MC)
    active_TM = tokens_TC.new_empty(T, M)
    d_hidden_TM = tokens_TC.new_empty(T, M)
    num_programs = -(-T // BACKWARD_BLOCK)
    partial_sums = tokens_TC.new_empty(num_programs, M + C, dtype=torch.float32)
    return tokens_TC.new_empty(T, C), active_TM, d_hidden_TM, partial_sums


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Nothing depends on the second bias's values.
    *tensors, _bias2_C = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, d_output_TC: Tensor) -> tuple[Tensor | None, ...]:
    # Saved tensors can be read once with activation checkpointing.
    tokens_TC, weight1_MC, bias1_M, weight2_CM = ctx.saved_tensors
    d_tokens_TC, active_TM, d_hidden_TM, partial_sums = _backward(
        tokens_TC, weight1_MC, bias1_M, weight2_CM, d_output_TC
    )
    d_biases = partial_sums.sum(dim=0).to(bias1_M.dtype)
    d_bias1_M, d_bias2_C = d_biases.split([len(weight1_MC), len(weight2_CM)])
    # As a product's second operand, Inductor stores `d_output_TC` once, for the kernel, too.
    d_weight1_MC = d_hidden_TM.T @ tokens_TC
    d_weight2_CM = (active_TM.T @ d_output_TC).T.contiguous()
    return d_tokens_TC, d_weight1_MC, d_bias1_M, d_weight2_CM, d_bias2_C


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.clap_ds.mlp)
def _forward_flops(tokens: Sequence[int], weight1: Sequence[int], *_: Any, **__: Any) -> int:
    # Two products of tokens, channels and hidden units.
    return 2 * 2 * math.prod(tokens) * weight1[0]


@register_flop_formula(torch.ops.clap_ds.mlp_backward)
def _backward_flops(tokens: Sequence[int], weight1: Sequence[int], *_: Any, **__: Any) -> int:
    """Count the recomputed hidden units too, but not the weights' gradients, which are separate
    matmuls."""
    # The hidden units again, and the gradients of GELU's output and of the input.
    return 3 * 2 * math.prod(tokens) * weight1[0]


def triton_mlp(
    tokens: Tensor,
    weight1_MC: Tensor,
    bias1_M: Tensor,
    weight2_CM: Tensor,
    bias2_C: Tensor,
    kernel: str = "triton",
) -> Tensor:
    """Compute `F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)` with Triton
    kernels, with autograd. Casts under autocast like `F.linear`.

    Kernel `triton` fuses the MLP as one operation for torch.compile if C and M pass `supports`. For
    others in 16 bits it computes GELU in products (`gelu_linear_triton.py`). Otherwise, as with
    kernel `triton_gelu`, only GELU and the first bias's gradient have kernels.
    """
    device = tokens.device.type
    dtype = tokens.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    M, C = weight1_MC.shape
    is_fused = supports(C, M)
    if kernel == "triton" and (is_fused or gelu_linear_triton.supports(C, M, dtype)):
        tensors = (tokens.flatten(0, -2), weight1_MC, bias1_M, weight2_CM, bias2_C)
        # Wide MLPs are bound by arithmetic, where most of PyTorch's products are the fastest.
        compute = _forward if is_fused else gelu_linear_triton.WideMlp.apply
        return compute(*(tensor.to(dtype) for tensor in tensors)).view(tokens.shape)
    return F.linear(linear_gelu(tokens, weight1_MC, bias1_M), weight2_CM, bias2_C)
