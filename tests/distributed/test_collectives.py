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
from tests.conftest import ROOT
from tests.rank_pool import RankPool

VALUES = [None, True, 3, 0.1, math.inf, "ü\n", [1, [2]], {"a": {"b": []}}]


def _exchange(value: Any) -> tuple[Any, Any]:
    return collectives.gather(["x" * 1000 * collectives.rank(), value]), collectives.run_on_rank0(
        lambda: value
    )


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_values_arrive_as_they_were_sent(request: pytest.FixtureRequest, pool: str) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    sent = [*VALUES, (1, 2), Path("a/b")]
    received = [*VALUES, [1, 2], "a/b"]
    for rank, (gathered, result) in enumerate(ranks.run(_exchange, sent)):
        senders = range(2 if pool == "two_ranks" else 1) if rank == 0 else [rank]
        assert gathered == [["x" * 1000 * sender, received] for sender in senders]
        assert result == received


def _claim(size: int) -> str:
    """Gather with a rank 1 that claims a size."""
    try:
        if collectives.rank() == 0:
            collectives.gather("")
        else:
            dist.all_reduce(torch.tensor(size), dist.ReduceOp.MAX, group=collectives.hosts())
    except RuntimeError as error:
        return str(error)
    return ""


def test_value_above_the_limit_is_refused_before_memory_is_allocated(two_ranks: RankPool) -> None:
    assert "at most" in two_ranks.run(_claim, 2**50)[0]


def test_no_collective_unpickles_what_peers_send() -> None:
    pickling = re.compile(
        r"(gather|broadcast|scatter|send|recv)_object|rdzv_backend=(?!static)|torch\.distributed\.rpc"
    )
    for folder in ("clap_ds", "launch", "analysis", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pickling.search(path.read_text()), path
