"""Dropout by hashed masks: the right fraction and scale, independent elements and calls, one mask
forward and backward."""

import pytest
import torch

from clap_ds.model.dropout import hash_dropout

ROWS = 2048
COLUMNS = 768


def test_elements_and_calls_are_independent():
    torch.manual_seed(0)
    # Centered at 0, with a variance of 0.09.
    first, second = (
        (hash_dropout(torch.ones(ROWS, COLUMNS), 0.1) == 0).double().flatten() - 0.1
        for _ in range(2)
    )
    lags = (1, 2, 8, COLUMNS, 10 * COLUMNS)
    pairs = [(first, second), *((first[lag:], first[:-lag]) for lag in lags)]
    for one, other in pairs:
        # Five standard deviations of a sum of products.
        assert abs(float((one * other).sum())) < 5 * 0.09 * len(one) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_gradient_is_scaled_mask_of_the_values(p):
    function = torch.compile(hash_dropout, backend="aot_eager")
    values = torch.randn(ROWS, COLUMNS, requires_grad=True)
    torch.manual_seed(3)
    dropped = function(values, p)
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    assert torch.allclose(dropped, values * gradient)
    assert torch.allclose(gradient.unique(), torch.tensor([0, 1 / (1 - p)]))
    fraction = float((gradient == 0).double().mean())
    assert abs(fraction - p) < 5 * (p * (1 - p) / values.numel()) ** 0.5
    torch.manual_seed(3)
    assert torch.equal(dropped, hash_dropout(values, p))
