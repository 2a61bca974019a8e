"""Wrong sums of an all-reduce are found, and it takes little more memory than what is summed."""

import os

import pytest
import torch
import torch.distributed as dist

from clap_ds.measuring import links
from tests import processes
from tests.rank_pool import RankPool


def _wrong_elements(world_size: int, spoil: dict[int, float]) -> int:
    """Counted after an all-reduce of 37 elements in pieces of 8, when what it gives is changed at some places."""
    all_reduce = dist.all_reduce

    def spoiled(buffer: torch.Tensor) -> None:
        all_reduce(buffer)
        buffer *= world_size / dist.get_world_size()
        for place, value in spoil.items():
            buffer[place] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "PIECE", 8)
        patch.setattr(dist, "all_reduce", spoiled)
        return links.all_reduce(37, world_size, torch.device("cpu"))[0]


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


PEAK = """
import resource, sys, torch
from clap_ds.ranks.distributed import Ranks, initialize
from clap_ds.measuring import links
ranks = Ranks.from_environment()
device = initialize(ranks, compile_cpu_collective=False)
links.all_reduce(1000, 2, device)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
links.all_reduce(100_000_000 // 2, 2, device)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 100_000)
"""


@pytest.mark.end_to_end
def test_memory_is_little_more_than_the_buffer() -> None:
    both = processes.ranks(["-c", PEAK], 2, env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    assert [rank.wait() for rank in both] == [0, 0], both[0].stderr
    for rank in both:
        assert 0.9 < float(rank.stdout) < 3, rank.stdout
