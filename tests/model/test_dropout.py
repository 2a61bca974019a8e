"""Dropout by hashed masks: the right share and scale, independent elements and calls, one mask
forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.model.dropout import Dropout, hash_dropout

ROWS = 2048
COLUMNS = 768


def dropped(p: float = 0.1) -> Tensor:
    return (hash_dropout(torch.ones(ROWS, COLUMNS), p) == 0).double().flatten()


def test_elements_and_calls_are_independent() -> None:
    torch.manual_seed(0)
    first = dropped() - 0.1
    second = dropped() - 0.1
    pairs = [
        (first, second),
        *((first[lag:], first[:-lag]) for lag in (1, 2, 8, COLUMNS, 10 * COLUMNS)),
    ]
    for one, other in pairs:
        assert abs(float((one * other).sum())) < 5 * 0.09 * len(one) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_scale_seed_and_gradient(p: float) -> None:
    values = torch.randn(ROWS, COLUMNS, requires_grad=True)
    torch.manual_seed(3)
    found = hash_dropout(values, p)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert torch.allclose(found, values * gradient)
    assert torch.allclose(gradient.unique(), torch.tensor([0, 1 / (1 - p)]))
    assert (
        abs(float((gradient == 0).double().mean()) - p) < 5 * (p * (1 - p) / values.numel()) ** 0.5
    )
    torch.manual_seed(3)
    assert torch.equal(found, hash_dropout(values, p))


def test_eager_mode_has_torchs_random_numbers() -> None:
    values = torch.randn(64, 64)
    found = []
    for module in (Dropout(0.3), torch.nn.Dropout(0.3)):
        torch.manual_seed(1)
        found.append(module(values))
    assert torch.equal(*found)
    assert torch.equal(Dropout(0.3).eval()(values), values)


def test_compiled_layers_store_no_mask() -> None:
    """Check two layers, between which torch.compile would store a mask that both passes compute by
    equal operations."""
    weights = [torch.randn(COLUMNS, COLUMNS, requires_grad=True) for _ in range(2)]
    kept: list[torch.dtype] = []

    def layers(values: Tensor) -> Tensor:
        for weight in weights:
            values = F.layer_norm(hash_dropout(F.linear(values, weight), 0.3) + values, (COLUMNS,))
        return values

    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each.dtype) or each, lambda each: each
    ):
        torch.compile(layers, backend="aot_eager_decomp_partition")(torch.randn(8, COLUMNS))
    assert kept.count(torch.int32) == 2, "seeds"
    assert torch.bool not in kept


def test_compiled_gradients_have_the_mask() -> None:
    values = torch.randn(ROWS, COLUMNS, requires_grad=True)
    found = torch.compile(hash_dropout, backend="aot_eager_decomp_partition")(values, 0.3)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert torch.allclose(found, values * gradient)
    assert 0.29 < float((gradient == 0).double().mean()) < 0.31
