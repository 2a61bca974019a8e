"""Ranks from the launchers' variables, the hostfile's promise, and stopping together."""

import os
import platform
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from clap_ds.config.errors import UserError
from clap_ds.ranks.agreement import agree
from clap_ds.ranks.distributed import Ranks, check_hostfile
from tests import processes
from tests.rank_pool import RankPool


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", Ranks(0, 1, 0, 1)),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", Ranks(5, 8, 1, 4)),  # torchrun
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4", Ranks(5, 8, 1, 4)),  # deepspeed
        ("RANK=0", "has RANK but not WORLD_SIZE, LOCAL_RANK"),
        ("RANK=a WORLD_SIZE=2 LOCAL_RANK=0", "RANK='a'"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "RANK=2 doesn't fit in WORLD_SIZE=2"),
    ],
)
def test_place_from_launchers(monkeypatch: pytest.MonkeyPatch, variables: str, expected: Ranks | str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    if isinstance(expected, Ranks):
        assert Ranks.from_environment() == expected
    else:
        with pytest.raises(UserError, match=expected):
            Ranks.from_environment()


def test_hostfile_has_as_many_slots_as_there_are_ranks(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nnode1 slots=4\n\nnode2 slots=2  # half a node\n")
    assert check_hostfile(path, Ranks(5, 6, 1, 2)).hosts == ("node1",) * 4 + ("node2",) * 2
    with pytest.raises(UserError, match="promises 6 ranks on 2 hosts, the launcher started 4"):
        check_hostfile(path, Ranks(0, 4, 0, 4))


def _agree(problem_rank: int | None) -> str | None:
    try:
        agree("broken" if problem_rank in (dist.get_rank(), -1) else None)
    except UserError as error:
        return str(error)
    return None


def test_all_ranks_stop_with_the_problem_of_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(_agree, None) == [None, None]
    assert two_ranks.run(_agree, 1) == ["rank 1: broken"] * 2
    assert two_ranks.run(_agree, -1) == ["broken"] * 2


COMMAND = """
import sys
from clap_ds.config import errors
from clap_ds.ranks import distributed
distributed.RANK_0_SPEAKS_S = 0.1
def main(ranks):
    raise getattr(errors, sys.argv[1])("broken")
distributed.run_command(main)
"""


@pytest.mark.parametrize(
    ("rank", "error", "rank_0_is_there", "message"),
    [
        (0, "UserError", False, "error: broken\n"),
        (1, "UserError", False, ""),  # rank 0 met the same, said so and left
        (1, "UserError", True, f"error: {platform.node()}: rank 1: broken\n"),  # nobody else will say it
        (1, "AgreedError", True, ""),
    ],
)
def test_a_mistake_is_shown_once_and_never_lost(rank: int, error: str, rank_0_is_there: bool, message: str) -> None:
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        if rank_0_is_there:
            rank_0.listen()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank_0.getsockname()[1])}
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        done = processes.run(["-c", COMMAND, error], env={**os.environ, **address, **place})
    assert (done.returncode, done.stderr) == (2, message)


FAULTS = """
import resource, sys, torch
from clap_ds.ranks.distributed import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    a = torch.ones(10_000_000)
    b = a + 1
    c = a * b
    del a, b, c
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="says something of glibc's allocator alone")
def test_freed_memory_is_used_again() -> None:
    keep, plain = (int(processes.run(["-c", FAULTS, mode], check=True).stdout) for mode in ("keep", "plain"))
    assert keep < plain / 10  # of thirty tensors of 40 MB, in pages of 4 kB or 2 MB
