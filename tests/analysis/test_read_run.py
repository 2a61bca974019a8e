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
STEPS = [json.loads(line) for line in (RECORD / "metrics.jsonl").read_text().splitlines()]
RATES = {"mean": 1.5, "min": 1.4, "max": 1.6, "windows": [1.0, 2.0]}
CHANGES = {"schema": 3, "samples_per_s_per_gpu": RATES, "achieved_tflops": 0.25, "device_name": "NVIDIA H100",
           "step_time_s": {"median": 4 / 1.5}, "joules_per_sample": 0.5}  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORD, tmp_path / "record"))


def summed_up(record: Path, **changes: Any) -> Path:
    """Copy the record with changed fields of its summary."""
    write(record / "summary.json", json.dumps(SUMMARY | changes))
    return record


def test_every_field_of_a_real_record_arrives(record: Path) -> None:
    run = read_record(summed_up(record, **CHANGES))
    assert (run.state, run.model, run.nodes, run.gpus) == (
        "completed",
        "clap_htsat_tiny_roberta_base",
        1,
        2,
    )
    assert (run.batch_per_gpu, run.context_length, run.finished[:4]) == (4, 77, "2026")
    assert (run.rate, run.windows) == (1.5, (1.0, 2.0))
    assert (run.breakdown_s, run.achieved_tflops, run.notes) == (SUMMARY["breakdown_s"], 0.25, "")
    assert run.deepspeed_samples_per_s_per_gpu == SUMMARY["deepspeed_samples_per_s"] / 2
    assert (run.joules_per_sample, run.energy_kwh) == (0.5, None)
    assert run.memory_peak_gib == SUMMARY["memory_peak_bytes"] / 2**30
    assert run.environment["versions"]["torch"] == "2.13.0+cpu"
    changes = CHANGES | {"gradient_accumulation_steps": 3, "micro_batch_per_gpu": None}
    run = read_record(summed_up(record, **changes))
    assert run.batch_per_gpu == 12


def test_what_had_a_presets_name_before_is_another_model(record: Path) -> None:
    runs = [
        read_record(summed_up(record, schema=schema, samples_per_s_per_gpu=RATES))
        for schema in (3, 3, 4)
    ]
    assert [run.model for run in runs] == ["clap_htsat_tiny_roberta_base"] * 2 + [
        "htsat_tiny_roberta_base"
    ]
    assert [row.repeats for row in scaling_table(runs)] == [2, 1]
    assert (
        read_record(summed_up(record, preset="htsat_base_roberta_base")).model
        == "htsat_base_roberta_base"
    )


OLD_SUMMARY = {"slow_ranks": [{"rank": 1, "lag_s": 0.5}], "text_tokens": 7} | {
    "samples_per_s_per_gpu": {"mean": 2.0, "low": 1.0, "high": 3.0}
}
NEW_SUMMARY = {"stragglers": [{"rank": 1, "lag_s": 0.5}], "context_length": 7} | {
    "samples_per_s_per_gpu": {"mean": 2.0, "min": 1.0, "max": 3.0}
}


def test_records_of_older_schemas_are_read_by_todays_names(record: Path) -> None:
    for fields in (OLD_SUMMARY, NEW_SUMMARY):
        write(record / "summary.json", json.dumps(fields))
        assert read_json(record, "summary") == NEW_SUMMARY
    text = (record / "metrics.jsonl").read_text()
    steps = read_steps(record, "timed")
    write(record / "metrics.jsonl", text.replace('"window",', '"timed",'))
    assert (
        len(steps)
        == len(read_steps(record, "timed"))
        == sum(step["phase"] == "window" for step in STEPS)
    )


def test_a_run_that_ended_early_tells_what_it_had_measured(record: Path) -> None:
    write(record / "summary.json", json.dumps({"state": "running", "samples_per_s_per_gpu": RATES}))
    run = read_record(record)
    assert (run.state, run.gpus, run.rate) == ("running", 2, 1.5)
    write(
        record / "summary.json",
        json.dumps({"state": "out_of_memory", "error": "CUDA out of memory"}),
    )
    run = read_record(record)
    assert (run.state, run.error, run.rate, run.batch_per_gpu) == (
        "out_of_memory",
        "CUDA out of memory",
        None,
        4,
    )
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


def test_a_run_killed_without_a_report_is_not_shown_as_running(tmp_path: Path) -> None:
    process = Command(["-c", RUNNING, tmp_path])
    wait_until(lambda: process.stdout)
    assert (read_record(tmp_path).state, read_record(tmp_path).error) == ("running", "")
    process.kill()
    process.wait()
    run = read_record(tmp_path)
    assert run.state == "killed"
    assert "out of memory" in run.error

    environment = json.loads((tmp_path / "environment.json").read_text())
    environment["process"]["kernel"] = "another host's"
    write(tmp_path / "environment.json", json.dumps(environment))
    run = read_record(tmp_path)
    assert run.state == "running"
    assert run.error.startswith("last wrote a file at 20")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"samples_per_s_per_gpu": {"mean": float("inf"), "low": 1, "high": 2}},
            "samples_per_s_per_gpu is inf",
        ),
        ({"breakdown_s": [1]}, r"schema\.py"),
        ({"num_nodes": 1.5}, "nodes is 1.5; expected a whole number"),
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


def test_a_summary_names_no_file_but_a_history(record: Path) -> None:
    line = json.dumps({"phase": "timed", "step": 7, "loss": float("nan")})
    for name, expected in (
        ("history.jsonl", 1),
        ("private.jsonl", len(read_steps(record, "timed"))),
    ):
        write(record.parent / name, line)
        assert len(read_steps(record, "timed", history=str(record.parent / name))) == expected


WRONG: tuple[Any, ...] = (True, 0, -1, 1e308, 10**400, "x", [1.5], {"a": [1]})


FIELDS = {
    "summary": "error state finished history stragglers samples_per_s_per_gpu world_size device_name",
    "environment": "device_names versions hosts command git_commit process world_size",
    "config": "clap gradient_accumulation_steps train_micro_batch_size_per_gpu optimizer",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_a_wrong_type_is_a_message_or_harmless(record: Path, name: str) -> None:
    content = json.loads((RECORD / f"{name}.json").read_text())
    for field, value in itertools.product(FIELDS[name].split(), WRONG):
        write(record / f"{name}.json", json.dumps({**content, field: value}))
        with suppress(UserError):
            run = read_record(record)
            render(scaling_table([run]))
            [*render_runs([run])]
            find_evaluation(run, "zero_shot_top1", 0.5)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("environment", "device_names", 1.5),
        ("environment", "versions", True),
        ("summary", "stragglers", [1]),
    ],
)
def test_the_field_of_a_wrong_type_is_named(
    record: Path, name: str, field: str, value: Any
) -> None:
    write(record / f"{name}.json", json.dumps({field: value}))
    with pytest.raises(UserError, match=rf"{name}\.{field}.* expected"):
        read_record(record)


def test_only_numbers_of_a_step_are_used(record: Path) -> None:
    lines = [
        {
            "phase": "train",
            "step": 1,
            "loss": "x",
            "lr": 1e308,
            "chance": {"a": [1], "b": 0.5},
            "time_s": 2.0,
        }
    ]
    lines += [{"phase": "train", "step": [1]}]
    write(record / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_steps(record, "train") == [{"step": 1, "chance": {"b": 0.5}, "time_s": 2.0}]
