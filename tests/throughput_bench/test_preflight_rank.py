"""A host's description, with a fake nvidia-smi, is on disk before anything is measured."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.distributed.init import Ranks
from clap_ds.throughput_bench import preflight_rank
from clap_ds.utils.paths import commit


@pytest.mark.parametrize("gpus", [["GPU-1aa, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"], []])
def test_a_host_is_described_even_if_it_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in gpus))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setattr(preflight_rank, "OTHERS_WRITE_S", 0)
    monkeypatch.setattr(preflight_rank, "initialize", lambda ranks, **_: 1 / 0)
    monkeypatch.setattr(
        sys, "argv", ["x", "--job_folder", str(tmp_path), "8.0", "torch,webdatasset"]
    )
    with pytest.raises(ZeroDivisionError):
        preflight_rank.main(Ranks(1, 2, 0, 1))
    found = json.loads((tmp_path / "rank-1.json").read_text())
    assert found["gpus"] == (
        {"GPU-1aa": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"} if gpus else {}
    )
    assert found["faults"] == [] if gpus else ["no GPU is visible despite SLURM_GPUS_ON_NODE=1"]
    software = found["software"]
    assert (software["commit"], software["torch"], software["webdatasset"]) == (
        commit(),
        torch.__version__,
        None,
    )
