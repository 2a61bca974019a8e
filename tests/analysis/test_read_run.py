"""Complete and damaged run directories."""

import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.read_run import read_json, read_record, read_steps
from clap_ds.analysis.report import render_runs
from clap_ds.analysis.scaling import render, scaling_table
from clap_ds.analysis.time_to_target import find_evaluation
from clap_ds.utils.errors import UserError
from tests.analysis.samples import DATA, write
from tests.processes import Command
from tests.training.training_commands import wait_until

RECORD = DATA / "record_2ranks"
SUMMARY = json.loads((RECORD / "summary.json").read_text())
RATES = {"mean": 1.5, "min": 1.4, "max": 1.6, "windows": [1.0, 2.0]}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def change_summary(record: Path, **changes: Any) -> Path:
    """Write the record's summary with changed fields."""
    write(record / "summary.json", json.dumps(SUMMARY | changes))
    return record


def test_record_has_every_field_of_its_files(record):
    changes = {
        "schema": 3,
        "samples_per_s_per_gpu": RATES,
        "achieved_tflops": 0.25,
        "joules_per_sample": 0.5,
    }
    run = read_record(change_summary(record, **changes))
    assert (run.state, run.model) == ("completed", "clap_htsat_tiny_roberta_base")
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.context_length) == (1, 2, 4, 77)
    assert (run.rate, run.windows, run.finished[:4]) == (1.5, (1.0, 2.0), "2026")
    assert (run.breakdown_s, run.achieved_tflops) == (SUMMARY["breakdown_s"], 0.25)
    assert run.deepspeed_samples_per_s_per_gpu == SUMMARY["deepspeed_samples_per_s"] / 2
    assert (run.joules_per_sample, run.energy_kwh) == (0.5, None)
    assert run.memory_peak_gib == SUMMARY["memory_peak_bytes"] / 2**30
    # The configuration has the micro-batch that the summary lacks.
    changes = {"gradient_accumulation_steps": 3, "micro_batch_per_gpu": None}
    assert read_record(change_summary(record, **changes)).batch_per_gpu == 12


def test_former_name_of_a_preset_is_another_model(record):
    models = [read_record(change_summary(record, schema=schema)).model for schema in (3, 4)]
    assert models == ["clap_htsat_tiny_roberta_base", "htsat_tiny_roberta_base"]


def test_record_of_an_older_schema_has_current_names(record):
    straggler = {"rank": 1, "lag_s": 0.5}
    former = {"slow_ranks": [straggler], "text_tokens": 7}
    former["samples_per_s_per_gpu"] = {"mean": 2.0, "low": 1.0, "high": 3.0}
    write(record / "summary.json", json.dumps(former))
    assert read_json(record, "summary") == {
        "stragglers": [straggler],
        "context_length": 7,
        "samples_per_s_per_gpu": {"mean": 2.0, "min": 1.0, "max": 3.0},
    }
    text = (record / "metrics.jsonl").read_text()
    assert len(read_steps(record, "timed")) == text.count('"window",') > 0


def test_run_that_ended_early_has_its_measurements(record):
    write(record / "summary.json", json.dumps({"state": "running", "samples_per_s_per_gpu": RATES}))
    run = read_record(record)
    assert (run.state, run.gpus, run.rate) == ("running", 2, 1.5)
    failed = {"state": "out_of_memory", "error": "CUDA out of memory"}
    write(record / "summary.json", json.dumps(failed))
    run = read_record(record)
    assert (run.state, run.error) == ("out_of_memory", "CUDA out of memory")
    assert (run.rate, run.batch_per_gpu) == (None, 4)
    assert run.notes == "no complete window was measured"


RUNNING = """
import json, sys, time
from pathlib import Path
from clap_ds.run_records.lock import identify_process
record = Path(sys.argv[1])
(record / "environment.json").write_text(json.dumps({"process": identify_process()}))
(record / "summary.json").write_text(json.dumps({"state": "running"}))
print("written", flush=True)
time.sleep(600)
"""


def test_killed_run_is_not_shown_as_running(tmp_path):
    process = Command(["-c", RUNNING, tmp_path])
    wait_until(lambda: process.stdout)
    assert (read_record(tmp_path).state, read_record(tmp_path).error) == ("running", "")
    process.kill()
    process.wait()
    run = read_record(tmp_path)
    assert run.state == "killed"
    assert "out of memory" in run.error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary", '{"state": "compl', "not valid JSON"),
        (
            "summary",
            '{"samples_per_s_per_gpu": {"mean": Infinity}}',
            "samples_per_s_per_gpu is inf",
        ),
        ("summary", '{"num_nodes": 1.5}', "nodes is 1.5; expected a whole number"),
        ("environment", '{"versions": true}', r"environment\.versions.* expected"),
    ],
)
def test_record_that_is_not_of_its_schema_is_rejected(record, name, content, message):
    write(record / f"{name}.json", content)
    with pytest.raises(UserError, match=message):
        read_record(record)


def test_summary_names_no_file_but_a_history(record):
    steps = read_steps(record, "timed")
    line = json.dumps({"phase": "timed", "step": 7, "loss": float("nan")})
    for name, expected in (("history.jsonl", 1), ("private.jsonl", len(steps))):
        history = write(record.parent / name, line)
        assert len(read_steps(record, "timed", history=str(history))) == expected


WRONG: tuple[Any, ...] = (True, 0, -1, 1e308, 10**400, "x", [1.5], {"a": [1]})
FIELDS = {
    "summary": "error state finished history stragglers samples_per_s_per_gpu world_size device_name",
    "environment": "device_names versions hosts command git_commit process world_size",
    "config": "clap gradient_accumulation_steps train_micro_batch_size_per_gpu optimizer",
}


@pytest.mark.parametrize("name", FIELDS)
def test_value_of_a_wrong_type_is_a_message_or_harmless(record, name):
    content = json.loads((RECORD / f"{name}.json").read_text())
    for field, value in itertools.product(FIELDS[name].split(), WRONG):
        write(record / f"{name}.json", json.dumps({**content, field: value}))
        with suppress(UserError):
            run = read_record(record)
            render(scaling_table([run]))
            [*render_runs([run])]
            find_evaluation(run, "zero_shot_top1", 0.5)


def test_only_numbers_of_a_step_are_used(record):
    line = {"phase": "train", "step": 1, "loss": "x", "lr": 1e308, "time_s": 2.0}
    line["chance"] = {"a": [1], "b": 0.5}
    lines = [json.dumps(line), json.dumps({"phase": "train", "step": [1]})]
    write(record / "metrics.jsonl", "\n".join(lines))
    assert read_steps(record, "train") == [{"step": 1, "time_s": 2.0, "chance": {"b": 0.5}}]
