"""Dropout by hashed masks: the right share and scale, independent elements and calls, one mask forward and backward."""

import pytest
import torch
from torch import Tensor

from clap_ds.model.dropout import Dropout, hash_dropout

ROWS, COLUMNS = 2048, 768


def dropped(p: float = 0.1) -> Tensor:
    return (hash_dropout(torch.ones(ROWS, COLUMNS), p) == 0).double().flatten()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    torch.manual_seed(0)
    values = hash_dropout(torch.ones(ROWS, COLUMNS), p)
    kept = values[values != 0]
    assert torch.allclose(kept, torch.tensor(1 / (1 - p)))
    assert abs(1 - len(kept) / values.numel() - p) < 5 * (p * (1 - p) / values.numel()) ** 0.5


def test_elements_and_calls_are_independent() -> None:
    torch.manual_seed(0)
    first, second = dropped() - 0.1, dropped() - 0.1
    pairs = [(first, second), *((first[lag:], first[:-lag]) for lag in (1, 2, 8, COLUMNS, 10 * COLUMNS))]
    for one, other in pairs:
        assert abs(float((one * other).sum())) < 5 * 0.09 * len(one) ** 0.5


def test_the_seed_decides_and_the_gradient_has_the_same_mask() -> None:
    values = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(3)
    found = hash_dropout(values, 0.25)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert torch.allclose(found, values * gradient)
    torch.manual_seed(3)
    assert torch.equal(found, hash_dropout(values, 0.25))


def test_eager_mode_has_torchs_random_numbers() -> None:
    values = torch.randn(64, 64)
    found = []
    for module in (Dropout(0.3), torch.nn.Dropout(0.3)):
        torch.manual_seed(1)
        found.append(module(values))
    assert torch.equal(*found)
    assert torch.equal(Dropout(0.3).eval()(values), values)
