"""Command lines of a host's ranks, and the GPUs they see."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import rank_commands as module
from clap_ds.launch.rank_commands import rank_commands, visible_gpus

SLOTS = {"n1": 4, "n2": 2, "n3": 1}


def _start(launcher: str, **changes: Any) -> dict[str, Any]:
    message = {
        "launcher": launcher, "slots": SLOTS, "address": "n1", "port": 17000, "wrapper": [], "python": "/py",
        "command": ["a.py", "--x", "y z"],
    }  # fmt: skip
    return {**message, **changes}


def _option(command: list[str], name: str) -> str:
    (found,) = (word.partition("=")[2] for word in command if word.startswith(f"--{name}="))
    return found


@pytest.mark.parametrize("launcher", ["ssh", "slurm"])
def test_deepspeed_knows_all_hosts_and_this_ones_gpus(launcher: str) -> None:
    ((command, variables),) = rank_commands(_start(launcher), "n2", ["3", "GPU-5e"])
    assert command[:4] == ["/py", "-u", "-m", "deepspeed.launcher.launch"]
    assert command[-4:] == ["--no_local_rank", "a.py", "--x", "y z"]
    assert [_option(command, name) for name in ("node_rank", "master_addr", "master_port")] == ["1", "n1", "17000"]
    world = json.loads(base64.urlsafe_b64decode(_option(command, "world_info")))
    assert world == {"n1": [0, 1, 2, 3], "n2": ["3", "GPU-5e"], "n3": [0]}
    assert list(world) == list(SLOTS), "ranks are counted in this order"
    assert variables == {}, "DeepSpeed's launcher sets them"


def test_torchrun() -> None:
    ((command, variables),) = rank_commands(_start("torchrun"), "n2", ["4", "6"])
    assert command[:4] == ["/py", "-u", "-m", "torch.distributed.run"]
    assert command[-3:] == ["a.py", "--x", "y z"]
    names = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
    assert [_option(command, name) for name in names] == ["3", "1", "2", "n1", "17000"]
    assert variables == {"CUDA_VISIBLE_DEVICES": "4,6"}


def test_one_by_one() -> None:
    commands = [
        each
        for name, number in SLOTS.items()
        for each in rank_commands(_start("srun"), name, ["7", "8", "9", "10"][:number])
    ]
    assert all(command == ["/py", "-u", "a.py", "--x", "y z"] for command, _ in commands)
    variables = [each for _, each in commands]
    assert [each["RANK"] for each in variables] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [each["LOCAL_RANK"] for each in variables] == ["0", "1", "2", "3", "0", "1", "0"]
    assert [each["LOCAL_WORLD_SIZE"] for each in variables] == ["4"] * 4 + ["2"] * 2 + ["1"]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables} == {
        ("7", "n1", "17000")
    }
    assert variables[4]["CUDA_VISIBLE_DEVICES"] == "7,8", "a rank chooses its own of all of its host"


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "srun", "torchrun"])
def test_wrapper_comes_first(launcher: str) -> None:
    wrapper = ["apptainer", "exec", "--nv", "/i.sif"]
    for command, _ in rank_commands(_start(launcher, wrapper=wrapper), "n1", ["0", "1", "2", "3"]):
        assert command[:6] == [*wrapper, "/py", "-u"]


@pytest.mark.parametrize(
    ("given", "in_slurm", "devices", "allocated", "expected"),
    [
        (None, True, 8, ["2", "3", "5"], ["2", "3"]),  # all of the host's are seen: the allocation's are chosen
        (None, True, 3, ["2", "3", "5"], ["0", "1"]),  # the others are hidden, and these are counted from 0
        ("4,6,7", True, 8, ["0", "1", "2"], ["4", "6"]),  # as SLURM says here
        ("4,6,7", False, 8, [], ["0", "1"]),  # somebody's setting on a host reached without SLURM
        (None, True, 0, [], ["0", "1"]),
        (None, True, 8, ["2"], ["0", "1"]),  # fewer than ranks
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    in_slurm: bool,
    devices: int,
    allocated: list[str],
    expected: list[str],
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", given), ("SLURM_JOB_ID", "1" if in_slurm else None)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_devices", lambda: devices)
    assert visible_gpus(2, allocated) == expected


def test_devices_are_those_that_can_be_opened(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / name).touch()
    os.symlink(tmp_path / "nowhere", tmp_path / "nvidia2")  # a group that is refused a device has an error, too
    assert module._devices(str(tmp_path)) == 2
