"""Run directories, whole and broken."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import HOST_ALONE, read_record, read_steps
from clap_ds.config.errors import UserError
from clap_ds.record.statistics import rate_interval
from tests.analysis import samples
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
    found = rate_interval(rates["windows"], [1 / rate for rate in rates["windows"]])
    assert (list(run.windows), run.interval) == (rates["windows"], (found.low, found.high))
    assert run.rate == pytest.approx(6 / sum(1 / rate for rate in rates["windows"]))  # its schema told their median
    assert run.engine_samples_per_s_per_gpu == SUMMARY["deepspeed_samples_per_s"] / 2
    parts = ("data_wait", "forward", "loss", "optimizer")
    assert run.breakdown_s == {part: SUMMARY["breakdown_s"][part] for part in parts}
    assert run.slowest_rank_step_time_s == SUMMARY["step_time_s"]["slowest_rank_median"]
    assert run.memory_peak_gib == SUMMARY["memory_peak_bytes"] / 2**30
    assert run.environment["versions"]["torch"] == "2.13.0+cpu"
    assert run.notes.startswith(
        "the median step amounts to 0.69274 samples/s, +8.5 %: steps take unlike times; backward and ex"
    )


def test_a_record_of_schema_3_is_taken_as_it_is(record: Path) -> None:
    """Its windows need not have lasted equally long."""
    rates = {"mean": 1.5, "low": 1.4, "high": 1.6, "coverage": 0.95, "windows": [1.0, 2.0], "window_s": [2.0, 2.0]}
    changes = {"schema": 3, "samples_per_s_per_gpu": rates, "achieved_tflops": 0.25, "device_name": "NVIDIA H100",
               "step_time_s": {"median": 4 / 1.5}, "deepspeed_times_host_alone": True}  # fmt: skip
    write(record / "summary.json", json.dumps(SUMMARY | changes))
    run = read_record(record)
    assert (run.rate, run.interval, run.window_s) == (1.5, (1.4, 1.6), (2.0, 2.0))
    assert run.uncertainty_from == "95 % interval of 2 windows of 1 run"
    assert (run.breakdown_s, run.achieved_tflops, run.notes) == (SUMMARY["breakdown_s"], 0.25, HOST_ALONE)
    write(record / "summary.json", json.dumps(SUMMARY | changes | {"samples_per_s_per_gpu": rates | {"mean": None}}))
    assert read_record(record).rate == pytest.approx(6 / 4)
    write(record / "summary.json", json.dumps(SUMMARY | {"schema": 2}))
    assert "backward" not in read_record(record).breakdown_s
    write(record / "config.json", json.dumps({"clap": {"gradient_sync": "deepspeed"}}))
    write(record / "summary.json", json.dumps(SUMMARY))
    assert read_record(record).breakdown_s == SUMMARY["breakdown_s"]


def test_metrics_alone_tell_the_rate_of_a_micro_batch_that_is_given(record: Path, tmp_path: Path) -> None:
    alone = write(tmp_path / "n1.jsonl", (record / "metrics.jsonl").read_bytes())
    steps = [json.loads(line)["time_s"] for line in alone.read_text().splitlines() if '"window": 1' in line]
    run = read_record(alone, micro_batch=4)
    assert (run.windows[0], run.batch_per_gpu) == (pytest.approx(8 / sum(steps)), None)
    assert read_record(alone).rate is None


def test_a_killed_run_tells_its_rate_from_its_steps(record: Path) -> None:
    steps = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(entry) + "\n" for entry in steps if entry["step"] <= 7)  # window 3 has one step of two
    write(record / "metrics.jsonl", text + '{"step": 8, "phase": "win')
    write(record / "summary.json", json.dumps({"state": "running"}))
    run = read_record(record)
    rates = [2 * 4 / sum(entry["time_s"] for entry in steps if entry["window"] == window) for window in (1, 2)]
    assert (run.windows, run.rate) == (pytest.approx(rates), pytest.approx(2 / (1 / rates[0] + 1 / rates[1])))
    assert (run.state, run.gpus, run.uncertainty_from) == ("running", 2, "range of 2 windows of 1 run")
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
    found = rate_interval(run.windows, [1 / rate for rate in run.windows])
    assert (run.interval, run.uncertainty_from) == ((found.low, found.high), f"{found.label()} of 1 run")
    rates.pop("windows")
    write(record / "summary.json", json.dumps(SUMMARY | {"samples_per_s_per_gpu": rates}))
    assert read_record(record).uncertainty_from == "interval of unknown coverage of 1 run"


def test_nan_zero_and_wrong_types_are_absent_not_numbers(record: Path) -> None:
    rates = {"median": float("nan"), "low": "fast", "high": True, "windows": [0.0, float("nan"), None, 2.0, 3.0, -1]}
    changes: dict[str, Any] = {"mfu_model_percent": float("inf"), "breakdown_s": None, "step_time_s": [1]}
    accumulated = {"samples_per_s_per_gpu": rates, "gradient_accumulation_steps": 3}
    write(record / "summary.json", json.dumps(SUMMARY | changes | accumulated))
    run = read_record(record)
    assert (run.windows, run.rate, run.interval) == ((2.0, 3.0), pytest.approx(2.4), (2.0, 3.0))
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


@pytest.mark.parametrize("name", ["summary", "config", "environment"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 10_000,
        b'{"a": ' * 500 + b"1" + b"}" * 500,
        None,
    ],
)
def test_one_damaged_file_costs_its_own_content(record: Path, name: str, content: bytes | None) -> None:
    file = record / f"{name}.json"
    file.unlink()
    write(file, content) if content is not None else file.mkdir()
    run = read_record(record)
    assert f"{name}.json is not readable" in run.notes
    assert (run.gpus, len(run.windows)) == (2, 6)


def test_fields_of_other_types_and_numbers_that_cannot_be_are_absent(record: Path) -> None:
    other: dict[str, Any] = {
        "num_nodes": 10**400,
        "preset": ["x"],
        "device_name": "a\nb \ud800",
        "memory_peak_bytes": 1e300,
    }
    write(record / "summary.json", json.dumps(SUMMARY | other))
    write(record / "environment.json", json.dumps({"versions": 3, "command": {"a": 1}, "hosts": None, "python": "3"}))
    write(record / "config.json", json.dumps({"clap": [1], "train_micro_batch_size_per_gpu": "4"}))
    run = read_record(record)
    assert (run.nodes, run.model, run.device, run.memory_peak_gib) == (0, "", "a b ?", None)
    assert run.environment == {"python": "3"}


def test_damaged_lines_of_steps_are_left_out_and_damaged_fields_of_the_others(tmp_path: Path) -> None:
    lines: list[object] = [
        {"phase": "train", "step": 1, "time_s": None, "loss": float("nan"), "lr": 1e999, "skipped": True, "samples": 8},
        {"phase": "train"}, {"phase": "train", "step": None}, {"phase": ["train"], "step": 1}, [], 3, None,
        {"phase": "train", "step": 2, "loss": -0.5, "extra": {}, "text": "x"},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write(tmp_path / "metrics.jsonl", text.encode() + b'\xff\xfe\n{"step": ' + b"9" * 5000 + b'}\n{"phase": "tra')
    first = {"step": 1, "skipped": True, "samples": 8, "phase": "train"}
    assert read_steps(tmp_path, "train") == [first, {"step": 2, "loss": -0.5, "phase": "train"}]
    assert read_steps(tmp_path / "gone", "train", history="\0") == []


def test_a_run_that_was_killed_is_known_by_its_silence(tmp_path: Path) -> None:
    samples.record(tmp_path / "run", [], state="running")
    assert read_record(tmp_path / "run").state == "running"
    for file in (tmp_path / "run").iterdir():
        os.utime(file, (time.time() - 9000,) * 2)
    assert read_record(tmp_path / "run").state == "running, silent for 2.5 h"
