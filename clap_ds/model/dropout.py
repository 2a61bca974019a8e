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
GOLDEN = 0x9E3779B9
"""An odd multiplier that makes a second seed of the first."""


class Dropout(nn.Dropout):
    """Apply dropout, with torch's random numbers on CPUs and in eager mode."""

    def forward(self, input: Tensor) -> Tensor:
        is_compiled = input.is_cuda and torch.compiler.is_compiling()
        return (
            hash_dropout(input, self.p)
            if is_compiled and self.training and self.p > 0
            else super().forward(input)
        )


def hash_dropout(values: Tensor, p: float) -> Tensor:
    """Set a share `p` of the values, which number less than 2³¹, to zero and scale the others by 1
    / (1 - p)."""
    seed = torch.randint(-(2**31), 2**31, (), dtype=torch.int32, device=values.device)
    dropped: Tensor = _HashDropout.apply(values, seed, p)
    return dropped


class _HashDropout(torch.autograd.Function):
    """Computes the mask again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seed: Tensor, p: float) -> Tensor:
        # If both passes had equal operations, torch.compile would share and store their mask.
        ctx.save_for_backward(-seed)
        ctx.p = p
        return _dropped(values, seed, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grads[0], -ctx.saved_tensors[0], ctx.p), None, None


def _dropped(values: Tensor, seed: Tensor, p: float) -> Tensor:
    bits = (
        torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
        ^ seed
    )
    for number, (shift, factor) in enumerate(ROUNDS):
        bits = _shifted(bits, shift) * _signed(factor)
        bits = bits ^ seed * _signed(GOLDEN) if number == 0 else bits
    bits = _shifted(bits, 14)
    return torch.where(bits >= round(p * 2**32) - 2**31, values / (1 - p), 0.0)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    return bits ^ (bits >> shift & (1 << 32 - shift) - 1)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number
