"""An unusable GPU ends a run with the reason, unless there is none or CPUs were requested."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.distributed import accelerator
from clap_ds.distributed.accelerator import choose_accelerator, choose_device
from clap_ds.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, "cpu"),
        ({"device": True, "works": True}, "cuda"),
        ({"device": True, "works": True, "DS_ACCELERATOR": "cpu"}, "cpu"),
        ({"device": True, "CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"SLURM_GPUS_ON_NODE": "0"}, "cpu"),
        (
            {"SLURM_GPUS_ON_NODE": "4", "device": True, "CUDA_VISIBLE_DEVICES": ""},
            "SLURM_GPUS_ON_NODE=4",
        ),
        ({"device": True}, "nvidia0: the driver is too old"),
    ],
)
def test_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: dict[str, Any], expected: str
) -> None:
    def init() -> None:
        raise RuntimeError("the driver is too old.\nsecond line")

    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "SLURM_GPUS_ON_NODE"):
        monkeypatch.setenv(name, has.get(name, ""))  # restored after the test
        if name not in has:
            monkeypatch.delenv(name)
    monkeypatch.setattr(accelerator, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "works" in has)
    monkeypatch.setattr(torch.cuda, "init", init)
    if "device" in has:
        (tmp_path / "nvidia0").touch()
    if expected in ("cpu", "cuda"):
        assert choose_accelerator() == expected
        assert (os.environ.get("DS_ACCELERATOR") == "cpu") == (expected == "cpu")  # for DeepSpeed
    else:
        with pytest.raises(UserError, match=expected):
            choose_accelerator()


@pytest.mark.parametrize(
    ("there", "visible", "local_rank", "expected"),
    [
        (4, "0,1,2,3", 2, "cuda:2"),
        (1, "2", 2, "cuda:0"),  # `--gpus-per-task`
        (2, "0,1", 2, "2 visible GPUs"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_its_own(
    monkeypatch: pytest.MonkeyPatch, there: int, visible: str, local_rank: int, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(accelerator, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(accelerator, "set_up_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    if expected.startswith("cuda"):
        assert choose_device(7, local_rank) == torch.device(expected)
        assert os.environ["LOCAL_RANK"] == expected[-1]  # read by DeepSpeed's engine
    else:
        with pytest.raises(UserError, match=expected):
            choose_device(7, local_rank)


@pytest.mark.end_to_end
def test_make_bench_on_the_cpus(tmp_path: Path) -> None:
    """Use a `python` that prints the launcher's arguments instead of starting ranks."""
    launcher = '[ "$2" != deepspeed.launcher.runner ] || { echo "DS_ACCELERATOR=$DS_ACCELERATOR $@"; exit 0; }'
    (tmp_path / "python").write_text(f'#!/bin/sh\n{launcher}\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    command = ["make", "bench", f"PYTHON={tmp_path / 'python'}"]
    env |= {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    started = done.stdout.splitlines()[-1]
    assert started.startswith(
        "DS_ACCELERATOR=cpu -m deepspeed.launcher.runner --quiet --master_port "
    )
    assert " --num_gpus 2 clap_ds/bench.py" in started
