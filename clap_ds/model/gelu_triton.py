"""Compute GELU after a linear layer, and the backward pass of both GELU and the layer's bias, with
one Triton kernel each, for CUDA.

The gradient of GELU's input and its sum over tokens, which is the bias's gradient, need the same
inputs. torch.compile makes two kernels that both read them. The backward kernel writes the gradient
and partial sums, which are added in a fixed order, so that results are deterministic. In 16 bits
the forward kernel takes half of the instructions of CUDA's erf, which limit PyTorch's. Under
`TRITON_INTERPRET=1` the same code runs on CPU tensors, for tests. Shape letters: C channels, M
hidden units.
"""

from __future__ import annotations

# Triton parses the kernels' annotations, so they can't be typed.
# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from clap_ds.model.triton_common import Launch, gelu_factors

BLOCK = 64
"""Tokens of a program."""
CHUNK = 128
"""Hidden units of a program."""
ELEMENTS = 1024
"""Elements of a program in the forward pass: 16 bytes per thread and load."""
FORWARD = Launch(4, 1)
BACKWARD = Launch(8, 1)


@triton.jit
def _forward_kernel(hidden_ptr, active_ptr, num_elements, ELEMENTS: tl.constexpr):
    """Process one block of elements per program."""
    # In 64 bits, as tensors may have more than 2³¹ elements.
    start = tl.program_id(0).to(tl.int64) * ELEMENTS
    offsets = start + tl.arange(0, ELEMENTS)
    mask = offsets < num_elements
    hidden = tl.load(hidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    active = hidden * gelu_factors(hidden)[0]
    tl.store(active_ptr + offsets, active.to(active_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("clap_ds::bias_gelu", mutates_args=())
def gelu_forward(hidden: Tensor) -> Tensor:
    """Return GELU."""
    hidden = hidden.contiguous()
    active = torch.empty_like(hidden)
    programs = triton.cdiv(hidden.numel(), ELEMENTS)
    _forward_kernel[(programs,)](
        hidden, active, hidden.numel(), ELEMENTS=ELEMENTS, **FORWARD.options()
    )
    return active


@gelu_forward.register_fake
def _(hidden: Tensor) -> Tensor:
    # Always contiguous.
    return hidden.new_empty(hidden.shape)


@triton.jit(do_not_specialize=["num_tokens"])  # packed captions have any number
def _backward_kernel(
    d_output_ptr,
    hidden_ptr,
    d_hidden_ptr,
    d_bias_ptr,
    num_tokens,
    num_units,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Process one tile per program. Each writes its partial bias gradient separately. Tiles of a
    token are adjacent."""
    tiles = tl.cdiv(num_units, CHUNK)
    # In 64 bits, as tensors may have more than 2³¹ elements.
    block = (tl.program_id(0) // tiles).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    units = tl.program_id(0) % tiles * CHUNK + tl.arange(0, CHUNK)
    offsets = rows[:, None] * num_units + units[None, :]
    mask = (rows < num_tokens)[:, None] & (units < num_units)[None, :]
    hidden = tl.load(hidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    d_output = tl.load(d_output_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    d_hidden = d_output * gelu_factors(hidden)[1]
    tl.store(d_hidden_ptr + offsets, d_hidden.to(d_hidden_ptr.dtype.element_ty), mask=mask)
    # Masked rows are zeros, so that they add nothing.
    d_bias = tl.sum(d_hidden, axis=0)
    tl.store(d_bias_ptr + block * num_units + units, d_bias, mask=units < num_units)


@torch.library.custom_op("clap_ds::bias_gelu_backward", mutates_args=())
def gelu_backward(d_output: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of GELU's input, and partial sums of it over tokens, (programs, M) in
    fp32."""
    hidden = hidden.contiguous()
    d_hidden, partial_sums = _allocate(d_output, hidden)
    M = hidden.shape[-1]
    programs = len(partial_sums) * triton.cdiv(M, CHUNK)
    _backward_kernel[(programs,)](
        d_output.contiguous(),
        hidden,
        d_hidden,
        partial_sums,
        hidden.numel() // M,
        M,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        **BACKWARD.options(),
    )
    return d_hidden, partial_sums


@gelu_backward.register_fake
def _allocate(d_output: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    M = hidden.shape[-1]
    num_blocks = -(-(hidden.numel() // M) // BLOCK)
    # Always contiguous.
    return hidden.new_empty(hidden.shape), hidden.new_empty(num_blocks, M, dtype=torch.float32)


class BiasGelu(torch.autograd.Function):
    """GELU of the output of a linear layer that used its bias detached. The bias only receives its
    gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias_M: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.bias_dtype = bias_M.dtype
        # The formula's error is far below the rounding of 16 bits, but not below that of fp32.
        return F.gelu(hidden) if hidden.dtype == torch.float32 else gelu_forward(hidden)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor]:
        (hidden,) = ctx.saved_tensors
        d_hidden, partial_sums = gelu_backward(d_output, hidden)
        return d_hidden, partial_sums.sum(dim=0).to(ctx.bias_dtype)


def linear_gelu(tokens: Tensor, weight_MC: Tensor, bias_M: Tensor) -> Tensor:
    """Compute `F.gelu(F.linear(tokens, weight, bias))` for any number of dimensions, with the
    kernel in the backward pass."""
    # Detached, because the kernel sums the bias's gradient.
    return BiasGelu.apply(F.linear(tokens, weight_MC, bias_M.detach()), bias_M)
