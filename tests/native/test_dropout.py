"""The native dropout."""

from __future__ import annotations

import pytest
import torch

from clap_ds.native.dropout import native_dropout
from tests.kernels import needs_amx

pytestmark = needs_amx


def test_elements_are_kept_and_scaled_or_zero_and_gradients_alike() -> None:
    torch.manual_seed(0)
    x = torch.ones(1 << 18, dtype=torch.bfloat16, requires_grad=True)
    y = native_dropout(x, 0.25)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(4 / 3).bfloat16().item()}
    assert 0.24 < float((y == 0).float().mean()) < 0.26
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, y)
    assert native_dropout(x, 0.0) is x


def test_what_is_not_a_number_stays_even_where_dropped() -> None:
    assert native_dropout(torch.full((64,), float("nan"), dtype=torch.bfloat16), 0.5).isnan().all()


def test_what_it_cannot_take_is_refused() -> None:
    x = torch.ones(64, dtype=torch.bfloat16)
    for wrong, probability in ((x.float(), 0.5), (x[:15], 0.5), (x, 1.0)):
        with pytest.raises(AssertionError):
            native_dropout(wrong, probability)
