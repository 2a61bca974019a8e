"""Warm-up, constant rate and cooldown."""

import math
from typing import Any

import pytest
import torch

from clap_ds.engine.schedule import WarmupStableDecayLR


def list_rates(number: int, **options: Any) -> list[float]:
    """Return the rates of the first steps, from 2.0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = WarmupStableDecayLR(optimizer, **options)
    rates = list[float]()
    for _ in range(number):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("power", "cooled"), [(1.0, [1.55, 1.1, 0.65]), (2.0, [1.2125, 0.65, 0.3125])]
)
def test_rates_are_open_clips(power: float, cooled: list[float]) -> None:
    options = {"total_num_steps": 8, "decay_num_steps": 4, "warmup_num_steps": 2, "min_ratio": 0.1}
    assert list_rates(10, **options, decay_power=power) == pytest.approx(
        [1, 2, 2, 2, 2, *cooled, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    "changes", [{"decay_num_steps": 9}, {"warmup_num_steps": 5}, {"min_ratio": 5}]
)
def test_steps_or_shares_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"scheduler\.params"):
        list_rates(1, **{"total_num_steps": 8, "decay_num_steps": 4, **changes})


def test_cosine_over_all_steps_after_the_warm_up_is_open_clips_cosine() -> None:
    """open_clip's rates are lr · (step + 1) / warm-up, then lr · (1 + cos(π (step - warm-up) /
    (steps - warm-up))) / 2."""
    rates = list_rates(14, total_num_steps=14, decay_num_steps=10, warmup_num_steps=4, cosine=True)
    cooled = [1 + math.cos(math.pi * (step - 4) / 10) for step in range(4, 14)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, *cooled])
