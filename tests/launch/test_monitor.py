"""Sampling and reporting, against a stand-in for NVML and hand-counted samples."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.launch.monitor import CHECKS, cpu_sample, flagged_share, main, nvml_sampler, report, watch

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
    assert first == {
        "gpu": 0, "sm_percent": 97, "power_w": 612.0, "power_limit_w": 700.0, "temperature_c": 61,
        "memory_bytes": 60 * 10**9, "memory_total_bytes": 80 * 10**9, "pcie_rx_gb_per_s": 21.0, "pcie_tx_gb_per_s": 1.0,
    }  # fmt: skip
    assert (second["gpu"], second["pcie_rx_gb_per_s"], second["temperature_c"]) == (1, None, 61)
    (sample,) = cpu_sample()
    assert 0 <= sample["cpu_percent"] <= 100
    assert 0 < sample["memory_bytes"] < sample["memory_total_bytes"]


def test_watch_writes_samples_of_this_host(tmp_path: Path) -> None:
    samples = iter([nvml_sampler(FakeNvml())()] * 4)
    with pytest.raises(StopIteration):
        watch(tmp_path, 0.01, lambda: next(samples))
    (path,) = (tmp_path / "monitor").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["gpu"] for line in lines] == [0, 1] * 3
    assert all(abs(line["time"] - time.time()) < 60 for line in lines)


def _sample(at: float, **changes: Any) -> dict[str, Any]:
    gpu = {
        "gpu": 0,
        "sm_percent": 95,
        "power_w": 600,
        "power_limit_w": 700,
        "memory_bytes": 60,
        "memory_total_bytes": 80,
    }
    return {"time": at, **gpu, "temperature_c": 60, "pcie_rx_gb_per_s": 1, **changes}


def test_report_counts_outside_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    for host, samples in {
        "n1": [_sample(t, sm_percent=50 if t < 2 else 95) for t in range(10)],
        "n2": [_sample(t, sm_percent=10 if 5 <= t <= 7 else 90, memory_bytes=72) for t in range(10)],
    }.items():
        lines = [*map(json.dumps, samples), '{"time": 1']  # cut off with its host
        (tmp_path / "monitor" / f"{host}.jsonl").write_text("\n".join(lines))
    assert "SM use below 90 %: 25 % of samples, most on n2:0" in report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"checkpoint": [4.5, 7.5]}\n')
    text = report(tmp_path)
    assert "14 samples of 2 GPUs" in text
    assert "! SM use below 90 %: 14 % of samples, most on n1:0" in text
    assert "  power below 350 W: 0 % of samples" in text
    assert "memory headroom: 10 % on n2:0" in text


@pytest.mark.parametrize(
    ("check", "share", "samples"),
    [
        ("SM", 0.5, [{"sm_percent": 90}, {"sm_percent": 89}]),
        ("power", 0.5, [{"power_w": 349.9}, {"power_w": 350}]),
        ("power", 0, [{"power_w": 100, "power_limit_w": 300}]),
        ("temperature", 0.5, [{"temperature_c": 85}, {"temperature_c": 84}]),
        ("temperature", None, [{"temperature_c": None}]),
        # Two samples in a row are a burst, three are sustained.
        ("PCIe", 0.3, [{"pcie_rx_gb_per_s": rate} for rate in (25, 25, 1, 25, 25, 25, 1, 1, 20, 20)]),
    ],
)
def test_limits(check: str, share: float | None, samples: list[dict[str, Any]]) -> None:
    (chosen,) = (each for each in CHECKS if each.name.startswith(check))
    found = flagged_share({"n1:0": [_sample(0, **changes) for changes in samples]}, chosen)
    assert (found and found[0]) == (share and pytest.approx(share))


def test_command_watches_until_signalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    for wrong in (["watch", str(tmp_path / "missing")], ["watch", str(tmp_path), "--interval", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    command = [sys.executable, "launch/monitor.py", "watch", str(tmp_path), "--interval", "0.1"]
    watcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("monitor/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher.terminate()
    assert watcher.wait(180) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert "memory headroom" in capsys.readouterr().out
