"""A rank that never connects or stops, and addresses that can't be used."""

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
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "--master_port"),  # in use
        ("192.0.2.1", "--force_multi"),  # another host's, as if deepspeed started a one-host hostfile on the login node
    ],
)
def test_rank_0_rejects_an_address_at_which_it_cannot_listen(address: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        process = _start(MEET, 0, 2, other.getsockname()[1], MASTER_ADDR=address, DS_ACCELERATOR="cpu")
        assert process.wait() == 2
    assert said in process.stderr
