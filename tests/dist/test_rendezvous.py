"""Ranks from SLURM's variables, and a rank that never comes."""

import contextlib
import os
import re
import socket
import threading

import pytest

from clap_ds.config.errors import UserError
from clap_ds.dist import rendezvous
from clap_ds.dist.distributed import Ranks
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


BATCH_STEP = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "place", "address"),
    [
        (STEP, Ranks(9, 10, 1, 2), ("n08", "16085")),
        ({**STEP, "SLURM_PROCID": "0"}, Ranks(0, 10, 1, 2), ("n08", "16085")),  # every rank computes the same port
        ({**STEP, **LAUNCHER}, Ranks(3, 4, 1, 2), (None, None)),  # a launcher has the last word
        (BATCH_STEP, Ranks(0, 1, 0, 1), (None, None)),
    ],
)
def test_place_in_a_slurm_step(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: Ranks, address: tuple[str | None, str | None]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == place
    assert (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == address


MEET = """
import sys
from clap_ds.dist import rendezvous
from clap_ds.dist.distributed import Ranks, initialize, run_command
rendezvous.SAY_S = 1.0
run_command(lambda ranks: print(initialize(ranks, compile_cpu_collective=False)))
"""


def _start(program: str, rank: int, world_size: int, port: int, **variables: str) -> Command:
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    other = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port), "SLURM_JOB_NODELIST": "n[1-3]"}
    return Command(["-c", program], env={**os.environ, **place, **other, **variables})


@pytest.mark.end_to_end
def test_rank_that_never_comes_is_named() -> None:
    port, other_port = free_port(), free_port()
    ranks = [_start(MEET, rank, 3, port, CLAP_START_LIMIT_S="8") for rank in (0, 2)]
    without_first = _start(MEET, 1, 2, other_port, CLAP_START_LIMIT_S="8")
    assert [rank.wait() for rank in (*ranks, without_first)] == [1, 1, 1]
    *meanwhile, last = ranks[0].stderr.splitlines()
    assert re.fullmatch(r"2 of 3 ranks after \d s, missing: rank 1 \(n2\)", meanwhile[-1])
    assert last == "error: rank 1 of 3 (n2) didn't connect within 8 s"
    assert all("Traceback" not in rank.stderr for rank in ranks)
    here, address = socket.gethostname(), f"rank 0 at 127.0.0.1:{other_port}"
    assert without_first.stderr.splitlines() == [
        f"{here}: {address} can't be reached yet: Connection refused; trying for 8 s",
        f"error: {here}: rank 1 can't reach {address} within 8 s: Connection refused",
    ]


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("CLAP_START_LIMIT_S", limit)
    with pytest.raises(UserError, match=f"CLAP_START_LIMIT_S='{limit}' in the environment: expected seconds"):
        rendezvous.start_limit_s()


def test_thousands_of_ranks_are_looked_after_by_one_question(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of 4,000 ranks are there but one host's, which comes after the second look."""
    questions: list[str] = []

    class Store:
        def get(self, key: str) -> bytes:
            questions.append(key)
            return b"".join(b"%d " % rank for rank in range(4000) if rank // 8 != 499 or len(questions) > 2)

    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    hosts = [f"n{rank // 8:03d}" for rank in range(4000)]
    assert rendezvous._gather(Store(), 4000, 300.0, hosts) == ""
    assert len(questions) == 3
    line = "missing: ranks 3992, 3993, 3994, 3995, 3996, 3997, 3998, 3999 (n499)"
    said = capfd.readouterr().err.splitlines()
    assert [re.sub(r"after \d+ s", "after … s", each) for each in said] == 2 * [f"3992 of 4000 ranks after … s, {line}"]


@pytest.mark.end_to_end
def test_taken_port_is_named_once_with_the_option_that_chooses_another() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        port = other.getsockname()[1]
        process = _start(MEET, 0, 2, port)
        assert process.wait() == 2
    assert process.stderr.startswith(f"error: port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert "--master_port" in process.stderr
    assert process.stderr.count("\n") == 1


JOB_OF_TWO = """
import os, sys
import torch.distributed as dist
from clap_ds.dist import rendezvous
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


@pytest.mark.end_to_end
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_another_program_at_the_address_keeps_nobody_waiting(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connections = []
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CLAP_START_LIMIT_S": "1"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "DS_ACCELERATOR": "cpu"}
        brief = {"clap_ds.dist.distributed.RANK_0_SPEAKS_S": 0.0}
        # It leaves the word to rank 0, which can't have the port.
        assert Command(["-c", MEET], env={**os.environ, **place}, constants=brief).wait() == 2


def test_rank_of_another_job_on_the_same_port_stays_out() -> None:
    port = free_port()
    first = _start(JOB_OF_TWO, 0, 2, port, CLAP_JOB="1")
    stranger = _start(JOB_OF_TWO, 1, 2, port, CLAP_JOB="2")
    stranger.wait()  # before the place it would have taken is
    second = _start(JOB_OF_TWO, 1, 2, port, CLAP_JOB="1")
    assert stranger.stdout.startswith(f"port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert [first.wait(), second.wait()] == [0, 0]
    assert [first.stdout, second.stdout] == ["met\n", "met\n"]
