"""A run as a picture: drawn from its record, refused with words where there is nothing to draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.plot_run import RunError, draw, read_run


def _write(folder: Path, **changes: Any) -> Path:
    summary = {
        "state": "completed", "preset": "micro", "world_size": 2, "device_name": "a device", "precision": "bf16",
        "micro_batch_per_gpu": 4, "text_tokens": 16, "samples_per_s": 20.0, "data_wait_percent": 0.5,
        "samples_per_s_per_gpu": {"median": 10.0, "low": 9.0, "high": 11.0}, "memory_peak_bytes": 2**30,
        "step_time_s": {"median": 0.4, "p95": 0.5, "slowest_rank_median": 0.45},
        "breakdown_s": {"forward": 0.1, "backward": 0.2},
    } | changes  # fmt: skip
    (folder / "summary.json").write_text(
        json.dumps({key: value for key, value in summary.items() if value is not None})
    )
    steps = [{"step": i, "phase": "warmup" if i == 1 else "window", "time_s": 0.4} for i in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_picture_shows_the_runs_figures(tmp_path: Path) -> None:
    draw(*read_run(_write(tmp_path)), tmp_path / "run.svg")
    picture = (tmp_path / "run.svg").read_text()
    for text in ("10.00", "9.00 – 11.00", "1.00 GiB", "67 %", "micro on 2 × a device"):
        assert f"<!-- {text}" in picture


def test_run_without_windows_or_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a readable run directory"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no timed windows; the run's state is 'failed'"):
        read_run(_write(tmp_path, step_time_s=None, state="failed"))
