"""Run directories, whole and broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import read_record
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA

RECORD = DATA / "record_2ranks"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def change_summary(record: Path, **changes: Any) -> None:
    path = record / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_field_of_a_real_record_arrives() -> None:
    summary = json.loads((RECORD / "summary.json").read_text())
    run = read_record(RECORD)
    assert (run.state, run.model, run.nodes, run.gpus) == ("completed", "htsat_tiny_roberta_base", 1, 2)
    assert (run.batch_per_gpu, run.text_tokens, run.finished[:4]) == (4, 77, "2026")
    assert list(run.windows) == summary["samples_per_s_per_gpu"]["windows"]
    rates = summary["samples_per_s_per_gpu"]
    assert (run.rate, run.interval) == (rates["median"], (rates["low"], rates["high"]))
    assert run.breakdown_s == summary["breakdown_s"]
    assert run.slowest_rank_step_time_s == summary["step_time_s"]["slowest_rank_median"]
    assert run.memory_peak_gib == summary["memory_peak_bytes"] / 2**30
    assert run.environment["versions"]["torch"] == "2.13.0+cpu"
    assert run.notes == ""


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
    assert (run.state, run.gpus, run.uncertainty_from) == ("running", 2, "range of 2 windows of 1 run")
    assert "metrics.jsonl" in run.notes


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
    assert (run.rate, run.interval) == (2.5, (2.0, 3.0))
    assert (run.mfu_model_percent, run.breakdown_s, run.step_time_s) == (None, {}, None)


def test_a_torn_summary_is_noted_and_the_rest_is_read(record: Path) -> None:
    (record / "summary.json").write_text('{"state": "compl')
    run = read_record(record)
    assert "summary.json is not readable JSON" in run.notes
    assert (run.model, run.gpus, len(run.windows)) == ("htsat_tiny_roberta_base", 2, 6)


def test_accumulated_micro_batches_count_as_one_step(record: Path) -> None:
    change_summary(record, gradient_accumulation_steps=3)
    assert read_record(record).batch_per_gpu == 12


def test_a_directory_of_unreadable_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match=r"summary\.json"):
        read_record(tmp_path)
