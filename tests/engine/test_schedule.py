"""Warm-up, constant rate and cooldown."""

import pytest
import torch

from clap_ds.engine.schedule import WarmupStableDecayLR


@pytest.mark.parametrize(("power", "cooled"), [(1.0, [1.55, 1.1, 0.65]), (2.0, [1.2125, 0.65, 0.3125])])
def test_rates_are_open_clips(power: float, cooled: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule, rates = WarmupStableDecayLR(optimizer, 8, 4, 2, 0.1, power), list[float]()
    for _ in range(10):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1, 2, 2, 2, 2, *cooled, 0.2, 0.2])
