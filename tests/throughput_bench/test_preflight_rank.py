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

H100 = "GPU-1aa, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"


@pytest.mark.parametrize("gpu", [H100, ""])
def test_host_is_described_even_without_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    def fail(ranks: Ranks, **options: object) -> None:
        raise RuntimeError("no network")

    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpu}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setattr(preflight_rank, "REPORT_GRACE_S", 0)
    monkeypatch.setattr(preflight_rank, "initialize", fail)
    arguments = ["--job_folder", str(tmp_path), "torch", "webdatasset"]
    monkeypatch.setattr(sys, "argv", ["preflight_rank.py", *arguments])
    with pytest.raises(RuntimeError, match="no network"):
        preflight_rank.main(Ranks(1, 2, 0, 1))
    report = json.loads((tmp_path / "rank-00001.json").read_text())
    faults = [] if gpu else ["no GPU is visible despite SLURM_GPUS_ON_NODE=1"]
    assert report["faults"] == faults
    assert ", ".join(*report["gpus"].items()) == gpu if gpu else not report["gpus"]
    software = report["software"]
    assert (software["commit"], software["torch"]) == (commit(), torch.__version__)
    assert software["webdatasset"] is None
