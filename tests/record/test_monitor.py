"""Samples of a host, against a stand-in for NVML."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.record import monitor


def _traffic(gpu: int, counter: int) -> int:
    if gpu == 1:
        raise OSError  # which this part doesn't measure
    return 21_000_000 if counter == NVML.NVML_PCIE_UTIL_RX_BYTES else 1_000_000


NVML = SimpleNamespace(
    NVML_PCIE_UTIL_RX_BYTES=1, NVML_PCIE_UTIL_TX_BYTES=0, NVML_TEMPERATURE_GPU=0, NVMLError=OSError,
    nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}aa", nvmlDeviceGetPcieThroughput=_traffic,
    nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=60 * 10**9, total=80 * 10**9),
    nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=97),
    nvmlDeviceGetPowerUsage=lambda gpu: 612_000, nvmlDeviceGetPowerManagementLimit=lambda gpu: 700_000,
    nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
)  # fmt: skip


def _samples(monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int) -> list[dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sample = monitor._gpu_sampler(num_gpus)
    return sample() if sample else []


def test_units_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _samples(monkeypatch, "", 2)
    assert first == {
        "gpu": 0, "sm_percent": 97, "power_w": 612.0, "power_limit_w": 700.0, "temperature_c": 61,
        "memory_bytes": 60 * 10**9, "memory_total_bytes": 80 * 10**9, "pcie_rx_gb_per_s": 21.0, "pcie_tx_gb_per_s": 1.0,
    }  # fmt: skip
    assert first.keys() - second.keys() == {"pcie_rx_gb_per_s", "pcie_tx_gb_per_s"}
    (values,) = monitor._cpu_sample()
    assert 0 <= values["cpu_percent"] <= 100
    assert 0 < values["memory_bytes"] < values["memory_total_bytes"]


@pytest.mark.parametrize(
    ("visible", "num_gpus", "gpus"), [("1", 1, [1]), ("GPU-0", 1, [0]), ("1", 2, [0, 1]), ("MIG-1", 1, [0, 1])]
)
def test_gpus_of_other_jobs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int, gpus: list[int]
) -> None:
    assert [values["gpu"] for values in _samples(monkeypatch, visible, num_gpus)] == gpus


def test_samples_are_written_while_a_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    with monitor.watching(tmp_path, 0):
        while not (found := [*tmp_path.glob("monitor/*.jsonl")]) or found[0].read_text().count("\n") < 2:
            time.sleep(0.01)
    times = [json.loads(line)["time"] for line in found[0].read_text().splitlines()]
    assert found[0].stem == os.uname().nodename
    assert times == sorted(times)


def test_a_sampler_that_fails_is_said_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "_gpu_sampler", lambda num_gpus: lambda: [{}[0]])
    monitor._watch(tmp_path / "monitor", 1, threading.Event())
    assert "no longer monitored: KeyError(0)" in capsys.readouterr().err
