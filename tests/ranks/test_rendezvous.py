"""A rank that never comes, a port that is another's, a run beside this one."""

import contextlib
import os
import re
import socket
import threading

import pytest

from clap_ds.ranks import rendezvous
from tests.processes import Command
from tests.rank_pool import free_port

MEET = """
import sys
from clap_ds.ranks import rendezvous
from clap_ds.ranks.distributed import Ranks, initialize, run_command
rendezvous.SAY_S = 1.0
run_command(lambda ranks: print(initialize(ranks, compile_cpu_collective=False)))
"""


def _start(program: str, rank: int, world_size: int, port: int, limit_s: float = 300.0, **variables: str) -> Command:
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    other = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port), "SLURM_STEP_NODELIST": "n[1-3]"}
    limit = {"clap_ds.ranks.rendezvous.START_LIMIT_S": limit_s, "clap_ds.ranks.distributed.RANK_0_SPEAKS_S": 0.0}
    return Command(["-c", program], env={**os.environ, **place, **other, **variables}, constants=limit)


@pytest.mark.end_to_end
def test_rank_that_never_comes_is_named() -> None:
    port, other_port = free_port(), free_port()
    ranks = [_start(MEET, rank, 3, port, 8.0) for rank in (0, 2)]
    without_first = _start(MEET, 1, 2, other_port, 8.0)
    assert [rank.wait() for rank in (*ranks, without_first)] == [1, 1, 1]
    *meanwhile, last = ranks[0].stderr.splitlines()
    assert re.fullmatch(r"2 of 3 ranks after \d s, missing: rank 1 \(n2\)", meanwhile[-1])
    assert last == "error: rank 1 (n2) didn't connect within 8 s"
    assert all("Traceback" not in rank.stderr for rank in ranks)
    reason = f"rank 1 can't reach rank 0 at 127.0.0.1:{other_port} within 8 s: Connection refused"
    assert without_first.stderr.splitlines() == [f"error: {socket.gethostname()}: {reason}"]


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
    assert rendezvous._gather(Store(), 4000, hosts) == []
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
from clap_ds.ranks import rendezvous
from clap_ds.ranks.distributed import Ranks
try:
    rendezvous.meet(int(os.environ["RANK"]), 2, "gloo", run=Ranks.from_environment().run)
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
        # It leaves the word to rank 0, which can't have the port.
        assert _start(MEET, 1, 2, server.getsockname()[1], 1.0, DS_ACCELERATOR="cpu").wait() == 2


def test_rank_of_another_job_on_the_same_port_stays_out() -> None:
    port = free_port()
    first = _start(JOB_OF_TWO, 0, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1")
    stranger = _start(JOB_OF_TWO, 1, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="2")
    stranger.wait()  # before the place it would have taken is
    second = _start(JOB_OF_TWO, 1, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1")
    assert stranger.stdout.startswith(f"port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert [first.wait(), second.wait()] == [0, 0]
    assert [first.stdout, second.stdout] == ["met\n", "met\n"]
