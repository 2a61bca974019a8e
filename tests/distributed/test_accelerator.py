"""An unusable GPU ends a run with the reason, unless there is none or CPUs were requested."""

import os
import subprocess
import sys

import pytest
import torch

from clap_ds.distributed import accelerator, device
from clap_ds.distributed.accelerator import choose_accelerator
from clap_ds.distributed.device import choose_device
from clap_ds.utils.errors import UserError
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("variables", "has_device_file", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, True, "cpu"),
        ({"SLURM_GPUS_ON_NODE": "0"}, False, "cpu"),
        ({"SLURM_GPUS_ON_NODE": "4"}, False, "SLURM_GPUS_ON_NODE=4"),
        ({"DS_ACCELERATOR": "cpu"}, True, "cpu"),
        ({}, True, "nvidia0: the driver is too old"),
    ],
)
def test_gpu_that_torch_cannot_use_is_an_error(
    tmp_path, monkeypatch, variables, has_device_file, expected
):
    def fail_to_initialize() -> None:
        raise RuntimeError("the driver is too old.\nsecond line")

    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "SLURM_GPUS_ON_NODE"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerator, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail_to_initialize)
    if has_device_file:
        (tmp_path / "nvidia0").touch()
    if expected == "cpu":
        assert choose_accelerator() == "cpu"
        assert os.environ["DS_ACCELERATOR"] == "cpu"  # for DeepSpeed
    else:
        with pytest.raises(UserError, match=expected):
            choose_accelerator()


def test_rank_takes_its_only_gpu_and_needs_one_of_its_number(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(device, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "set_up_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    # `--gpus-per-task`
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(7, 2) == torch.device("cuda:0")
    assert os.environ["LOCAL_RANK"] == "0"  # read by DeepSpeed's engine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(7, 1) == torch.device("cuda:1")
    with pytest.raises(UserError, match="2 visible GPUs"):
        choose_device(7, 2)


@pytest.mark.end_to_end
def test_make_bench_on_cpus_starts_two_ranks(tmp_path):
    """Use a `python` that prints the launcher's arguments instead of starting ranks."""
    launcher = '[ "$2" != deepspeed.launcher.runner ] || { echo "$DS_ACCELERATOR $@"; exit 0; }'
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{launcher}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # Without those of a `make` that runs the tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["DS_ACCELERATOR"] = "cpu"
    command = ["make", "bench", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("cpu -m deepspeed.launcher.runner --quiet --master_port ")
    assert " --num_gpus 2 clap_ds/bench.py" in line
