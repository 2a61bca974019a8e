"""Wrong all-reduce sums, bandwidth of all-reduce and links, and TFLOPS."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from clap_ds.benchmark import bandwidth
from clap_ds.distributed.init import Ranks
from tests.rank_pool import RankPool


def _wrong_elements(world_size: int, spoil: dict[int, float]) -> int:
    """Count wrong elements after an all-reduce of 37, some of which are altered."""
    all_reduce = dist.all_reduce

    def spoiled(buffer: torch.Tensor) -> None:
        all_reduce(buffer)
        buffer *= world_size / dist.get_world_size()
        for place, value in spoil.items():
            buffer[place] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spoiled)
        return bandwidth.all_reduce(37, world_size, torch.device("cpu"))[0]


@pytest.mark.parametrize(
    ("world_size", "spoil", "wrong"),
    [
        (2, {}, 0),
        (2, {0: 1.0, 9: 1.0, 36: float("nan"), 1: 2.0}, 3),
        (1024, {1: 1000.0, 3: 800.0, 36: 1.0}, 2),  # sums of more than 256 ones may round
    ],
)
def test_wrong_sums_are_counted(two_ranks: RankPool, world_size: int, spoil: dict[int, float], wrong: int) -> None:
    assert two_ranks.run(_wrong_elements, world_size, spoil) == [wrong, wrong]


def _measured() -> dict[str, Any]:
    """Two hosts with a rank each, whose exchanges take half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "seconds", lambda action, device: (action(), 0.5)[1])
        patch.setattr("torch.utils.benchmark.Timer", timer := mock.Mock())
        timer().blocked_autorange.return_value.median = 0.5
        return bandwidth.measure(1.0, Ranks(dist.get_rank(), 2, 0, 1), torch.device("cpu"))


def test_rates(two_ranks: RankPool) -> None:
    """In an all-reduce of 1 MB each of two ranks sends and receives 1 MB; over a link it goes there and back."""
    found = two_ranks.run(_measured)[0]
    assert (found["bus_gb_per_s"], found["ranks"][0]["links"]) == (pytest.approx(0.002), [(0, 1, pytest.approx(0.004))])
    assert found["ranks"][1]["tflops"] == 2 * 512**3 / 0.5 / 1e12
