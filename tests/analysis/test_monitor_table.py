"""Shares of hand-counted samples."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from clap_ds.analysis.monitor import CHECKS, flagged, table

GPU = {"gpu": 0, "sm_percent": 95, "power_w": 600, "power_limit_w": 700, "memory_bytes": 60, "memory_total_bytes": 80}


def _sample(at: float, **changes: Any) -> dict[str, Any]:
    return {"time": at, **GPU, "temperature_c": 60, "pcie_rx_gb_per_s": 1, **changes}


def test_samples_outside_checkpoints_count(tmp_path: Path) -> None:
    (tmp_path / "run" / "monitor").mkdir(parents=True)
    for host, samples in {
        "n1": [_sample(t, sm_percent=50 if t < 2 else 95) for t in range(10)],
        "n2": [_sample(t, sm_percent=10 if 5 <= t <= 7 else 90, memory_bytes=72) for t in range(10)],
        "n3": [{"time": 3, "cpu_percent": 3}],
    }.items():
        lines = [*map(json.dumps, samples), '{"time": 1']  # truncated as on a killed host
        (tmp_path / "run" / "monitor" / f"{host}.jsonl").write_text("\n".join(lines))
    assert "| 25% (most n2:0) |" in table([tmp_path / "run"])
    metrics = ['{"step": 1}', '{"checkpoint": [4.5, 7.5]}']
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(metrics))
    cells = [cell.strip() for cell in table([tmp_path / "run", tmp_path]).splitlines()[2].split("|")[1:-1]]
    assert cells == ["run", "15 of 3", "14% (most n1:0)", "0%", "0%", "0%", "10% (n2:0)"]


@pytest.mark.parametrize(
    ("check", "share", "samples"),
    [
        ("SM", "50% (most n1)", [{"sm_percent": 90}, {"sm_percent": 89}]),
        ("< 350 W", "50% (most n1)", [{"power_w": 349.9}, {"power_w": 350}]),
        ("< 350 W", "0%", [{"power_w": 100, "power_limit_w": 300}]),
        ("≥ 85 °C", "50% (most n1)", [{"temperature_c": 85}, {"temperature_c": 84}]),
        ("PCIe", "25% (most n1)", [{"pcie_rx_gb_per_s": rate} for rate in (25, 1, 19, 20)]),
    ],
)
def test_limits(check: str, share: str, samples: list[dict[str, Any]]) -> None:
    (chosen,) = (name for name in CHECKS if name.startswith(check))
    assert flagged(pd.DataFrame([_sample(0, **changes, source="n1") for changes in samples]), chosen) == share
    assert flagged(pd.DataFrame([{"time": 0, "cpu_percent": 3, "source": "n1"}]), chosen) == ""
