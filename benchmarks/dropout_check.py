"""Check dropout in compiled graphs on a GPU, where its masks are hashes: of elements, and of
attention weights in a kernel.

Each layer is linear in its values, so that products with the masks of both passes can be compared
without reading the masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from clap_ds.model.dropout import hash_dropout
from clap_ds.model.text_attention import attend_in_one_kernel

P = 0.1
HEADS = 2
SHAPE_BLC = (4, 64, 64)
# Standard deviations of the binomial distribution by which the share of zeros may differ.
SPREADS = 5.0
# Relative difference of both passes' products. Roundings of 16-bit values make 0.01 at most, other
# masks about 0.4.
MASKS_DIFFER = 0.05


def drop_elements(values_BLC: Tensor) -> Tensor:
    return hash_dropout(values_BLC, P)


def drop_attention_weights(values_BLC: Tensor) -> Tensor:
    """Return the mean of all tokens' values, of which each token's attention drops other ones."""
    even = torch.zeros_like(values_BLC)  # equal queries and keys: every weight is 1 / L
    bias_E = values_BLC.new_zeros(3 * values_BLC.shape[2])
    return attend_in_one_kernel(
        torch.cat([even, even, values_BLC], dim=2), bias_E, None, None, HEADS, P
    )


B, L, C = SHAPE_BLC
# Layers with the number of their random decisions.
LAYERS: Mapping[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "dropout": (drop_elements, B * L * C),
    "text attention's dropout": (drop_attention_weights, B * HEADS * L * L),
}


def check_dropout(device: torch.device, backend: Any = "inductor") -> Iterator[dict[str, Any]]:
    """Yield a row per property of each compiled layer, with `wrong`."""
    for name, (layer, decisions) in LAYERS.items():
        for property_name, is_wrong in _check_layer(layer, decisions, device, backend).items():
            yield {"name": f"{name}, {property_name}", "wrong": is_wrong}


def _check_layer(
    layer: Callable[[Tensor], Tensor], decisions: int, device: torch.device, backend: Any
) -> dict[str, bool]:
    """Return properties of a layer, and whether each is wrong."""

    def call_two_layers(values: Tensor) -> tuple[Tensor, Tensor]:
        return layer(values), layer(values)

    compiled = torch.compile(call_two_layers, backend=backend)
    # In training, inputs require gradients.
    ones = torch.ones(SHAPE_BLC, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.manual_seed(0)
    first_layer, second_layer = compiled(ones)
    next_step, _ = compiled(ones)
    torch.manual_seed(0)
    same_seed, _ = compiled(ones)
    # Ranks have seeds that follow each other.
    torch.manual_seed(1)
    other_rank, _ = compiled(ones)

    # Values that aren't dropped are 1 / (1 - P).
    zeros = 1 - float(first_layer.detach().double().mean()) * (1 - P)
    rounding = torch.finfo(torch.bfloat16).eps / 4
    tolerance = SPREADS * math.sqrt(P * (1 - P) / decisions) + rounding
    # With the same mask, <gradient, layer(values)> and <values, backward(gradient)> are equal.
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(2, *SHAPE_BLC, generator=generator).sign().bfloat16()
    values, gradient = random.to(device)
    output, _ = compiled(values.requires_grad_())
    (values_gradient,) = torch.autograd.grad(output, values, gradient)
    forward = (output.detach().double() * gradient).sum(dim=1)
    backward = (values_gradient.double() * values.detach()).sum(dim=1)
    mask_difference = float((forward - backward).norm() / forward.norm())
    return {
        f"zeros: {zeros:.4f} of {P}": abs(zeros - P) > tolerance,
        "both passes have one mask": mask_difference > MASKS_DIFFER,
        "a seed repeats its masks": not torch.equal(first_layer, same_seed),
        "layers have different masks": torch.equal(first_layer, second_layer),
        "steps have different masks": torch.equal(first_layer, next_step),
        "ranks have different masks": torch.equal(first_layer, other_rank),
    }
