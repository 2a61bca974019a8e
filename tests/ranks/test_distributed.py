"""Ranks from the variables of launchers and SLURM, the hostfile's promise, stopping together, and what `clap.debug` sets."""

import faulthandler
import os
import platform
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from clap_ds.config.errors import UserError
from clap_ds.config.sections import DebugSettings
from clap_ds.ranks.agreement import agree
from clap_ds.ranks.distributed import Ranks, check_hostfile, prepare_debugging
from tests import processes
from tests.rank_pool import RankPool

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_NODELIST": "n[08-10]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}  # fmt: skip
ONE_TASK = {
    **STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
BATCH_STEP = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ALONE = Ranks(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("given", "expected", "address"),
    [
        ({}, ALONE, None),
        (LAUNCHER, Ranks(3, 4, 1, 2), None),  # torchrun
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, Ranks(5, 8, 1, 4), None),  # deepspeed
        ({"RANK": "0"}, r"RANK below WORLD_SIZE; found RANK='0', WORLD_SIZE='', LOCAL_RANK=''", None),
        ({**LAUNCHER, "RANK": "a"}, "found RANK='a'", None),
        ({**LAUNCHER, "RANK": "4"}, "found RANK='4', WORLD_SIZE='4'", None),
        (STEP, Ranks(9, 10, 1, 2), "n08"),
        ({**STEP, **LAUNCHER}, Ranks(3, 4, 1, 2), None),  # a launcher has the last word
        (ONE_TASK, ALONE, None),
        (BATCH_STEP, ALONE, None),
        ({**ONE_TASK, "SLURM_STEP_ID": "4294967291"}, ALONE, None),
    ],
)
def test_place_from_launchers_and_slurm(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: Ranks | str, address: str | None
) -> None:
    for name in [*PLACE, *(name for name in os.environ if name.startswith("SLURM"))]:
        monkeypatch.setenv(name, "")  # so that what the code under test sets is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            Ranks.from_environment()
        return
    assert Ranks.from_environment() == expected
    assert os.environ.get("MASTER_ADDR") == address
    # Every rank of a step works out the same port.
    assert os.environ.get("MASTER_PORT") == (None if address is None else "28027")
    # What is no rank of a step is none afterwards, either.
    assert ("RANK" in os.environ) == ("RANK" in given or given.get("SLURM_STEP_ID") == "1")


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
        (1, "UserError", False, ""),  # rank 0 found the same, said so and left
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
for step in range(13):
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
    assert keep < plain / 5  # of nine tensors of 40 MB, at most one of which is new, in pages of 4 kB or 2 MB


def test_debugging_has_libraries_say_more_and_crashes_leave_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr(faulthandler, "enable", lambda all_threads: enabled.append(all_threads))
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "WARN"})
    prepare_debugging(DebugSettings())
    assert (os.environ, enabled) == ({"NCCL_DEBUG": "WARN"}, [])
    prepare_debugging(DebugSettings(enabled=True, nccl_debug_subsys="NET"))
    others = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert (os.environ, enabled) == ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "NET", **others}, [True])
    prepare_debugging(DebugSettings(enabled=True, cuda_launch_blocking=True))
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
