"""A rank that never comes, a port that is another's, a run beside this one."""

import os
import re
import socket

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
    assert rendezvous._wait_for_all(Store(), 4000, hosts) == ("", [])
    assert len(questions) == 3
    line = "missing: ranks 3992, 3993, 3994, 3995, 3996, 3997, 3998, 3999 (n499)"
    said = capfd.readouterr().err.splitlines()
    assert [re.sub(r"after \d+ s", "after … s", each) for each in said] == 2 * [f"3992 of 4000 ranks after … s, {line}"]


@pytest.mark.end_to_end
@pytest.mark.parametrize(("rank", "limit_s"), [(0, 300.0), (1, 1.0)])
def test_another_program_at_the_address_is_told_by_rank_0_and_keeps_nobody_waiting(rank: int, limit_s: float) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:  # and says nothing
        port = other.getsockname()[1]
        process = _start(MEET, rank, 2, port, limit_s, DS_ACCELERATOR="cpu")
        assert process.wait() == 2
    taken = f"error: port {port} of 127.0.0.1, where the ranks are to meet, is taken, perhaps by another run: give the launcher"
    assert process.stderr.startswith(taken) if rank == 0 else "error" not in process.stderr.partition("port")[0]
    assert ("--master_port" in process.stderr) == (rank == 0)


JOB_OF_TWO = """
import os, sys
import torch.distributed as dist
from clap_ds.config.errors import AgreedError
from clap_ds.ranks import rendezvous
from clap_ds.ranks.distributed import Ranks
try:
    rendezvous.meet(int(os.environ["RANK"]), 2, "gloo", run=Ranks.from_environment().run)
except AgreedError as error:
    print(error)
else:
    dist.barrier()  # the other one needs this one until it has joined
    print("met")
sys.stdout.flush()
os._exit(0)
"""


def test_rank_of_another_job_on_the_same_port_stays_out() -> None:
    port = free_port()
    first = _start(JOB_OF_TWO, 0, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1")
    stranger = _start(JOB_OF_TWO, 1, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="2")
    stranger.wait()  # before the place it would have taken is
    second = _start(JOB_OF_TWO, 1, 2, port, SLURM_JOB_ID="7", SLURM_STEP_ID="1")
    assert stranger.stdout.startswith(f"port {port} of 127.0.0.1, where the ranks are to meet, is taken")
    assert [first.wait(), second.wait()] == [0, 0]
    assert [first.stdout, second.stdout] == ["met\n", "met\n"]
