"""Shares of hand-counted samples."""

import json
from pathlib import Path
from typing import Any

from clap_ds.analysis.monitor import table

GPU = {"gpu": 0, "sm_percent": 95, "power_w": 600, "memory_bytes": 60, "memory_total_bytes": 80}


def _cells(folder: Path, **hosts: list[dict[str, Any]]) -> list[str]:
    (folder / "run" / "monitor").mkdir(parents=True, exist_ok=True)
    for host, samples in hosts.items():
        lines = [json.dumps({"time": at, **GPU, "temperature_c": 60, **sample}) for at, sample in enumerate(samples)]
        lines.append('{"time": 1')  # truncated as on a killed host
        (folder / "run" / "monitor" / f"{host}.jsonl").write_text("\n".join(lines))
    return [cell.strip() for cell in table([folder / "run", folder]).splitlines()[2].split("|")[1:-1]]


def test_samples_outside_checkpoints_count(tmp_path: Path) -> None:
    n1 = [{"sm_percent": 50 if t < 2 else 95} for t in range(10)]
    n2 = [{"sm_percent": 10 if 5 <= t <= 7 else 90, "memory_bytes": 72} for t in range(10)]
    assert "25% (most n2:0)" in _cells(tmp_path, n1=n1, n2=n2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"checkpoint": [4.5, 7.5]}')
    assert _cells(tmp_path) == ["run", "14 of 2", "14% (most n1:0)", "0%", "600", "10% (n2:0)"]


def test_limits_of_what_is_measured(tmp_path: Path) -> None:
    limits = [{"sm_percent": 90, "temperature_c": 85, "power_w": 400}, {"sm_percent": 89, "temperature_c": 84}]
    assert _cells(tmp_path, n1=limits)[2:5] == ["50% (most n1:0)", "50% (most n1:0)", "500"]
    assert _cells(tmp_path, n1=[dict.fromkeys([*GPU, "temperature_c"]) | {"gpu": 3, "sm_percent": 95}])[2:] == ["0%"]
