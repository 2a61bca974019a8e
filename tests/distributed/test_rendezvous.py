"""A rank that never connects, a port in use, and concurrent runs."""

import os
import signal
import socket

import pytest

from tests.processes import Command
from tests.rank_pool import free_port
from tests.training.training_commands import wait_until

MEET = """
import sys, time
from clap_ds.distributed import rendezvous
from clap_ds.distributed.init import initialize, run_command
rendezvous.SAY_S = 1.0
run_command(lambda ranks: (print(initialize(ranks), flush=True), time.sleep(float(sys.argv[1]))))
"""


def _start(program: str, rank: int, world_size: int, port: int, limit_s: float = 300.0, **variables: str) -> Command:
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    other = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    limit = {"clap_ds.distributed.rendezvous.START_LIMIT_S": limit_s, "clap_ds.distributed.init.RANK_0_SPEAKS_S": 0.0}
    return Command(["-c", program, "60"], env={**os.environ, **place, **other, **variables}, constants=limit)


@pytest.mark.end_to_end
def test_rank_that_never_comes_is_named() -> None:
    port, other_port = free_port(), free_port()
    ranks = [_start(MEET, rank, 3, port, 8.0) for rank in (0, 2)]
    without_first = _start(MEET, 1, 2, other_port, 8.0)
    assert [rank.wait() for rank in (*ranks, without_first)] == [1, 1, 1]
    *meanwhile, last = ranks[0].stderr.splitlines()
    assert "missing: rank 1" in meanwhile[-1]
    assert "rank 1 didn't connect" in last
    assert f"rank 1 can't reach rank 0 at 127.0.0.1:{other_port}" in without_first.stderr


@pytest.mark.end_to_end
def test_rank_that_stops_before_the_first_step_is_named() -> None:
    port = free_port()
    first, second = (_start(MEET, rank, 2, port, DS_ACCELERATOR="cpu") for rank in range(2))
    wait_until(lambda: first.stdout == second.stdout == "cpu\n")
    assert "missing" not in first.stderr + second.stderr
    second.send_signal(signal.SIGSTOP)
    wait_until(lambda: "1 of 2 ranks after" in first.stderr and "missing: rank 1" in first.stderr)
    first.kill()
    second.kill()


@pytest.mark.end_to_end
def test_another_program_at_the_address_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        process = _start(MEET, 0, 2, other.getsockname()[1], DS_ACCELERATOR="cpu")
        assert process.wait() == 2
    assert "--master_port" in process.stderr


@pytest.mark.end_to_end
def test_rank_0_sees_that_the_address_is_another_hosts() -> None:
    """Mimic deepspeed starting the ranks of a one-host hostfile on the login node."""
    process = _start(MEET, 0, 2, free_port(), MASTER_ADDR="192.0.2.1", LOCAL_SIZE="2", DS_ACCELERATOR="cpu")
    assert process.wait() == 2
    assert "--force_multi" in process.stderr


JOB_OF_TWO = """
import os
import torch.distributed as dist
from clap_ds.distributed import rendezvous
from clap_ds.distributed.init import Ranks
rendezvous.meet(Ranks.from_environment(), "gloo", None)
dist.barrier()  # the other one needs this one until it has joined
print("met", flush=True)
os._exit(0)
"""


def test_ranks_of_another_step_stay_out() -> None:
    port = free_port()
    first = _start(JOB_OF_TWO, 0, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1", LOCAL_WORLD_SIZE="2")
    stranger = _start(JOB_OF_TWO, 1, 2, port, 2.0, SLURM_JOB_ID="7", SLURM_STEP_ID="2")
    assert stranger.wait() != 0  # before the place it would have taken is
    second = _start(JOB_OF_TWO, 1, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1")
    assert [first.wait(), second.wait()] == [0, 0]
    assert [first.stdout, second.stdout, stranger.stdout] == ["met\n", "met\n", ""]
