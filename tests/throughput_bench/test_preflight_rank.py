"""A host's description, with a fake nvidia-smi, is on disk before anything is measured; wrong sums of
an all-reduce, and its rate."""

import json
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.init import Ranks
from clap_ds.throughput_bench import bandwidth, preflight_rank
from clap_ds.utils.paths import commit

H100 = "GPU-1aa, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"


@pytest.mark.parametrize("gpu", [H100, ""])
def test_host_is_described_even_without_a_measurement(tmp_path, monkeypatch, gpu):
    def fail(ranks: Ranks, **options: object) -> None:
        raise RuntimeError("no network")

    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpu}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setattr(preflight_rank, "REPORT_GRACE_S", 0)
    monkeypatch.setattr(bandwidth, "initialize", fail)
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


MEGABYTE = 1_000_000


def _time_with_wrong_sums(wrong_sums: dict[int, float]) -> dict[str, Any]:
    """Measure with given durations, and wrong elements in rank 1's sum."""
    all_reduce = dist.all_reduce
    rank = dist.get_rank()
    # Of the repeats. The slowest rank's best is half a second.
    durations_s = iter([2.0, 0.25 * (1 + rank), 3.0])

    def seconds(action: Any, device: torch.device) -> float:
        action()
        return next(durations_s)

    def spoil(buffer: torch.Tensor, *arguments: Any, **options: Any) -> None:
        all_reduce(buffer, *arguments, **options)
        if rank == 1 and len(buffer.shape) == 1:  # else it is a size
            for index, value in wrong_sums.items():
                buffer[index] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spoil)
        patch.setattr(bandwidth, "seconds", seconds)
        return bandwidth.time_all_reduce(MEGABYTE, torch.device("cpu"))


def test_wrong_sums_are_counted_and_the_rate_is_of_the_bytes_sent(two_ranks):
    wrong_sums = {0: 1.0, 9: 2.5, 36: float("nan"), 1: 2.0}
    measured = two_ranks.run(_time_with_wrong_sums, wrong_sums)[0]
    assert measured["num_wrong"] == [0, 3]
    assert measured["seconds"] == 0.5
    # Each of two ranks sends 2 (n - 1) / n = 1 MB in half a second.
    assert measured["bus_gb_per_s"] == pytest.approx(0.002)
