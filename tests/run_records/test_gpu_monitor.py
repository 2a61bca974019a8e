"""GPU samples from a fake NVML."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.run_records import gpu_monitor


def _traffic(gpu: int, counter: int) -> int:
    if gpu == 1:
        raise OSError  # unsupported by this GPU
    return 21_000_000 if counter == NVML.NVML_PCIE_UTIL_RX_BYTES else 1_000_000


NVML = SimpleNamespace(
    NVML_PCIE_UTIL_RX_BYTES=1, NVML_PCIE_UTIL_TX_BYTES=0, NVML_TEMPERATURE_GPU=0, NVMLError=OSError,
    nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetPcieThroughput=_traffic,
    nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=60 * 10**9, total=80 * 10**9),
    nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=97),
    nvmlDeviceGetPowerUsage=lambda gpu: 612_000, nvmlDeviceGetPowerManagementLimit=lambda gpu: 700_000,
    nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
)  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "num_gpus", "gpus"),
    [("", 2, [0, 1]), ("1", 1, [1]), ("MIG-1", 1, [0, 1])],
)
def test_units_of_the_jobs_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int, gpus: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sample = gpu_monitor._gpu_sampler(num_gpus)
    assert sample is not None
    traffic = {"pcie_rx_gb_per_s": 21.0, "pcie_tx_gb_per_s": 1.0}
    values = {
        "sm_percent": 97, "power_w": 612.0, "power_limit_w": 700.0, "temperature_c": 61,
        "memory_bytes": 60 * 10**9, "memory_total_bytes": 80 * 10**9,
    }  # fmt: skip
    assert sample() == [{"gpu": gpu, **values, **(traffic if gpu == 0 else {})} for gpu in gpus]


def test_samples_are_written_while_a_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(gpu_monitor, "_gpu_sampler", lambda num_gpus: lambda: [{"gpu": 0, "sm_percent": 97}])
    with gpu_monitor.watching(tmp_path, 1):
        while not (found := [*tmp_path.glob("monitor/*.jsonl")]) or found[0].read_text().count("\n") < 2:
            time.sleep(0.01)
    first, second, *_ = map(json.loads, found[0].read_text().splitlines())
    assert (found[0].stem, first["time"] < second["time"], first["sm_percent"]) == (os.uname().nodename, True, 97)
