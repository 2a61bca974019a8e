"""Dropout in compiled graphs on a GPU, where its masks are hashes: of elements, and of attention weights in a kernel.

Each layer is linear in its values, so that products with the masks of both passes can be compared without reading the masks.
On CPUs, with Triton's interpreter, the same check also detects wrong dropout.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.model import dropout
from clap_ds.model.text_attention import attend_in_one_kernel
from tests.processes import ROOT

INTERPRETABLE = "aot_eager_decomp_partition"
"""A backend that needs no compiler."""
P = 0.1
HEADS = 2
B, L, C = 4, 64, 64
SPREADS = 5.0
"""Standard deviations of the binomial distribution by which the share of zeros may differ."""
MASKS_DIFFER = 0.05
"""Relative difference of both passes' products. Roundings of 16-bit values make 0.01 at most, other masks about 0.4."""


def drop_elements(values_BLC: Tensor) -> Tensor:
    return dropout.hash_dropout(values_BLC, P)


def drop_attention_weights(values_BLC: Tensor) -> Tensor:
    """Return the mean of all tokens' values, of which each token's attention drops other ones."""
    even = torch.zeros_like(values_BLC)  # equal queries and keys: every weight is 1 / L
    bias_E = values_BLC.new_zeros(3 * C)
    return attend_in_one_kernel(torch.cat([even, even, values_BLC], dim=2), bias_E, None, None, HEADS, P)


NUM_DECISIONS = {drop_elements: B * L * C, drop_attention_weights: B * HEADS * L * L}
"""Random decisions of each layer."""


def call_two_layers(layer: Callable[[Tensor], Tensor], values_BLC: Tensor) -> tuple[Tensor, Tensor]:
    return layer(values_BLC), layer(values_BLC)


def find_wrong_properties(
    layer: Callable[[Tensor], Tensor], device: str = "cpu", backend: str = INTERPRETABLE
) -> list[str]:
    """Return what is wrong with a compiled layer's dropout."""
    torch._dynamo.reset()
    compiled = torch.compile(partial(call_two_layers, layer), backend=backend)
    ones = torch.ones(B, L, C, dtype=torch.bfloat16, device=device, requires_grad=True)  # as in training
    torch.manual_seed(0)
    first_layer, second_layer = compiled(ones)
    next_step, _ = compiled(ones)
    torch.manual_seed(0)
    repeated_step, _ = compiled(ones)
    torch.manual_seed(1)  # ranks have seeds that follow each other
    other_rank, _ = compiled(ones)

    share = 1 - float(first_layer.detach().double().mean()) * (1 - P)
    rounding = torch.finfo(torch.bfloat16).eps / 4  # of 1 / (1 - P)
    tolerance = SPREADS * math.sqrt(P * (1 - P) / NUM_DECISIONS[layer]) + rounding
    generator = torch.Generator().manual_seed(0)
    values, gradient = torch.randn(2, B, L, C, generator=generator).sign().bfloat16().to(device)
    output, _ = compiled(values.requires_grad_())
    (values_gradient,) = torch.autograd.grad(output, values, gradient)
    forward = (output.detach().double() * gradient).sum(dim=1)
    backward = (values_gradient.double() * values.detach()).sum(dim=1)

    is_wrong = {
        f"zeros: {share:.1f}": abs(share - P) > tolerance,
        "backward": float((forward - backward).norm() / forward.norm()) > MASKS_DIFFER,
        "a seed repeats its masks": not torch.equal(first_layer, repeated_step),
        "layers": torch.equal(first_layer, second_layer),
        "steps": torch.equal(first_layer, next_step),
        "ranks": torch.equal(first_layer, other_rank),
    }
    return [name for name, wrong in is_wrong.items() if wrong]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", NUM_DECISIONS, ids=lambda layer: layer.__name__)
def test_dropout_is_right_on_a_gpu(layer: Callable[[Tensor], Tensor]) -> None:
    assert find_wrong_properties(layer, "cuda", "inductor") == []


def test_hashed_dropout_is_right() -> None:
    assert find_wrong_properties(drop_elements) == []


def draw_constant_seed(*_: Any, device: torch.device, **__: Any) -> Tensor:
    return torch.full((), 7, dtype=torch.int32, device=device)


def test_a_constant_seed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", draw_constant_seed)
    assert find_wrong_properties(drop_elements) == ["layers", "steps", "ranks"]


def store_other_mask(values: Tensor, p: float) -> Tensor:
    """Scale by one mask forward and by another one backward."""
    seed = torch.randint(-(2**31), 2**31, (), dtype=torch.int32)
    forward = dropout._dropped(values.detach(), seed, p)
    backward = dropout._dropped(values, seed + 1, p)
    return backward + (forward - backward).detach()


def double_share(values: Tensor, p: float) -> Tensor:
    seed = torch.randint(-(2**31), 2**31, (), dtype=torch.int32)
    return dropout._dropped(values, seed, 2 * p) * (1 - 2 * p) / (1 - p)


@pytest.mark.parametrize(
    ("wrong_dropout", "wrong_property"), [(store_other_mask, "backward"), (double_share, "zeros: 0.2")]
)
def test_other_masks_backward_and_another_share_are_detected(
    monkeypatch: pytest.MonkeyPatch, wrong_dropout: Callable[[Tensor, float], Tensor], wrong_property: str
) -> None:
    monkeypatch.setattr(dropout, "hash_dropout", wrong_dropout)
    assert find_wrong_properties(drop_elements) == [wrong_property]


TRITON = """
import torch
from tests.model.test_compiled_dropout import draw_constant_seed, drop_attention_weights, find_wrong_properties
print("right:", find_wrong_properties(drop_attention_weights))
torch.randint = lambda low, high, shape, **options: draw_constant_seed(**options).expand(shape).contiguous()
print("constant:", find_wrong_properties(drop_attention_weights))
"""


@pytest.mark.end_to_end
def test_text_attention_kernels_dropout_is_right_and_its_constant_seed_is_detected() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", TRITON], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["right: []", "constant: ['layers', 'steps', 'ranks']"], (
        ended.stdout + ended.stderr
    )
