"""Define dropout whose mask takes few instructions in a compiled graph on a GPU.

torch.compile draws each element's random number by ten rounds of Philox, which takes longer than
moving the tensor: on an H200 0.20 ms for 36 million bf16 values, whose traffic needs 0.06 ms. Here
a mask is a hash of the element's index and of a random 32-bit seed per call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Shifts and multipliers of `triple32` (C. Wellons, hash-prospector)."""
LAST_SHIFT = 14
GOLDEN = 0x9E3779B9
"""An odd multiplier that makes a second seed of the first."""


class Dropout(nn.Dropout):
    """Dropout that is compiled for GPUs as `hash_dropout`, with torch's random numbers on CPUs and
    in eager mode."""

    def forward(self, input: Tensor) -> Tensor:
        is_compiled = input.is_cuda and torch.compiler.is_compiling()
        if is_compiled and self.training and self.p > 0:
            return hash_dropout(input, self.p)
        return super().forward(input)


def hash_dropout(values: Tensor, p: float) -> Tensor:
    """Set a fraction `p` of the values, which number less than 2³¹, to zero and scale the others
    by 1 / (1 - p)."""
    seed = torch.randint(-(2**31), 2**31, (), dtype=torch.int32, device=values.device)
    dropped: Tensor = _HashDropout.apply(values, seed, p)
    return dropped


class _HashDropout(torch.autograd.Function):
    """Dropout that stores its seed and computes the mask again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seed: Tensor, p: float) -> Tensor:
        # If both passes had equal operations, torch.compile would share and store their mask.
        ctx.save_for_backward(-seed)
        ctx.p = p
        return _drop(values, seed, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The function is linear, so a gradient gets the same mask and scale.
        return _drop(grads[0], -ctx.saved_tensors[0], ctx.p), None, None


def _drop(values: Tensor, seed: Tensor, p: float) -> Tensor:
    """Apply the mask of a seed: an element is kept if its hash, an int32, is at least p·2³² - 2³¹."""
    index = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    bits = index.view(values.shape) ^ seed
    for number, (shift, factor) in enumerate(ROUNDS):
        bits = _xor_shift(bits, shift) * _as_int32(factor)
        if number == 0:
            # Otherwise two seeds' masks would be permutations of each other.
            bits = bits ^ seed * _as_int32(GOLDEN)
    bits = _xor_shift(bits, LAST_SHIFT)
    return torch.where(bits >= round(p * 2**32) - 2**31, values / (1 - p), 0.0)


def _xor_shift(bits: Tensor, shift: int) -> Tensor:
    # int32's shift copies the sign; the mask clears these bits, as for unsigned numbers.
    return bits ^ (bits >> shift & (1 << 32 - shift) - 1)


def _as_int32(number: int) -> int:
    """Return the int32 with the bits of an unsigned number."""
    return number - 2**32 if number >= 2**31 else number
