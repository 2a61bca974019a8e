"""A GPU that torch can't use ends a run with the reason; machines without one, and who wants the CPUs, are left in peace."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from clap_ds.config.errors import UserError
from clap_ds.ranks import accelerator, distributed
from clap_ds.ranks.accelerator import choose_accelerator, choose_device
from tests import processes
from tests.rank_pool import free_port

ROOT = Path(__file__).resolve().parents[2]
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 11.4.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs-builder)  Sat May 24\n"
OF_SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is chosen on a machine with such files, programs and variables; without a GPU where nothing is said."""
    places = {"DEVICE_FILES": str(tmp_path / "nvidia[0-9]*"), "DRIVER_FILE": tmp_path / "version"}
    for name, place in {**places, "PCI_DEVICES": tmp_path / "pci"}.items():
        monkeypatch.setattr(accelerator, name, place)
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", *OF_SLURM):
        monkeypatch.setenv(name, "")  # so that it is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nsecond line")

    def choice(
        *, device: bool = False, driver: str = "", smi: str | None = None, bus: str = "", cuda: str | None = "13.0",
        works: bool = False, **variables: str,
    ) -> str:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        if device:
            (tmp_path / "nvidia0").touch()
        if driver:
            (tmp_path / "version").write_text(driver)
        if smi is not None:
            write_program(tmp_path / "nvidia-smi", f"echo '{smi or 'NVIDIA-SMI has failed'}'; exit {0 if smi else 9}")
        if bus:
            (tmp_path / "pci" / "0000:01").mkdir(parents=True)
            (tmp_path / "pci" / "0000:01" / "vendor").write_text(f"{bus}\n")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return choose_accelerator()

    return choice


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


CANT = "this machine has a GPU that torch can't use: the driver is"
NVIDIA, TOO_OLD = (
    "0x10de",
    "torch 2.13.0 is built for CUDA 13.0; torch says: The NVIDIA driver on your system is too old.",
)


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, "cpu"),
        ({"bus": NVIDIA}, "cpu"),  # of a container's host, perhaps
        ({"bus": "0x8086", "smi": ""}, "cpu"),
        ({"device": True, "works": True}, "cuda"),
        ({"device": True, "works": True, "DS_ACCELERATOR": "cpu"}, "cpu"),
        ({"device": True, "DS_ACCELERATOR": "cpu", "SLURM_JOB_GPUS": "0"}, "cpu"),
        *(({"device": True, "CUDA_VISIBLE_DEVICES": hidden}, "cpu") for hidden in ("", "-1", "NoDevFiles")),
        *(({name: nothing}, "cpu") for name, nothing in zip(OF_SLURM, ("", "", "0"), strict=True)),
        ({"SLURM_STEP_GPUS": "0,1"}, "SLURM has granted this process GPUs (SLURM_STEP_GPUS=0,1), and it sees none"),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}, "GPUs (SLURM_JOB_GPUS=0), and it sees none"),
        (
            {"SLURM_GPUS_ON_NODE": "4", "device": True, "CUDA_VISIBLE_DEVICES": ""},
            "(SLURM_GPUS_ON_NODE=4), and it sees",
        ),
        ({"device": True, "CUDA_VISIBLE_DEVICES": "0"}, "DS_ACCELERATOR=cpu runs on the CPUs all the same"),
        ({"device": True, "driver": PROPRIETARY}, f"{CANT} 550.54.15, {TOO_OLD} docs/cluster.md"),
        ({"device": True, "driver": OPEN}, f"{CANT} 575.57.08, torch"),
        ({"bus": NVIDIA, "smi": ""}, f"{CANT} not running, torch"),
        ({"smi": "NVIDIA GB10, [N/A], 570.86.10"}, f"{CANT} 570.86.10, torch"),
        ({"device": True, "driver": OPEN, "cuda": None}, f"{CANT} 575.57.08, torch 2.13.0 is built without CUDA;"),
    ],
)
def test_choice(machine: Callable[..., str], has: dict[str, Any], expected: str) -> None:
    if expected in ("cpu", "cuda"):
        assert machine(**has) == expected
        assert (os.environ.get("DS_ACCELERATOR") == "cpu") == (expected == "cpu")  # for DeepSpeed
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            machine(**has)


@pytest.mark.parametrize(
    ("variable", "cuda_graphs", "expected"),
    [
        ("", False, ["expandable_segments:True"]),
        ("PYTORCH_ALLOC_CONF", False, []),
        ("PYTORCH_CUDA_ALLOC_CONF", False, []),
        ("", True, []),
    ],
)
def test_cuda_is_set_up_unless_the_user_has(
    monkeypatch: pytest.MonkeyPatch, variable: str, cuda_graphs: bool, expected: list[str]
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in accelerator.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "garbage_collection_threshold:0.8" if name == variable else "")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        accelerator.set_up_cuda(cuda_graphs=cuda_graphs)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert given == expected


@pytest.mark.parametrize(
    ("there", "visible", "local_rank", "expected"),
    [
        (4, "0,1,2,3", 2, "cuda:2"),
        (1, "2", 2, "cuda:0"),  # `--gpus-per-task`
        (1, "", 2, "cuda:0"),
        (1, "0,1,2,3", 2, "which has 1 visible GPUs"),
        (2, "0,1", 2, "which has 2 visible GPUs"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_its_own(
    monkeypatch: pytest.MonkeyPatch, there: int, visible: str, local_rank: int, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(accelerator, "choose_accelerator", lambda: "cuda")
    chosen: list[Any] = []
    monkeypatch.setattr(accelerator, "set_up_cuda", lambda *, cuda_graphs: chosen.append(cuda_graphs))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if expected.startswith("cuda"):
        assert choose_device(7, local_rank, cuda_graphs=True) == torch.device(expected)
        assert chosen == [True, int(expected[-1])]
    else:
        with pytest.raises(UserError, match=f"rank 7 is number {local_rank} on .*{expected}"):
            choose_device(7, local_rank, cuda_graphs=True)


@pytest.mark.parametrize(("device", "world_size", "bound"), [("cuda:1", 2, True), ("cuda:0", 1, False)])
def test_nccl_is_bound_to_the_rank_s_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, world_size: int, bound: bool
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed, "choose_device", lambda *_, cuda_graphs: torch.device(device))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    met: list[Any] = []
    monkeypatch.setattr(distributed, "meet", lambda *how: met.extend(how))
    ranks = distributed.Ranks(0, world_size, 0, world_size)
    assert distributed.initialize(ranks, compile_cpu_collective=False) == torch.device(device)
    assert met[2:5] == ["nccl", (), torch.device(device) if bound else None]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with a `python` whose DeepSpeed launcher only prints its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = '[ "$2" != deepspeed.launcher.runner ] || { echo "DS_ACCELERATOR=$DS_ACCELERATOR $@"; exit 0; }'
    write_program(folder / "python", f'{launcher}\nexec "{sys.executable}" "$@"')
    return folder


def surroundings(programs: Path, **variables: str) -> dict[str, str]:
    """The tests' own environment, with these programs first and nothing said of what to compute on."""
    left_out = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**inherited, "PATH": f"{programs}{os.pathsep}{inherited['PATH']}", **variables}


def make_bench(programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = ["make", "bench", f"PYTHON={programs / 'python'}"], surroundings(programs, **variables)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.end_to_end
def test_make_bench_on_the_cpus(programs: Path) -> None:
    done = make_bench(programs, DS_ACCELERATOR="cpu")
    assert (done.returncode, done.stderr) == (0, "")
    device, command, started = done.stdout.splitlines()
    run = "--num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_cpu.json"
    assert (device, command) == ("no GPU in use: two ranks on the CPUs", f"deepspeed {run}")
    assert started.startswith("DS_ACCELERATOR=cpu -m deepspeed.launcher.runner --quiet --master_port ")
    assert started.endswith(run)


@pytest.mark.end_to_end
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
def test_make_bench_and_the_ranks_refuse_a_gpu_that_cannot_be_used(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 550.54.15'")
    done = make_bench(programs)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error: this machine has a GPU that torch can't use: ") == 1
    assert "550.54.15" in done.stderr

    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["clap_ds/bench.py", "--deepspeed_config", "ds_configs/htsat_tiny_cpu.json"]
    brief = {"clap_ds.ranks.distributed.RANK_0_SPEAKS_S": 3.0}
    ranks = [
        processes.Command(command, env=surroundings(programs, **meeting, RANK=rank, LOCAL_RANK=rank), constants=brief)
        for rank in "01"
    ]
    assert [rank.wait() for rank in ranks] == [2, 2]
    outputs = [rank.stdout + rank.stderr for rank in ranks]
    assert outputs[0].startswith("error: this machine has a GPU that torch can't use: ")
    assert (outputs[0].count("\n"), outputs[1]) == (1, "")
