"""A rank that never connects or stops, that has other code or another key, and addresses that can't
be used."""

import json
import os
import signal
import socket
import stat

import pytest
import torch.distributed as dist

from clap_ds.distributed import rendezvous
from clap_ds.distributed.error_file import UnreachableError
from clap_ds.distributed.hostfile import KEY_FILE, create_key
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.rendezvous import SignedStore
from tests.processes import Command, launcher_variables
from tests.rank_pool import free_port
from tests.training.training_commands import wait_until

# Joins, prints the device, and waits without making a step.
JOIN = """
import sys, time
from clap_ds.distributed.init import run_command
from clap_ds.distributed.process_group import initialize

def main(ranks):
    print(initialize(ranks, allow_mixed_code="--allow" in sys.argv), flush=True)
    time.sleep(60)

run_command(main)
"""
RENDEZVOUS = "clap_ds.distributed.rendezvous"


def _start(
    rank: int,
    world_size: int,
    port: int,
    *options: str,
    constants: dict[str, object] | None = None,
    **variables: str,
) -> Command:
    launcher = launcher_variables(rank, world_size, port)
    # Each rank on a host of its own.
    launcher |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **launcher, **variables}
    short_limits = {
        f"{RENDEZVOUS}.REPORT_INTERVAL_S": 1.0,
        "clap_ds.distributed.init.RANK_0_SPEAKS_S": 0.0,
    }
    constants = {**short_limits, **(constants or {})}
    return Command(["-c", JOIN, *options], env=environment, constants=constants)


@pytest.mark.end_to_end
def test_rank_that_never_connects_is_named():
    port = free_port()
    constants: dict[str, object] = {f"{RENDEZVOUS}.START_LIMIT_S": 8.0}
    ranks = [_start(rank, 3, port, constants=constants) for rank in (0, 2)]
    assert [rank.wait() for rank in ranks] == [1, 1]
    *reports, error = ranks[0].stderr.splitlines()
    assert "missing: rank 1" in reports[-1]
    assert "rank 1 didn't connect" in error


@pytest.mark.end_to_end
def test_rank_that_stops_before_the_first_step_is_named():
    port = free_port()
    first, second = (_start(rank, 2, port) for rank in range(2))
    wait_until(lambda: first.stdout == second.stdout == "cpu\n")
    assert "missing" not in first.stderr + second.stderr
    second.send_signal(signal.SIGSTOP)
    wait_until(lambda: "1 of 2 ranks after" in first.stderr and "missing: rank 1" in first.stderr)
    first.kill()
    second.kill()


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("address", "option"),
    [
        ("127.0.0.1", "--master_port"),  # in use
        # Another host's, as if deepspeed started a one-host hostfile on the login node.
        ("192.0.2.1", "--force_multi"),
    ],
)
def test_address_at_which_rank_0_cannot_listen_is_rejected(address, option):
    with socket.create_server(("127.0.0.1", free_port())) as other_program:
        rank = _start(0, 2, other_program.getsockname()[1], MASTER_ADDR=address)
        assert rank.wait() == 2
    assert option in rank.stderr


@pytest.mark.end_to_end
@pytest.mark.parametrize("options", [(), ("--allow",)])
def test_host_with_other_code_ends_the_run_on_all_ranks_unless_allowed(options):
    port = free_port()
    ranks = []
    for rank in range(3):
        suffixes = (".py",) if rank == 1 else (".py", ".json")
        constants: dict[str, object] = {"clap_ds.utils.paths.CODE_SUFFIXES": suffixes}
        host = f"cn{rank}"
        ranks.append(_start(rank, 3, port, *options, constants=constants, SLURMD_NODENAME=host))
    if options:
        wait_until(lambda: all(rank.stdout == "cpu\n" for rank in ranks))
        assert "warning" in ranks[0].stderr
    else:
        assert [rank.wait() for rank in ranks] == [2, 2, 2]
        assert "allow_mixed_code" in ranks[0].stderr
    assert "cn1: code" in ranks[0].stderr
    assert "cn1" not in ranks[1].stderr + ranks[2].stderr


@pytest.mark.end_to_end
def test_host_that_cannot_resolve_rank_0_is_at_fault(tmp_path):
    constants: dict[str, object] = {f"{RENDEZVOUS}.RESOLVE_LIMIT_S": 0.0}
    names = {"MASTER_ADDR": "cn4.invalid", "SLURMD_NODENAME": "cn5"}
    options = ("--job_folder", str(tmp_path))
    assert _start(1, 2, free_port(), *options, constants=constants, **names).wait() == 1
    error = json.loads((tmp_path / "errors" / "rank1.json").read_text())
    assert (error["kind"], error["hosts"]) == ("unreachable", ["cn5"])
    assert "cn5 can't resolve cn4.invalid" in error["message"]


@pytest.mark.end_to_end
def test_rank_that_waits_for_rank_0_ends_at_sigterm(tmp_path):
    with socket.create_server(("127.0.0.1", free_port())) as silent_program:
        port = silent_program.getsockname()[1]
        rank = _start(1, 2, port, "--job_folder", str(tmp_path))
        silent_program.accept()
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == 128 + signal.SIGTERM


def test_value_of_a_program_without_the_key_is_rejected(tmp_path):
    create_key(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    store = dist.HashStore()
    signed = SignedStore(store, tmp_path)
    signed.set("rank 0", ["cn1", None])
    assert signed.get_all(["rank 0"]) == [["cn1", None]]
    SignedStore(store, None).set("rank 1", ["cn2", None])
    store.set("rank 2", store.get("rank 0").decode())  # replayed
    for name in ("rank 1", "rank 2"):
        with pytest.raises(UnreachableError, match=f"{name} .*key"):
            signed.get_all(["rank 0", name])


@pytest.mark.parametrize(("address", "interface"), [("127.0.1.1", "lo"), ("10.0.0.1", None)])
def test_host_whose_name_is_local_gets_an_interface(monkeypatch, address, interface):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    rendezvous._choose_interface(Ranks(0, 2, 0, 1, ("node1", "localhost")))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
