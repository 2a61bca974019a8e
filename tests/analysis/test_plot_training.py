"""Curves of training runs, and the time to a target over repeats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import plot_run, plot_training
from clap_ds.analysis.combine import combine_repeats
from clap_ds.analysis.record import read_record
from clap_ds.analysis.runs import InputError
from clap_ds.analysis.table import read_table, write_csv

ROOT = Path(__file__).resolve().parents[2]


def _run(folder: Path, name: str, **summary: Any) -> Path:
    directory = folder / name
    directory.mkdir()
    content = {
        "command": "train", "state": "completed", "preset": "micro", "world_size": 2, "num_nodes": 1, "samples": 400,
        "device_name": "CPU", "precision": "fp32", "micro_batch_per_gpu": 4, "global_batch": 8,
        "samples_per_s_per_gpu": {"median": 10.0, "low": 9.0, "high": 11.0, "windows": [10.0, 9.0, 11.0]},
        **summary,
    }  # fmt: skip
    (directory / "summary.json").write_text(json.dumps(content))
    lines: list[dict[str, Any]] = [
        {"phase": "train", "step": step, "samples": 8 * step, "time_s": 0.4, "loss": 2 / step, "lr": 1e-3,
         "gradient_norm": 1.0, "logit_scale": 14.0}
        for step in range(1, 51)
    ]  # fmt: skip
    lines.insert(25, {"phase": "evaluation", "step": 25, "zero_shot_top1": 0.5, "retrieval_audio_to_text_r1": 0.1})
    lines.insert(26, {"phase": "checkpoint", "checkpoint": [1.0, 2.0]})
    text = "\n".join(json.dumps(line) for line in lines)
    (directory / "metrics.jsonl").write_text(text + '\n{"phase": "train", "st')
    return directory


def test_draws_a_run_and_its_control(tmp_path: Path) -> None:
    runs = [_run(tmp_path, "run"), _run(tmp_path, "control")]
    output = tmp_path / "curves.png"
    command = [sys.executable, "analysis/plot_training.py", *map(str, runs), "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert output.read_bytes().startswith(b"\x89PNG")


def test_reads_what_a_cut_off_run_left(tmp_path: Path) -> None:
    training = plot_training.read_training(_run(tmp_path, "run"))
    assert [line["step"] for line in training.steps] == list(range(1, 51))
    assert training.metrics == ["zero_shot_top1", "retrieval_audio_to_text_r1"]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable run directory"):
        plot_training.read_training(tmp_path)
    run = _run(tmp_path, "bench")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no step of training"):
        plot_training.read_training(run)
    run = _run(tmp_path, "training")
    (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1}\n')
    with pytest.raises(plot_run.RunError, match=r"plot_training\.py"):
        plot_run.read_run(run)


def test_moving_mean_is_the_mean_of_its_window() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    expected = [sum(values[start : start + 3]) / 3 for start in range(4)]
    assert plot_training._moving_mean(values, 3) == pytest.approx(expected)


def test_times_to_a_target_are_combined(tmp_path: Path) -> None:
    times = [31.0, 27.0, 44.0, None]
    runs = [read_record(_run(tmp_path, f"run-{n}", time_to_target_s=time)) for n, time in enumerate(times)]
    row = combine_repeats("", runs)
    assert (row.time_to_target_low_s, row.time_to_target_s, row.time_to_target_high_s) == (27.0, 31.0, 44.0)
    assert "target reached by 3 of 4 runs, after 31 s, 27 to 44 s (75 % interval)" in row.notes
    write_csv(tmp_path / "table.csv", [row])
    assert read_table(tmp_path / "table.csv")[0].time_to_target_s == 31.0
