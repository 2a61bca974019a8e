"""Ranks from the launchers' variables, the hostfile's promise, and stopping together."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from clap_ds.dist.agreement import agree
from clap_ds.dist.distributed import Ranks, check_hostfile
from clap_ds.config.errors import UserError
from tests import processes
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(environment: pytest.MonkeyPatch) -> None:
    assert Ranks.from_environment() == Ranks(0, 1, 0, 1)


@pytest.mark.parametrize("size_name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_torchrun_and_deepspeed_variables(environment: pytest.MonkeyPatch, size_name: str) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", size_name: "4"}.items():
        environment.setenv(name, value)
    assert Ranks.from_environment() == Ranks(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "has RANK but not WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='a'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 doesn't fit in WORLD_SIZE=2"),
    ],
)
def test_contradictions_are_refused(environment: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(UserError, match=message):
        Ranks.from_environment()


def test_hostfile_with_as_many_slots_as_ranks_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nnode1 slots=4\n\nnode2 slots=2  # half a node\n")
    check_hostfile(path, Ranks(0, 6, 0, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=4\nnode2 slots=4\n", "promises 8 ranks on 2 hosts, the launcher started 4"),
        ("node1 slots=4\nnode2\n", "hostfile:2: expected 'HOST slots=N'"),
        ("", "promises 0 ranks"),
    ],
)
def test_other_world_than_the_hostfile_promises_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
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
from clap_ds.dist import distributed
distributed.RANK_0_SPEAKS_S = 0.1
def main(ranks):
    raise getattr(errors, sys.argv[1])("broken")
distributed.run_command(main)
"""


@pytest.mark.parametrize(
    ("rank", "error", "rank_0_is_there", "told"),
    [
        (0, "UserError", False, "error: broken\n"),
        (1, "UserError", False, ""),  # rank 0 met the same, said so and left
        (1, "UserError", True, f"error: {platform.node()}: rank 1: broken\n"),  # nobody else will say it
        (1, "AgreedError", True, ""),
    ],
)
def test_a_mistake_is_told_once_and_never_swallowed(rank: int, error: str, rank_0_is_there: bool, told: str) -> None:
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        if rank_0_is_there:
            rank_0.listen()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank_0.getsockname()[1])}
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        command = ["-c", COMMAND, error]
        done = processes.run(command, env={**os.environ, **address, **place})
    assert (done.returncode, done.stderr) == (2, told)


FAULTS = """
import resource, sys, torch
from clap_ds.dist.distributed import keep_freed_memory
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
    def faults(mode: str) -> int:
        return int(processes.run(["-c", FAULTS, mode], check=True).stdout)

    # Thirty tensors of 40 MB, in pages of 4 kB or 2 MB.
    assert faults("keep") < faults("plain") / 10
