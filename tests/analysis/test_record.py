"""Run directories, whole and broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import read_record
from clap_ds.config.errors import UserError
from clap_ds.record.statistics import window_interval
from tests.analysis.samples import DATA, write

RECORD = DATA / "record_2ranks"
SUMMARY = json.loads((RECORD / "summary.json").read_text())


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def test_every_field_of_a_real_record_arrives() -> None:
    run, rates = read_record(RECORD), SUMMARY["samples_per_s_per_gpu"]
    assert (run.state, run.model, run.nodes, run.gpus) == ("completed", "htsat_tiny_roberta_base", 1, 2)
    assert (run.batch_per_gpu, run.text_tokens, run.finished[:4]) == (4, 77, "2026")
    assert (list(run.windows), run.rate, run.interval) == (
        rates["windows"], rates["median"], (rates["low"], rates["high"])
    )  # fmt: skip
    assert run.breakdown_s == SUMMARY["breakdown_s"]
    assert run.slowest_rank_step_time_s == SUMMARY["step_time_s"]["slowest_rank_median"]
    assert run.memory_peak_gib == SUMMARY["memory_peak_bytes"] / 2**30
    assert run.environment["versions"]["torch"] == "2.13.0+cpu"
    assert run.notes == ""


def test_a_killed_run_tells_its_rate_from_its_steps(record: Path) -> None:
    steps = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(entry) + "\n" for entry in steps if entry["step"] <= 7)  # window 3 has one step of two
    write(record / "metrics.jsonl", text + '{"step": 8, "phase": "win')
    write(record / "summary.json", json.dumps({"state": "running"}))
    run = read_record(record)
    rates = [2 * 4 / sum(entry["time_s"] for entry in steps if entry["window"] == window) for window in (1, 2)]
    assert (run.windows, run.rate) == (pytest.approx(rates), pytest.approx(sum(rates) / 2))
    assert (run.state, run.gpus, run.uncertainty_from) == ("running", 2, "50 % interval of 2 windows of 1 run")
    assert "metrics.jsonl" in run.notes


def test_an_early_failure_is_a_run_without_a_rate(record: Path) -> None:
    (record / "metrics.jsonl").unlink()
    write(record / "summary.json", json.dumps({"state": "out_of_memory", "error": "CUDA out of memory"}))
    run = read_record(record)
    assert (run.state, run.error, run.rate, run.batch_per_gpu) == ("out_of_memory", "CUDA out of memory", None, 4)
    assert "no complete window was measured" in run.notes


def test_the_interval_is_that_of_the_windows_with_the_coverage_it_has(record: Path) -> None:
    """Whatever an older version wrote: it took every window for independent of the others."""
    rates = {"median": 1.5, "low": 1.0, "high": 1.9, "coverage": 0.97, "windows": [1.0, 1.1, 1.4, 1.6, 1.8, 1.9]}
    write(record / "summary.json", json.dumps(SUMMARY | {"samples_per_s_per_gpu": rates}))
    run = read_record(record)
    found = window_interval(run.windows)
    assert found.coverage < 0.8
    assert (run.interval, run.uncertainty_from) == ((1.0, 1.9), f"{found.label()} of 1 run")
    rates.pop("windows")
    write(record / "summary.json", json.dumps(SUMMARY | {"samples_per_s_per_gpu": rates}))
    assert read_record(record).uncertainty_from == "interval of unknown coverage of 1 run"


def test_nan_zero_and_wrong_types_are_absent_not_numbers(record: Path) -> None:
    rates = {"median": float("nan"), "low": "fast", "high": True, "windows": [0.0, float("nan"), None, 2.0, 3.0, -1]}
    changes: dict[str, Any] = {"mfu_model_percent": float("inf"), "breakdown_s": None, "step_time_s": [1]}
    accumulated = {"samples_per_s_per_gpu": rates, "gradient_accumulation_steps": 3}
    write(record / "summary.json", json.dumps(SUMMARY | changes | accumulated))
    run = read_record(record)
    assert (run.windows, run.rate, run.interval) == ((2.0, 3.0), 2.5, (2.0, 3.0))
    assert (run.mfu_model_percent, run.breakdown_s, run.step_time_s) == (None, {}, None)
    assert run.batch_per_gpu == 12


def test_a_torn_summary_is_noted_and_the_rest_is_read(record: Path) -> None:
    write(record / "summary.json", '{"state": "compl')
    run = read_record(record)
    assert "summary.json is not readable JSON" in run.notes
    assert (run.model, run.gpus, len(run.windows)) == ("htsat_tiny_roberta_base", 2, 6)
    for path in record.iterdir():
        write(path, b"\xff\xfe\0")
    with pytest.raises(UserError, match=r"summary\.json"):
        read_record(record)
