"""A rank that never connects or stops, that has other code or another key, and addresses that can't
be used."""

import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import torch.distributed as dist

from clap_ds.distributed import rendezvous
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.rendezvous import KEY_FILE, SignedStore, UnreachableError, create_key
from tests.processes import Command
from tests.rank_pool import free_port
from tests.training.training_commands import wait_until

MEET = """
import sys, time
from clap_ds.distributed import rendezvous
from clap_ds.distributed.init import initialize, run_command
rendezvous.SAY_S = 1.0
allows = "--allow" in sys.argv
run_command(lambda ranks: (print(initialize(ranks, allow_mixed_code=allows), flush=True), time.sleep(float(sys.argv[1]))))
"""
DIGESTED = "clap_ds.utils.paths.CODE_SUFFIXES"


def _start(
    program: str, rank: int, world_size: int, port: int, limit_s: float = 300.0, *options: str,
    constants: dict[str, object] | None = None, **variables: str,
) -> Command:  # fmt: skip
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
    }
    other = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    limit = {
        "clap_ds.distributed.rendezvous.START_LIMIT_S": limit_s,
        "clap_ds.distributed.init.RANK_0_SPEAKS_S": 0.0,
    }
    environment = {**os.environ, **place, **other, **variables}
    return Command(
        ["-c", program, "60", *options], env=environment, constants=limit | (constants or {})
    )


@pytest.mark.end_to_end
def test_rank_that_never_comes_is_named() -> None:
    port = free_port()
    other_port = free_port()
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
        (
            "192.0.2.1",
            "--force_multi",
        ),  # another host's, as if deepspeed started a one-host hostfile on the login node
    ],
)
def test_rank_0_rejects_an_address_at_which_it_cannot_listen(address: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        process = _start(
            MEET, 0, 2, other.getsockname()[1], MASTER_ADDR=address, DS_ACCELERATOR="cpu"
        )
        assert process.wait() == 2
    assert said in process.stderr


@pytest.mark.end_to_end
@pytest.mark.parametrize("options", [[], ["--allow"]])
def test_hosts_with_other_code_end_the_run_on_all_ranks_unless_allowed(options: list[str]) -> None:
    port = free_port()
    ranks = [
        _start(
            MEET, rank, 3, port, 300.0, *options, DS_ACCELERATOR="cpu", SLURMD_NODENAME=f"cn{rank}",
            constants={DIGESTED: (".py",) if rank == 1 else (".py", ".json")},
        )
        for rank in range(3)
    ]  # fmt: skip
    if options:
        wait_until(lambda: all(rank.stdout == "cpu\n" for rank in ranks))
        assert "warning" in ranks[0].stderr
    else:
        assert [rank.wait() for rank in ranks] == [2, 2, 2]
        assert "allow_mixed_code" in ranks[0].stderr
    assert "cn1: code" in ranks[0].stderr
    assert "cn1" not in ranks[1].stderr + ranks[2].stderr


@pytest.mark.end_to_end
def test_host_that_cannot_resolve_rank_0_is_at_fault(tmp_path: Path) -> None:
    constants = {"clap_ds.distributed.rendezvous.RESOLVE_LIMIT_S": 0.0}
    options = ("--job_folder", str(tmp_path))
    names = {"MASTER_ADDR": "cn4.invalid", "SLURMD_NODENAME": "cn5"}
    assert (
        _start(MEET, 1, 2, free_port(), 300.0, *options, constants=constants, **names).wait() == 1
    )
    error = json.loads((tmp_path / "errors" / "rank1.json").read_text())
    assert (error["kind"], error["hosts"]) == ("unreachable", ["cn5"])
    assert "cn5 can't resolve cn4.invalid" in error["message"]


@pytest.mark.end_to_end
def test_rank_that_waits_for_rank_0_ends_at_sigterm(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as silent:
        rank = _start(MEET, 1, 2, port, 300.0, "--job_folder", str(tmp_path))
        silent.accept()
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == 128 + signal.SIGTERM


def test_values_of_programs_without_the_key_are_rejected(tmp_path: Path) -> None:
    create_key(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    plain = dist.HashStore()
    ours = SignedStore(plain, tmp_path)
    strange = SignedStore(plain, None)
    ours.set("rank 0", ["cn1", None])
    assert ours.get_all(["rank 0"]) == [["cn1", None]]
    strange.set("rank 1", ["cn2", None])
    plain.set("rank 2", plain.get("rank 0").decode())  # replayed
    for name in ("rank 1", "rank 2"):
        with pytest.raises(UnreachableError, match=f"{name} .*key"):
            ours.get_all(["rank 0", name])


@pytest.mark.parametrize(("address", "interface"), [("127.0.1.1", "lo"), ("10.0.0.1", None)])
def test_host_whose_name_others_cannot_reach_gets_an_interface(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    rendezvous._choose_interface(Ranks(0, 2, 0, 1, ("node1", "localhost")))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
