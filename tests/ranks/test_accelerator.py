"""A GPU that torch can't use ends a run with the reason; machines without one, and who wants the CPUs, are left in peace."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from clap_ds.config.errors import UserError
from clap_ds.ranks import accelerator, distributed
from clap_ds.ranks.accelerator import choose_accelerator, choose_device
from tests.conftest import micro_run
from tests.processes import run

ROOT = Path(__file__).resolve().parents[2]
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)"
LISTED = "NVIDIA H100, 81559 MiB, 550.54.15"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, "cpu"),
        ({"device": True, "works": True}, "cuda"),
        ({"device": True, "works": True, "DS_ACCELERATOR": "cpu"}, "cpu"),
        *(({"device": True, "CUDA_VISIBLE_DEVICES": hidden}, "cpu") for hidden in ("", "-1", "NoDevFiles")),
        ({"SLURM_GPUS_ON_NODE": "0"}, "cpu"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "can't use: SLURM_GPUS_ON_NODE=4. torch"),
        ({"SLURM_GPUS_ON_NODE": "4", "device": True, "CUDA_VISIBLE_DEVICES": ""}, "can't use: SLURM_GPUS_ON_NODE=4."),
        ({"device": True}, f"/nvidia0. torch 2.13.0 (CUDA 13.0) says: {TOO_OLD}. docs/cluster.md"),
        ({"device": True, "CUDA_VISIBLE_DEVICES": "0"}, "DS_ACCELERATOR=cpu runs on the CPUs all the same"),
        ({"smi": "echo 'NVIDIA-SMI has failed'; exit 9"}, "cpu"),
        ({"smi": f"echo '{LISTED}'"}, f"this machine has a GPU that torch can't use: {LISTED}. torch"),
    ],
)
def test_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: dict[str, Any], expected: str) -> None:
    def init() -> None:
        raise RuntimeError(f"{TOO_OLD}.\nsecond line")

    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "SLURM_GPUS_ON_NODE"):
        monkeypatch.setenv(name, has.get(name, ""))  # so that it is restored after the test
        if name not in has:
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(accelerator, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "works" in has)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    if "device" in has:
        (tmp_path / "nvidia0").touch()
    if "smi" in has:
        write_program(tmp_path / "nvidia-smi", has["smi"])
    if expected in ("cpu", "cuda"):
        assert choose_accelerator() == expected
        assert (os.environ.get("DS_ACCELERATOR") == "cpu") == (expected == "cpu")  # for DeepSpeed
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            choose_accelerator()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("", ["expandable_segments:True"]), *((name, []) for name in accelerator.ALLOCATOR_VARIABLES)],
)
def test_cuda_is_set_up_unless_the_user_has(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: list[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", given.append)
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    for name in names:
        setattr(torch.backends.cuda.matmul, name, True)
    for name in accelerator.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "garbage_collection_threshold:0.8" if name == variable else "")
    accelerator.set_up_cuda()
    assert given == [False, *expected]
    assert [getattr(torch.backends.cuda.matmul, name) for name in names] == [False, False]


@pytest.mark.parametrize(
    ("there", "visible", "local_rank", "expected"),
    [
        (4, "0,1,2,3", 2, "cuda:2"),
        (1, "2", 2, "cuda:0"),  # `--gpus-per-task`
        (1, "0,1,2,3", 2, "which has 1 visible GPUs"),
        (2, "0,1", 2, "which has 2 visible GPUs"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_its_own(
    monkeypatch: pytest.MonkeyPatch, there: int, visible: str, local_rank: int, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(accelerator, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(real_accelerator, "ds_accelerator", CUDA_Accelerator())
    chosen: list[Any] = []
    monkeypatch.setattr(accelerator, "set_up_cuda", lambda: chosen.append("set up"))
    monkeypatch.setattr(accelerator, "stay_near", lambda gpu: chosen.append(f"near {gpu}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if expected.startswith("cuda"):
        assert choose_device(7, local_rank) == torch.device(expected)
        assert chosen == ["set up", f"near {expected[-1]}", int(expected[-1])]
        assert os.environ["LOCAL_RANK"] == expected[-1]  # which DeepSpeed's engine takes
    else:
        with pytest.raises(UserError, match=f"rank 7 is number {local_rank} on .*{expected}"):
            choose_device(7, local_rank)


def test_another_accelerator_of_deepspeed_is_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    xpu = SimpleNamespace(device_name=lambda: "xpu", device_count=lambda: 2, set_device=chosen.append)
    xpu.visible_devices_envs = lambda: ["ZE_AFFINITY_MASK"]
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    with pytest.raises(UserError, match="DS_ACCELERATOR=xpu: XPU_Accelerator requires PyTorch with XPU support"):
        choose_device(0, 0)
    monkeypatch.setattr(real_accelerator, "ds_accelerator", xpu)
    assert (choose_device(1, 1), chosen) == (torch.device("xpu:1"), [1])


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_run_goes_by_deepspeed_s_accelerator_alone(tmp_path: Path, command: str) -> None:
    """Without a GPU, where calls of `torch.cuda` raise."""
    clap: dict[str, Any] = {"output": {"root": str(tmp_path / "runs")}, "train": {"samples": 12}}
    clap["checkpoint"] = {"folder": str(tmp_path / "kept")}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(micro_run(clap=clap)))
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = run(["tests/ranks/stand_in.py", f"clap_ds/{command}.py", "--deepspeed_config", config], env=env, check=True)
    asked = set(re.findall("asked for (.*)", done.stdout))
    assert asked >= {"Event", "Stream", "stream", "current_stream", "synchronize", "record_stream"}
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["memory_peak_bytes"], found["memory_reserved_peak_bytes"]) == (5 << 30, 7 << 30)


@pytest.mark.parametrize(("cores", "bus", "expected"), [(4, 27, ["near 27"]), (4, 28, []), (2, 27, [])])
def test_a_rank_stays_near_its_gpu(monkeypatch: pytest.MonkeyPatch, cores: int, bus: int, expected: list[str]) -> None:
    near: list[str] = []
    known = {"00000001:1b:03.0": "near 27"}  # NVML fails for others
    nvml: Any = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceSetCpuAffinity=near.append)
    nvml.nvmlDeviceGetHandleByPciBusId = known.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    its = SimpleNamespace(pci_domain_id=1, pci_bus_id=bus, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: its}.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(accelerator, "CORES", cores)
    accelerator.stay_near(1)
    assert near == expected


@pytest.mark.parametrize(
    ("there", "compiler", "expected"),
    [("gcc Python.h", "", ""), ("clang Python.h", "", ""), ("gcc Python.h", "mycc", "no C compiler,"),
     ("mycc", "mycc", "no {}/Python.h,"), ("cc", "", "no C compiler and no {}/Python.h,")],
)  # fmt: skip
def test_what_triton_compiles_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, compiler: str, expected: str
) -> None:
    for name in there.split():
        write_program(tmp_path / name, "")
    monkeypatch.setattr(accelerator.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert accelerator.triton_lacks().partition(" so Triton")[0] == expected.format(tmp_path)


@pytest.mark.parametrize(("device", "world_size", "bound"), [("cuda:1", 2, True), ("cuda:0", 1, False)])
def test_nccl_is_bound_to_the_rank_s_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, world_size: int, bound: bool
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed, "choose_device", lambda *_: torch.device(device))
    monkeypatch.setattr(real_accelerator, "ds_accelerator", CUDA_Accelerator())
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    met: list[Any] = []
    monkeypatch.setattr(distributed, "meet", lambda *how: met.extend(how))
    ranks = distributed.Ranks(0, world_size, 0, world_size)
    assert distributed.initialize(ranks, compile_cpu_collective=False) == torch.device(device)
    assert met[2:5] == ["nccl", (), torch.device(device) if bound else None]


@pytest.mark.end_to_end
def test_make_bench_on_the_cpus(tmp_path: Path) -> None:
    """With a `python` that starts no ranks, but prints the arguments."""
    launcher = '[ "$2" != clap_ds.ranks.start ] || { echo "DS_ACCELERATOR=$DS_ACCELERATOR $@"; exit 0; }'
    write_program(tmp_path / "python", f'{launcher}\nexec "{sys.executable}" "$@"')
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "bench", f"PYTHON={tmp_path / 'python'}"]
    env |= {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    device, typed, started = done.stdout.splitlines()
    run = "--num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_cpu.json"
    assert (device, typed) == ("no GPU in use: two ranks on the CPUs", f"deepspeed {run}")
    assert started == f"DS_ACCELERATOR=cpu -m clap_ds.ranks.start {run}"
