"""A GPU that torch can't use ends a run with the reason; machines without one, and who wants the CPUs, are left in peace."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.dist import accelerator
from clap_ds.dist.accelerator import choose_accelerator
from clap_ds.config.errors import UserError
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 11.4.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs-builder)  Sat May 24\n"


class Machine:
    """The files and programs by which a machine shows its GPUs; at first it has none."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.programs = folder / "bin"
        self.programs.mkdir()
        monkeypatch.setattr(accelerator, "DEVICE_FILES", str(folder / "nvidia[0-9]*"))
        monkeypatch.setattr(accelerator, "DRIVER_FILE", folder / "version")
        monkeypatch.setattr(accelerator, "PCI_DEVICES", folder / "pci")
        monkeypatch.setenv("PATH", str(self.programs))
        for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
            monkeypatch.setenv(name, "")  # so that it is restored after the test
            monkeypatch.delenv(name)
        self.torch(cuda="13.0")

    def torch(self, cuda: str | None, is_available: bool = False, version: str = "2.13.0") -> None:
        def init() -> None:
            raise RuntimeError("Error 802: system not yet initialized\nsecond line")

        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        self.monkeypatch.setattr(torch.cuda, "init", init)
        self.monkeypatch.setattr(torch.version, "cuda", cuda)
        self.monkeypatch.setattr(torch, "__version__", version)

    def choice(self) -> str:
        """As by a process that hasn't chosen yet."""
        self.monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        return choose_accelerator()

    def device_file(self) -> None:
        (self.folder / "nvidia0").touch()

    def driver(self, text: str) -> None:
        (self.folder / "version").write_text(text)

    def nvidia_smi(self, says: str, code: int = 0) -> None:
        write_program(self.programs / "nvidia-smi", f"echo '{says}'; exit {code}")

    def pci(self, vendor: str, kind: str) -> None:
        device = self.folder / "pci" / f"0000:{vendor}{kind}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_a_gpu_it_is_the_cpu(machine: Machine) -> None:
    assert machine.choice() == "cpu"
    machine.pci("0x10de", "0x030200")  # of a container's host, perhaps
    assert machine.choice() == "cpu"
    machine.nvidia_smi("NVIDIA-SMI has failed", code=9)
    machine.folder.joinpath("pci", "0000:0x10de0x030200", "class").write_text("0x040300\n")  # its sound
    assert machine.choice() == "cpu"
    machine.nvidia_smi("No devices were found")
    assert machine.choice() == "cpu"


def test_a_gpu_that_works_is_taken(machine: Machine) -> None:
    machine.device_file()
    machine.torch(cuda="13.0", is_available=True)
    assert machine.choice() == "cuda"


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "550.54.15"), (OPEN, "575.57.08")])
def test_an_old_driver_is_told_with_both_versions(machine: Machine, text: str, version: str) -> None:
    machine.device_file()
    machine.driver(text)
    with pytest.raises(UserError) as refused:
        machine.choice()
    assert f"driver {version} is too old: torch 2.13.0 is built for CUDA 13.0, which needs driver ≥ 580." in str(
        refused.value
    )
    assert "DS_ACCELERATOR=cpu" in str(refused.value)


def test_the_driver_s_version_comes_from_nvidia_smi_where_the_kernel_does_not_tell(machine: Machine) -> None:
    machine.nvidia_smi("NVIDIA GB10, [N/A], 570.86.10")
    with pytest.raises(UserError, match=r"driver 570.86.10 is too old"):
        machine.choice()


def test_a_driver_that_does_not_run_is_told(machine: Machine) -> None:
    machine.nvidia_smi("NVIDIA-SMI has failed", code=9)
    machine.pci("0x10de", "0x030200")
    with pytest.raises(UserError, match=r"no NVIDIA driver is running; torch 2.13.0 is built for CUDA 13.0"):
        machine.choice()


def test_a_torch_without_cuda_is_told_and_not_the_driver(machine: Machine) -> None:
    machine.device_file()
    machine.driver(PROPRIETARY)
    machine.torch(cuda=None, version="2.13.0+cpu")
    with pytest.raises(UserError, match=r"torch 2.13.0\+cpu is built without CUDA") as refused:
        machine.choice()
    assert "too old" not in str(refused.value)


def test_other_reasons_are_told_in_torch_s_words(machine: Machine) -> None:
    machine.device_file()
    machine.driver(PROPRIETARY)
    machine.torch(cuda="12.6")
    with pytest.raises(
        UserError, match=r"driver 550.54.15; .*torch says: Error 802: system not yet initialized"
    ):
        machine.choice()


def test_the_cpus_can_be_asked_for(machine: Machine) -> None:
    machine.device_file()
    machine.driver(PROPRIETARY)
    for hidden in ("", "-1", "NoDevFiles"):
        machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert machine.choice() == "cpu"
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="too old"):
        machine.choice()
    machine.torch(cuda="13.0", is_available=True)
    machine.monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_accelerator() == "cpu"


def test_deepspeed_computes_on_the_cpus_as_well(machine: Machine) -> None:
    assert machine.choice() == "cpu"
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_torch_s_cuda_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version, cuda = accelerator.torch_cuda()
    assert (version, cuda) == (str(torch.__version__), torch.version.cuda)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    assert accelerator.torch_cuda() == (None, None)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    lines = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(lines)
    assert accelerator.torch_cuda() == ("2.13.0+cu130", "13.0")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with a `python` whose DeepSpeed launcher only prints its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = '[ "$2" != deepspeed.launcher.runner ] || { echo "DS_ACCELERATOR=$DS_ACCELERATOR $@"; exit 0; }'
    write_program(folder / "python", f'{launcher}\nexec "{sys.executable}" "$@"')
    return folder


def environment(programs: Path, **variables: str) -> dict[str, str]:
    """The tests' own, with these programs first and nothing said of what to compute on."""
    left_out = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**inherited, "PATH": f"{programs}{os.pathsep}{inherited['PATH']}", **variables}


def make_bench(programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "bench", f"PYTHON={programs / 'python'}"]
    env = environment(programs, **variables)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")


@pytest.mark.end_to_end
def test_make_bench_on_the_cpus(programs: Path) -> None:
    done = make_bench(programs, DS_ACCELERATOR="cpu")
    device, said, started = done.stdout.splitlines()
    run = "--num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_cpu.json"
    assert (device, said) == ("no GPU in use: two ranks on the CPUs", f"deepspeed {run}")
    assert started.startswith("DS_ACCELERATOR=cpu -m deepspeed.launcher.runner --quiet --master_port ")
    assert started.endswith(run)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.end_to_end
@without_cuda
def test_make_bench_and_the_ranks_refuse_a_gpu_that_cannot_be_used(programs: Path, tmp_path: Path) -> None:
    write_program(programs / "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 550.54.15'")
    done = make_bench(programs)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error: this machine has a GPU that torch can't use: ") == 1
    assert "550.54.15" in done.stderr

    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "clap_ds/bench.py", "--deepspeed_config", "ds_configs/htsat_tiny_cpu.json"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(programs, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], told
    assert told[0].startswith("error: this machine has a GPU that torch can't use: ")
    assert told[0].count("\n") == 1
    assert told[1] == ""
