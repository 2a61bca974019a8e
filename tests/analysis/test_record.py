"""Run directories, whole and broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import read_record
from clap_ds.analysis.runs import InputError

RECORD = Path(__file__).parent / "data" / "record_2ranks"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def change_summary(record: Path, **changes: Any) -> None:
    path = record / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_field_of_a_real_record_arrives() -> None:
    summary = json.loads((RECORD / "summary.json").read_text())
    run = read_record(RECORD)
    assert (run.state, run.model, run.num_nodes, run.num_gpus) == ("completed", "htsat_tiny_roberta_base", 1, 2)
    assert (run.batch_per_gpu, run.global_batch, run.text_tokens) == (4, 8, 77)
    assert list(run.windows) == summary["samples_per_s_per_gpu"]["windows"]
    assert (run.rate, run.rate_low, run.rate_high) == tuple(
        summary["samples_per_s_per_gpu"][name] for name in ("median", "low", "high")
    )
    assert run.breakdown_s == summary["breakdown_s"]
    assert run.slowest_rank_step_time_s == summary["step_time_s"]["slowest_rank_median"]
    assert run.memory_peak_bytes == summary["memory_peak_bytes"]
    assert run.notes == ()


def test_a_killed_run_tells_its_rate_from_its_steps(record: Path) -> None:
    steps = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    kept = [entry for entry in steps if entry["window"] in (1, 2)]
    text = "".join(json.dumps(entry) + "\n" for entry in steps if entry["step"] <= 7)  # window 3 has one step of two
    (record / "metrics.jsonl").write_text(text + '{"step": 8, "phase": "win')
    (record / "summary.json").write_text(json.dumps({"state": "running"}))
    run = read_record(record)
    expected = [2 * 4 / sum(entry["time_s"] for entry in kept if entry["window"] == window) for window in (1, 2)]
    assert run.windows == pytest.approx(expected)
    assert run.rate == pytest.approx(sum(expected) / 2)
    assert (run.state, run.num_gpus, run.interval_from) == ("running", 2, "range of 2 windows of 1 run")
    assert any("metrics.jsonl" in note for note in run.notes)


def test_an_early_failure_is_a_run_without_a_rate(record: Path) -> None:
    (record / "metrics.jsonl").unlink()
    (record / "summary.json").write_text(json.dumps({"state": "out_of_memory", "error": "CUDA out of memory"}))
    run = read_record(record)
    assert (run.state, run.error, run.rate, run.batch_per_gpu) == ("out_of_memory", "CUDA out of memory", None, 4)
    assert "no complete window was measured" in run.notes


def test_nan_zero_and_wrong_types_are_absent_not_numbers(record: Path) -> None:
    rates = {"median": float("nan"), "low": "fast", "high": True, "windows": [0.0, float("nan"), None, 2.0, 3.0, -1]}
    change_summary(
        record, samples_per_s_per_gpu=rates, mfu_model_percent=float("inf"), breakdown_s=None, step_time_s=[1]
    )
    run = read_record(record)
    assert run.windows == (2.0, 3.0)
    assert (run.rate, run.rate_low, run.rate_high) == (2.5, 2.0, 3.0)
    assert (run.mfu_model_percent, dict(run.breakdown_s), run.step_time_s) == (None, {}, None)


def test_a_torn_summary_is_noted_and_the_rest_is_read(record: Path) -> None:
    (record / "summary.json").write_text('{"state": "compl')
    run = read_record(record)
    assert "summary.json is not readable JSON" in run.notes
    assert (run.model, run.num_gpus, len(run.windows)) == ("htsat_tiny_roberta_base", 2, 6)


def test_a_directory_of_unreadable_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(InputError, match=r"summary\.json"):
        read_record(tmp_path)
