"""Wrong sums of an all-reduce, and its rate."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.throughput_bench import bandwidth
from tests.rank_pool import RankPool

MEGABYTE = 1_000_000


def _time_with_wrong_sums(wrong_sums: dict[int, float]) -> dict[str, Any]:
    """Measure with given durations, and wrong elements in rank 1's sum."""
    all_reduce = dist.all_reduce
    rank = dist.get_rank()
    # Of the repeats. The slowest rank's best is half a second.
    durations_s = iter([2.0, 0.25 * (1 + rank), 3.0])

    def seconds(action: Any, device: torch.device) -> float:
        action()
        return next(durations_s)

    def spoil(buffer: torch.Tensor, *arguments: Any, **options: Any) -> None:
        all_reduce(buffer, *arguments, **options)
        if rank == 1 and len(buffer.shape) == 1:  # else it is a size
            for index, value in wrong_sums.items():
                buffer[index] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spoil)
        patch.setattr(bandwidth, "seconds", seconds)
        return bandwidth.time_all_reduce(MEGABYTE, torch.device("cpu"))


def test_wrong_sums_are_counted_and_the_rate_is_of_the_bytes_sent(two_ranks: RankPool) -> None:
    wrong_sums = {0: 1.0, 9: 2.5, 36: float("nan"), 1: 2.0}
    measured = two_ranks.run(_time_with_wrong_sums, wrong_sums)[0]
    assert measured["num_wrong"] == [0, 3]
    assert measured["seconds"] == 0.5
    # Each of two ranks sends 2 (n - 1) / n = 1 MB in half a second.
    assert measured["bus_gb_per_s"] == pytest.approx(0.002)
