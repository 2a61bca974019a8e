"""A GPU that torch can't use ends a run with the reason; machines without one, and who wants the CPUs, are left in peace."""

import os
import re
import subprocess
import sys
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
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


class Machine:
    """The files and programs by which a machine shows its GPUs; at first it has none."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.programs = folder, monkeypatch, folder / "bin"
        self.programs.mkdir()
        places = {"DEVICE_FILES": str(folder / "nvidia[0-9]*"), "DRIVER_FILE": folder / "version"}
        for name, place in {**places, "PCI_DEVICES": folder / "pci"}.items():
            monkeypatch.setattr(accelerator, name, place)
        monkeypatch.setenv("PATH", str(self.programs))
        of_slurm = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
        for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", *of_slurm):
            monkeypatch.setenv(name, "")  # so that it is restored after the test
            monkeypatch.delenv(name)
        self.torch(cuda="13.0")

    def torch(self, cuda: str | None, is_available: bool = False) -> None:
        def init() -> None:
            raise RuntimeError(f"{TOO_OLD}\nsecond line")

        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        self.monkeypatch.setattr(torch.cuda, "init", init)
        self.monkeypatch.setattr(torch.version, "cuda", cuda)
        self.monkeypatch.setattr(torch, "__version__", "2.13.0")

    def choice(self) -> str:
        """As by a process that hasn't chosen yet."""
        self.monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        return choose_accelerator()

    def nvidia_smi(self, says: str, code: int = 0) -> None:
        write_program(self.programs / "nvidia-smi", f"echo '{says}'; exit {code}")

    def pci(self, vendor: str) -> None:
        device = self.folder / "pci" / f"0000:{vendor}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_a_gpu_it_is_the_cpu(machine: Machine) -> None:
    assert machine.choice() == "cpu"
    machine.pci("0x8086")
    machine.nvidia_smi("NVIDIA-SMI has failed", code=9)
    assert machine.choice() == "cpu"
    (machine.programs / "nvidia-smi").unlink()
    machine.pci("0x10de")  # of a container's host, perhaps
    assert machine.choice() == "cpu"
    assert os.environ["DS_ACCELERATOR"] == "cpu"  # for DeepSpeed


def test_a_gpu_that_works_is_taken_unless_the_cpus_are_asked_for(machine: Machine) -> None:
    (machine.folder / "nvidia0").touch()
    for hidden in ("", "-1", "NoDevFiles"):
        machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert machine.choice() == "cpu"
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="DS_ACCELERATOR=cpu runs on the CPUs all the same"):
        machine.choice()
    machine.torch(cuda="13.0", is_available=True)
    assert machine.choice() == "cuda"
    machine.monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_accelerator() == "cpu"


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


@pytest.mark.parametrize("variable", ["SLURM_STEP_GPUS=0,1", "SLURM_JOB_GPUS=0", "SLURM_GPUS_ON_NODE=4"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_gpus_that_slurm_grants_and_nobody_sees_end_the_run(machine: Machine, variable: str, is_hidden: bool) -> None:
    name, _, value = variable.partition("=")
    machine.monkeypatch.setenv(name, value)
    if is_hidden:
        machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=f"SLURM has granted this process GPUs \\({variable}\\), and it sees none"):
        machine.choice()
    machine.monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_accelerator() == "cpu"
    for nothing in ("", "0") if name == "SLURM_GPUS_ON_NODE" else ("",):
        machine.monkeypatch.setenv(name, nothing)
        assert machine.choice() == "cpu"


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


@pytest.mark.parametrize(
    ("driver", "smi", "cuda", "reason"),
    [
        (
            PROPRIETARY,
            "",
            "13.0",
            "the driver is 550.54.15, torch 2.13.0 is built for CUDA 13.0; torch says: The NVIDIA dr",
        ),
        (OPEN, "", "13.0", "the driver is 575.57.08, torch"),
        ("", "", "13.0", "the driver is not running, torch"),
        ("", "NVIDIA GB10, [N/A], 570.86.10", "13.0", "the driver is 570.86.10, torch"),
        (PROPRIETARY, "", None, "the driver is 550.54.15, torch 2.13.0 is built without CUDA;"),
    ],
)
def test_a_gpu_that_cannot_be_used_ends_with_the_reason(
    machine: Machine, driver: str, smi: str, cuda: str | None, reason: str
) -> None:
    machine.pci("0x10de")
    machine.nvidia_smi(smi or "NVIDIA-SMI has failed", code=0 if smi else 9)
    if driver:
        (machine.folder / "nvidia0").touch()
        (machine.folder / "version").write_text(driver)
    machine.torch(cuda)
    with pytest.raises(UserError, match=re.escape(f"this machine has a GPU that torch can't use: {reason}")):
        machine.choice()


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
