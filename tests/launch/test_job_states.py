"""States of jobs whose records are missing, half-written or stale."""

import json
from pathlib import Path

import pytest

from clap_ds.launch.job_states import figures_of, state_of


@pytest.mark.parametrize(
    ("record", "slurm_id", "slurm_state", "logged", "expected"),
    [
        ({"state": "completed"}, "7", None, True, ("completed", "")),
        ({"state": "failed", "error": "why"}, "7", "FAILED", True, ("failed", "why")),
        ({"state": "completed"}, None, None, True, ("completed", "")),  # its id was lost
        ({"state": "running"}, "7", "RUNNING", True, ("running", "running")),
        ({"state": "timeout"}, "7", "PENDING", True, ("init", "pending")),  # queued again
        ({"state": "running"}, "7", "COMPLETING", True, ("running", "completing")),
        ({}, "7", "CONFIGURING", False, ("init", "configuring")),
        ({}, "7", "PENDING", False, ("init", "pending")),
        ({}, None, None, False, ("init", "not submitted")),
        ({}, "7", "CANCELLED", False, ("terminated", "cancelled before it began")),
        ({}, "7", None, False, ("terminated", "cancelled before it began")),
        ({}, "7", "NODE_FAIL", False, ("failed", "node_fail before it began")),
        ({"state": "running"}, "7", "NODE_FAIL", True, ("failed", "SLURM: NODE_FAIL; see ")),
        ({"state": "running"}, "7", "PREEMPTED", True, ("terminated", "SLURM: PREEMPTED; ")),
        ({"state": "running"}, "7", "OUT_OF_MEMORY", True, ("failed", "SLURM: OUT_OF_MEMORY; ")),
        ({"state": "running"}, "7", "TIMEOUT", True, ("timeout", "SLURM: TIMEOUT; ")),
        ({"state": "running"}, "7", None, True, ("failed", "SLURM: no longer known; see ")),
    ],
)
def test_states(
    tmp_path: Path, record: dict[str, str], slurm_id: str | None, slurm_state: str | None, logged: bool,
    expected: tuple[str, str],
) -> None:  # fmt: skip
    if record:
        (tmp_path / "job.json").write_text(json.dumps(record))
    if logged:
        (tmp_path / "log").touch()
    state, note = state_of(tmp_path, slurm_id, slurm_state, tmp_path / "log")
    assert state == expected[0]
    assert note.startswith(expected[1])
    assert ("log" in note) == ("SLURM" in expected[1])


def test_figures_of_rubbish_are_none(tmp_path: Path) -> None:
    assert figures_of(tmp_path) == ""
    for text in ("{", "{}", '{"run_directory": null}', '{"run_directory": "/no/such"}'):
        (tmp_path / "job.json").write_text(text)
        assert figures_of(tmp_path) == ""
    (tmp_path / "job.json").write_text(json.dumps({"run_directory": str(tmp_path)}))
    (tmp_path / "summary.json").write_text('{"samples_per_s_per_gpu": {"mean": 2.5}}')
    assert figures_of(tmp_path) == "2.50 samples/s/GPU"
