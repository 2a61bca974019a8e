"""Collectives that ranks have started and completed, as torch records them."""

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.flight_recorder import dumped_progress, own_progress
from tests.rank_pool import RankPool


def _start_alone() -> tuple[int, int]:
    """Return the default group's counts while only rank 0 has started a collective."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
    time.sleep(0.5)
    found = own_progress()["gloo 0"]
    store.set(f"counted {dist.get_rank()}", "")
    store.get(f"counted {1 - dist.get_rank()}")
    if work is None:
        dist.all_reduce(torch.ones(1))
    else:
        work.wait()
    return found


def test_a_rank_that_waits_has_started_more_than_it_completed(two_ranks: RankPool) -> None:
    waiting, behind = two_ranks.run(_start_alone)
    assert (waiting, behind) == ((waiting[0], waiting[0] - 1), (waiting[0] - 1, waiting[0] - 1))


def _sleep_before_a_collective() -> list[tuple[int, int]]:
    ones = torch.ones(1, device="cuda")
    found = []
    for cycles in (0, 3_000_000_000):
        torch.cuda._sleep(cycles)
        dist.all_reduce(ones)
        if not cycles:
            torch.cuda.synchronize()
        time.sleep(0.5)  # torch's watchdog looks every 0.1 s
        found.append(own_progress()["nccl 0"])
    return found


@pytest.mark.gpu
def test_a_collective_behind_a_slow_kernel_has_not_started(one_gpu: RankPool) -> None:
    ((before, queued),) = one_gpu.run(_sleep_before_a_collective)
    assert before[0] == before[1] > 0
    assert queued == before


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


def test_dumps_are_read_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = {
        "last_enqueued_collective": 44,
        "last_started_collective": -1,
        "last_completed_collective": 40,
    }
    (tmp_path / "nccl_rank3").write_bytes(pickle.dumps({"pg_status": {"0": status}}))
    (tmp_path / "nccl_rank4").write_bytes(pickle.dumps({"pg_status": _Harmful()}))
    assert [dumped_progress(tmp_path, rank) for rank in (3, 4, 5)] == [{"nccl 0": (40, 40)}, {}, {}]
    assert not (tmp_path / "harm").exists()
