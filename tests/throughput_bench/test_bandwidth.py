"""Wrong all-reduce sums, and bandwidth of all-reduce and links."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.init import Ranks
from clap_ds.throughput_bench import bandwidth
from tests.rank_pool import RankPool


def _measure(wrong_sums: dict[int, float]) -> dict[str, Any]:
    """Measure two hosts with a rank each, with wrong sums on rank 1, by index.

    The second of three calls is the fastest: it takes rank 0 a quarter of a second, and rank 1 half
    a second.
    """
    rank = dist.get_rank()
    all_reduce = dist.all_reduce
    durations_s = itertools.cycle([2.0, 0.25 * (1 + rank), 3.0])

    def all_reduce_wrongly(buffer: torch.Tensor, *operation: Any, **group: Any) -> None:
        all_reduce(buffer, *operation, **group)
        # Others are sizes of gathered objects.
        is_measured = not operation
        if rank == 1 and is_measured:
            for index, value in wrong_sums.items():
                buffer[index] = value

    def seconds(action: Callable[[], object], device: torch.device) -> float:
        action()
        return next(durations_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce_wrongly)
        patch.setattr(bandwidth, "seconds", seconds)
        return bandwidth.measure(1.0, Ranks(rank, 2, 0, 1), torch.device("cpu"))


@pytest.mark.parametrize(
    ("wrong_sums", "num_wrong"), [({}, 0), ({0: 1.0, 9: 2.5, 36: float("nan"), 1: 2.0}, 3)]
)
def test_bandwidth_counts_wrong_sums_and_bytes_sent(
    two_ranks: RankPool, wrong_sums: dict[int, float], num_wrong: int
) -> None:
    """In an all-reduce of 1 MB each of two ranks sends and receives 1 MB, and the slowest rank's
    time counts. Over a link it goes there and back, by the first rank's clock."""
    measured = two_ranks.run(_measure, wrong_sums)[0]
    first, second = measured["ranks"]
    assert (first["wrong"], second["wrong"]) == (0, num_wrong)
    assert measured["bus_gb_per_s"] == pytest.approx(1e-3 / 0.5)
    assert [*map(list, first["links"])] == [[0, 1, pytest.approx(2 * 1e-3 / 0.25)]]
    assert second["links"] == []
