"""A rank's place by SLURM's variables, and hosts beside the allocation."""

import os

import pytest

from clap_ds.config.errors import UserError
from clap_ds.ranks.distributed import Ranks

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


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and no SLURM; what the code under test sets is undone."""
    for name in [*PLACE, *(name for name in os.environ if name.startswith("SLURM"))]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "place", "address"),
    [
        (STEP, Ranks(9, 10, 1, 2), ("n08", "22832")),
        ({**STEP, "SLURM_PROCID": "0"}, Ranks(0, 10, 1, 2), ("n08", "22832")),  # every rank computes the same port
        ({**STEP, **LAUNCHER}, Ranks(3, 4, 1, 2), (None, None)),  # a launcher has the last word
        (ONE_TASK, Ranks(0, 1, 0, 1), (None, None)),
        (BATCH_STEP, Ranks(0, 1, 0, 1), (None, None)),
        ({**ONE_TASK, "SLURM_STEP_ID": "4294967291"}, Ranks(0, 1, 0, 1), (None, None)),
    ],
)
def test_place_in_a_slurm_step(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: Ranks, address: tuple[str | None, str | None]
) -> None:
    _set(monkeypatch, variables)
    assert Ranks.from_environment() == place
    assert (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == address
    # What is no rank of a step is none afterwards, either.
    assert ("RANK" in os.environ) == (variables.get("SLURM_STEP_ID", "") in ("1",))


@pytest.mark.parametrize("here", ["node2", "node2.cluster.org"])
@pytest.mark.parametrize("nodes", ["node[1-2]", "node1.cluster.org,node2.cluster.org"])
def test_a_host_beside_the_allocation_is_refused(monkeypatch: pytest.MonkeyPatch, here: str, nodes: str) -> None:
    _set(monkeypatch, {"SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": here})
    assert Ranks.from_environment() == Ranks(0, 1, 0, 1)
    _set(monkeypatch, LAUNCHER)
    assert Ranks.from_environment() == Ranks(3, 4, 1, 2)
    monkeypatch.setenv("SLURMD_NODENAME", "login1")
    with pytest.raises(UserError, match=r"this host, login1, isn't in the allocation, .*: .* give it --force_multi"):
        Ranks.from_environment()
    monkeypatch.delenv("RANK")  # a command that no launcher starts may run where it likes
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(0, 1, 0, 1)


def test_a_hosts_own_name_is_taken_where_slurm_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {**LAUNCHER, "SLURM_JOB_NODELIST": "node[1-2]"})
    with pytest.raises(UserError, match=f"this host, {os.uname().nodename}, isn't"):
        Ranks.from_environment()
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"node[1-2],{os.uname().nodename}")
    assert Ranks.from_environment() == Ranks(3, 4, 1, 2)
