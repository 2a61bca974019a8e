"""Ranks from SLURM's variables, and a rank that never comes."""

from __future__ import annotations

import os
import socket

import pytest

from clap_ds.dist.distributed import Ranks
from clap_ds.dist.rendezvous import adopt_slurm_step
from tests.processes import Command
from tests.ranks import free_port

STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_NODELIST": "n[08-10]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}  # fmt: skip
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and no SLURM; what the code under test sets is undone."""
    for name in [*PLACE, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_place_from_a_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(9, 10, 1, 2)
    assert os.environ["MASTER_ADDR"] == "n08"
    port = os.environ["MASTER_PORT"]
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    adopt_slurm_step()
    assert os.environ["MASTER_PORT"] == port  # every rank computes the same


def test_launcher_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STEP, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(3, 4, 1, 2)


def test_batch_step_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(0, 1, 0, 1)


MEET = """
import sys
from clap_ds.dist import rendezvous
from clap_ds.dist.distributed import Ranks, initialize, run_command
rendezvous.CONNECT_S = 4.0
run_command(lambda ranks: print(initialize(ranks, compile_cpu_collective=False)))
"""


def _start(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> Command:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port), "SLURM_JOB_NODELIST": "n[1-3]",
    }  # fmt: skip
    return Command(["-c", MEET], env=environment)


@pytest.mark.end_to_end
def test_rank_that_never_comes_is_named_with_its_host() -> None:
    port = free_port()
    processes = [_start(rank, 3, port) for rank in (0, 2)]
    assert [process.wait() for process in processes] == [1, 1]
    outputs = [process.stderr for process in processes]
    assert "error: rank 1 of 3 (n2) didn't connect within 4 s" in outputs[0]
    assert all("Traceback" not in output for output in outputs)


@pytest.mark.end_to_end
def test_missing_first_rank_is_named_with_its_address() -> None:
    port = free_port()
    process = _start(1, 2, port)
    assert process.wait() == 1
    assert f"rank 1 can't reach rank 0 at 127.0.0.1:{port} within 4 s" in process.stderr


@pytest.mark.end_to_end
def test_taken_port_is_told_once_with_the_option_that_chooses_another() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        port = other.getsockname()[1]
        process = _start(0, 2, port)
        assert process.wait() == 2
    assert process.stderr.startswith(f"error: port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert "--master_port" in process.stderr
    assert process.stderr.count("\n") == 1


JOB_OF_TWO = """
import os, sys
import torch.distributed as dist
from clap_ds.dist import rendezvous
rendezvous.CONNECT_S = 30.0
try:
    rendezvous.meet(int(os.environ["RANK"]), 2, "gloo")
except rendezvous.PortTakenError as error:
    print(error)
else:
    dist.barrier()  # the other one needs this one until it has joined
    print("met")
sys.stdout.flush()
os._exit(0)
"""


def _start_of_job(job: str, rank: int, port: int) -> Command:
    variables = {"CLAP_JOB": job, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Command(["-c", JOB_OF_TWO], env={**os.environ, **variables})


@pytest.mark.end_to_end
def test_rank_of_another_job_on_the_same_port_stays_out() -> None:
    port = free_port()
    first = _start_of_job("1", 0, port)
    stranger = _start_of_job("2", 1, port)
    stranger.wait()  # before the place it would have taken is
    second = _start_of_job("1", 1, port)
    assert stranger.stdout.startswith(f"port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert [first.wait(), second.wait()] == [0, 0]
    assert [first.stdout, second.stdout] == ["met\n", "met\n"]
