"""Wrong all-reduce sums, and bandwidth of all-reduce and links."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.init import Ranks
from clap_ds.throughput_bench import bandwidth
from tests.rank_pool import RankPool


def _measured(spoil: dict[int, float]) -> dict[str, Any]:
    """Measure two hosts with a rank each, and alter some of rank 1's sums. The second of three
    calls is the fastest: it takes rank 0 a quarter of a second, and rank 1 half a second."""
    all_reduce = dist.all_reduce
    rank = dist.get_rank()
    durations_s = itertools.cycle([2.0, 0.25 * (1 + rank), 3.0])

    def spoiled(buffer: torch.Tensor, *operation: Any, **group: Any) -> None:
        all_reduce(buffer, *operation, **group)
        is_measured = not operation  # else it is a size
        for place, value in spoil.items() if rank and is_measured else ():
            buffer[place] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spoiled)
        patch.setattr(bandwidth, "seconds", lambda action, device: (action(), next(durations_s))[1])
        return bandwidth.measure(1.0, Ranks(rank, 2, 0, 1), torch.device("cpu"))


@pytest.mark.parametrize(
    ("spoil", "wrong"), [({}, 0), ({0: 1.0, 9: 2.5, 36: float("nan"), 1: 2.0}, 3)]
)
def test_wrong_sums_are_counted_and_rates_are_of_the_bytes_sent(
    two_ranks: RankPool, spoil: dict[int, float], wrong: int
) -> None:
    """In an all-reduce of 1 MB each of two ranks sends and receives 1 MB, and the slowest rank's
    time counts. Over a link it goes there and back, by the first rank's clock."""
    found = two_ranks.run(_measured, spoil)[0]
    assert [each["wrong"] for each in found["ranks"]] == [0, wrong]
    assert (found["bus_gb_per_s"], found["ranks"][0]["links"]) == (
        pytest.approx(0.002),
        [[0, 1, pytest.approx(0.008)]],
    )
