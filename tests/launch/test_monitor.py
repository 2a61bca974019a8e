"""Sampling and reporting, against a stand-in for NVML and hand-counted samples."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.launch.monitor import CHECKS, cpu_sampler, flagged_share, main, nvml_sampler, report, watch

ROOT = Path(__file__).resolve().parents[2]


class FakeNvml:
    """The part of pynvml that is used; PCIe traffic isn't measured by the second GPU."""

    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES, NVML_TEMPERATURE_GPU = 1, 0, 0

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=60 * 10**9, total=80 * 10**9),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": lambda gpu: 612_000,
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
        }
        return values[name]

    def nvmlDeviceGetPcieThroughput(self, gpu: int, counter: int) -> int:  # noqa: N802
        if gpu == 1:
            raise self.NVMLError
        return 21_000_000 if counter == self.NVML_PCIE_UTIL_RX_BYTES else 1_000_000


def test_units_of_a_sample() -> None:
    first, second = nvml_sampler(FakeNvml())()
    assert (first["gpu"], first["sm_percent"], first["power_w"], first["power_limit_w"]) == (0, 97, 612.0, 700.0)
    assert (first["pcie_rx_gb_per_s"], first["pcie_tx_gb_per_s"]) == (21.0, 1.0)
    assert second["pcie_rx_gb_per_s"] is None
    assert second["temperature_c"] == 61


def test_processors_since_the_last_sample(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n")
    sampler = cpu_sampler(tmp_path)
    (tmp_path / "stat").write_text("cpu 100 0 0 100 0 0 0 0 0 0\ncpu0 1 2 3\n")
    sampler()
    (tmp_path / "stat").write_text("cpu 130 0 0 110 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (sample,) = sampler()
    assert sample["cpu_percent"] == pytest.approx(75)
    assert (sample["memory_bytes"], sample["memory_total_bytes"]) == (750 * 1024, 1000 * 1024)


def test_watch_writes_samples_of_this_host(tmp_path: Path) -> None:
    counted = []
    sampler = nvml_sampler(FakeNvml())
    watch(tmp_path, 0.01, lambda: counted.append(1) or sampler(), lambda: len(counted) > 3)  # type: ignore[func-returns-value]
    (path,) = (tmp_path / "monitor").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["gpu"] for line in lines] == [0, 1] * 3
    assert all(abs(line["time"] - time.time()) < 60 for line in lines)


def _write(run: Path, host: str, samples: list[dict[str, Any]]) -> None:
    (run / "monitor").mkdir(exist_ok=True)
    (run / "monitor" / f"{host}.jsonl").write_text("\n".join(json.dumps(sample) for sample in samples) + '\n{"time": 1')


def _sample(at: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "gpu": 0,
        "sm_percent": 95,
        "power_w": 600,
        "power_limit_w": 700,
        "temperature_c": 60,
        "pcie_rx_gb_per_s": 1,
    }
    return {"time": at, **usual, "memory_bytes": 60, "memory_total_bytes": 80, **changes}


def test_report_counts_outside_checkpoints(tmp_path: Path) -> None:
    _write(tmp_path, "n1", [_sample(t, sm_percent=50 if t < 2 else 95) for t in range(10)])
    _write(tmp_path, "n2", [_sample(t, sm_percent=10 if 5 <= t <= 7 else 90, memory_bytes=72) for t in range(10)])
    assert "SM use below 90 %: 25 % of samples, most on n2:0" in report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1}) + "\n" + json.dumps({"checkpoint": [4.5, 7.5]}) + "\n"
    )
    text = report(tmp_path)
    assert "14 samples of 2 GPUs" in text
    assert "! SM use below 90 %: 14 % of samples, most on n1:0" in text
    assert "  power below 350 W: 0 % of samples" in text
    assert "memory headroom: 10 % on n2:0" in text


def _share(name: str, samples: list[dict[str, Any]]) -> float | None:
    (check,) = (check for check in CHECKS if check.name.startswith(name))
    found = flagged_share({"n1:0": samples}, check)
    return found[0] if found else None


def test_limits() -> None:
    assert _share("SM", [_sample(0, sm_percent=90), _sample(1, sm_percent=89)]) == 0.5
    assert _share("power", [_sample(0, power_w=349.9), _sample(1, power_w=350)]) == 0.5
    assert _share("power", [_sample(0, power_w=100, power_limit_w=300)]) == 0
    assert _share("temperature", [_sample(0, temperature_c=85), _sample(1, temperature_c=84)]) == 0.5
    assert _share("temperature", [_sample(0, temperature_c=None)]) is None
    # Two samples in a row are a burst, three are sustained.
    rates = [25, 25, 1, 25, 25, 25, 1, 1, 20, 20]
    assert _share("PCIe", [_sample(t, pcie_rx_gb_per_s=rate) for t, rate in enumerate(rates)]) == pytest.approx(0.3)


def test_command_stops_when_told(tmp_path: Path) -> None:
    command = [sys.executable, "launch/monitor.py", "watch", str(tmp_path), "--interval", "0.1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("monitor/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    result = subprocess.run(
        [sys.executable, "launch/monitor.py", "report", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert "memory headroom" in result.stdout


def test_nothing_to_report(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert main(["watch", str(tmp_path / "missing")]) == 2
