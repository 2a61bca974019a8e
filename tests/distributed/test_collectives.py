"""Values that ranks exchange: the same types on any number of ranks, within limits, and never as
pickles."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed import collectives
from clap_ds.utils.errors import CollectiveUserError
from tests.conftest import ROOT
from tests.rank_pool import RankPool

VALUES = [None, True, 3, 0.1, math.inf, "ü\n", [1, [2]], {"a": {"b": []}}]


def _exchange(value: Any) -> tuple[Any, Any]:
    # Of another length on each rank.
    padding = "x" * 1000 * collectives.rank()
    return collectives.gather([padding, value]), collectives.run_on_rank0(lambda: value)


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_values_arrive_as_json(request, pool):
    ranks: RankPool = request.getfixturevalue(pool)
    received = [*VALUES, [1, 2], "a/b"]
    results = ranks.run(_exchange, [*VALUES, (1, 2), Path("a/b")])
    gathered, _ = results[0]
    assert gathered == [["x" * 1000 * rank, received] for rank in range(len(results))]
    for _, from_rank_0 in results:
        assert from_rank_0 == received


def _raise_on(problem_ranks: list[int]) -> str | None:
    try:
        with collectives.raise_on_all_ranks():
            if collectives.rank() in problem_ranks:
                raise ValueError("broken")
    except CollectiveUserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("problem_ranks", "message"), [([], None), ([1], "rank 1: broken"), ([0, 1], "broken")]
)
def test_error_of_a_rank_is_raised_on_all(two_ranks, problem_ranks, message):
    assert two_ranks.run(_raise_on, problem_ranks) == [message, message]


def _gather_with_claim(num_bytes: int) -> str:
    """Gather with a rank 1 that claims a size."""
    size = torch.tensor(num_bytes)
    try:
        if collectives.rank() == 0:
            collectives.gather("")
        else:
            dist.all_reduce(size, dist.ReduceOp.MAX, group=collectives.hosts())
    except RuntimeError as error:
        return str(error)
    return ""


def test_value_above_the_limit_is_rejected_before_memory_is_allocated(two_ranks):
    assert "at most" in two_ranks.run(_gather_with_claim, 2**50)[0]


def test_code_unpickles_nothing_of_peers():
    pickling = re.compile(
        r"(gather|broadcast|scatter|send|recv)_object|rdzv_backend=(?!static)|torch\.distributed\.rpc"
    )
    for folder in ("clap_ds", "launch", "analysis", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pickling.search(path.read_text()), path
