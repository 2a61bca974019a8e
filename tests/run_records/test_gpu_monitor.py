"""GPU samples from stand-ins for torch's NVML functions."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from clap_ds.run_records import gpu_monitor


def _unsupported(gpu: int) -> float:
    raise RuntimeError(f"not supported by GPU {gpu}")


def test_samples_of_each_gpu_are_written_while_a_host_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(gpu_monitor.FIELDS) >= {"sm_percent", "temperature_c", "power_w"}
    monkeypatch.setattr(gpu_monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(gpu_monitor, "FIELDS", {"sm_percent": lambda gpu: 97 + gpu, "power_w": _unsupported})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with gpu_monitor.watching(tmp_path, 2):
        while not (found := [*tmp_path.glob("monitor/*.jsonl")]) or found[0].read_text().count("\n") < 4:
            time.sleep(0.01)
    first, second, third, *_ = map(json.loads, found[0].read_text().splitlines())
    assert (found[0].stem, first["time"] < third["time"]) == (os.uname().nodename, True)
    for line, gpu in ((first, 0), (second, 1)):
        assert line == {"time": line["time"], "gpu": gpu, "sm_percent": 97 + gpu}


def test_hosts_without_a_gpu_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with gpu_monitor.watching(tmp_path, 2):
        assert not [*tmp_path.iterdir()]
