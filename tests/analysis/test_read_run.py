"""Complete and damaged run directories."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.read_run import HOST_ALONE, read_json, read_record, read_steps
from clap_ds.analysis.scaling import scaling_table
from clap_ds.config.errors import UserError
from clap_ds.run_records.intervals import rates
from tests.analysis.samples import DATA, write

RECORD = DATA / "record_2ranks"
SUMMARY = json.loads((RECORD / "summary.json").read_text())
STEPS = [json.loads(line) for line in (RECORD / "metrics.jsonl").read_text().splitlines()]
RATES = {"mean": 1.5, "low": 1.4, "high": 1.6, "windows": [1.0, 2.0]}
CHANGES = {"schema": 3, "samples_per_s_per_gpu": RATES, "achieved_tflops": 0.25, "device_name": "NVIDIA H100",
           "step_time_s": {"median": 4 / 1.5}, "deepspeed_timer_synchronized": False}  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def summed_up(record: Path, **changes: Any) -> Path:
    """Copy the record with changed fields of its summary."""
    write(record / "summary.json", json.dumps(SUMMARY | changes))
    return record


def test_every_field_of_a_real_record_arrives(record: Path) -> None:
    run = read_record(summed_up(record, **CHANGES))
    assert (run.state, run.model, run.nodes, run.gpus) == ("completed", "clap_htsat_tiny_roberta_base", 1, 2)
    assert (run.batch_per_gpu, run.context_length, run.finished[:4]) == (4, 77, "2026")
    assert (run.rate, run.windows) == (1.5, (1.0, 2.0))
    assert (run.breakdown_s, run.achieved_tflops, run.notes) == (SUMMARY["breakdown_s"], 0.25, HOST_ALONE)
    assert run.engine_samples_per_s_per_gpu == SUMMARY["deepspeed_samples_per_s"] / 2
    assert run.memory_peak_gib == SUMMARY["memory_peak_bytes"] / 2**30
    assert run.environment["versions"]["torch"] == "2.13.0+cpu"
    changes = CHANGES | {"gradient_accumulation_steps": 3, "micro_batch_per_gpu": None}
    run = read_record(summed_up(record, **changes))
    assert run.batch_per_gpu == 12
    assert "step times are uneven" in run.notes


def test_a_record_of_an_earlier_schema_has_the_rate_of_its_steps(record: Path) -> None:
    windows = [4 / step["slowest_rank_time_s"] for step in STEPS if step["phase"] == "window"]
    windows = [2 / (1 / a + 1 / b) for a, b in zip(windows[::2], windows[1::2], strict=True)]
    run = read_record(summed_up(record, samples_per_s_per_gpu={"median": 9.0, "low": 8.0, "high": 10.0}))
    found = rates(windows, [1 / rate for rate in windows])
    assert (run.rate, run.windows) == (pytest.approx(found["mean"]), pytest.approx(tuple(windows)))
    assert run.breakdown_s == {}


def test_what_had_a_presets_name_before_is_another_model(record: Path) -> None:
    runs = [read_record(summed_up(record, schema=schema, samples_per_s_per_gpu=RATES)) for schema in (3, 3, 4)]
    assert [run.model for run in runs] == ["clap_htsat_tiny_roberta_base"] * 2 + ["htsat_tiny_roberta_base"]
    assert [row.repeats for row in scaling_table(runs)] == [2, 1]
    assert read_record(summed_up(record, preset="htsat_base_roberta_base")).model == "htsat_base_roberta_base"


NEW_NAMES = {"text_tokens": "context_length"}
OLD_SUMMARY: dict[str, Any] = {
    "text": "packed", "slow_ranks": [{"rank": 1, "behind_s": 0.5}], "deepspeed_times_host_alone": True, "ended_early": "x",
}  # fmt: skip
NEW_SUMMARY: dict[str, Any] = {
    "text_packing": True, "stragglers": [{"rank": 1, "lag_s": 0.5}], "deepspeed_timer_synchronized": False,
    "stop_reason": "x",
}  # fmt: skip


def test_records_of_older_schemas_are_read_by_todays_names(record: Path) -> None:
    old = read_record(summed_up(record, samples_per_s_per_gpu=RATES))
    new = {NEW_NAMES.get(name, name): value for name, value in SUMMARY.items()} | {"samples_per_s_per_gpu": RATES}
    write(record / "summary.json", json.dumps(new))
    assert read_record(record) == old
    for fields in (OLD_SUMMARY, NEW_SUMMARY):
        write(record / "summary.json", json.dumps(fields))
        assert read_json(record, "summary") == NEW_SUMMARY
    text = (record / "metrics.jsonl").read_text()
    steps = read_steps(record, "timed")
    write(record / "metrics.jsonl", text.replace('"window",', '"timed",'))
    assert len(steps) == len(read_steps(record, "timed")) == sum(step["phase"] == "window" for step in STEPS)
    write(record / "summary.json", "{}")
    write(record / "environment.json", "{}")
    write(record / "config.json", json.dumps({"clap": {"text_tokens": 77}}))
    assert read_record(record).context_length == 77


def test_a_killed_run_tells_its_rate_from_its_steps(record: Path) -> None:
    text = "".join(json.dumps(step) + "\n" for step in STEPS if step["step"] <= 7)  # window 3 has one step of two
    write(record / "metrics.jsonl", text + '{"step": 8, "phase": "win')
    write(record / "summary.json", json.dumps({"state": "running"}))
    run = read_record(record)
    rates = [
        2 * 4 / sum(step["slowest_rank_time_s"] for step in STEPS if step["window"] == window) for window in (1, 2)
    ]
    assert (run.windows, run.rate) == (pytest.approx(rates), pytest.approx(2 / (1 / rates[0] + 1 / rates[1])))
    assert (run.state, run.gpus) == ("running", 2)
    assert "2 complete windows read from metrics.jsonl" in run.notes
    (record / "metrics.jsonl").unlink()
    write(record / "summary.json", json.dumps({"state": "out_of_memory", "error": "CUDA out of memory"}))
    run = read_record(record)
    assert (run.state, run.error, run.rate, run.batch_per_gpu) == ("out_of_memory", "CUDA out of memory", None, 4)
    assert run.notes == "no complete window was measured"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_s_per_gpu": {"mean": float("inf"), "low": 1, "high": 2}}, "samples_per_s_per_gpu is inf"),
        ({"breakdown_s": [1]}, r"schema\.py"),
        ({"num_nodes": 1.5}, "nodes is 1.5; expected a whole number"),
        ({"preset": 3}, "model is 3; expected text"),
        (None, "not valid JSON"),
    ],
)
def test_a_record_that_is_not_of_its_schema_is_refused(
    record: Path, changes: dict[str, Any] | None, message: str
) -> None:
    summed_up(record, **CHANGES | (changes or {}))
    if changes is None:
        write(record / "summary.json", '{"state": "compl')
    with pytest.raises(UserError, match=message):
        read_record(record)
