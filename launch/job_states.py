"""What became of a submitted job, and what it measured: from what it recorded, and from what SLURM knows of it.

Leaves submitting to `batch_script.py`, and what a run's summary holds to `record/schema.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError
from clap_ds.config.files import read_object
from clap_ds.launch.slurm import WAITING, is_on_its_way

ENDS = {"TIMEOUT": "timeout", "PREEMPTED": "terminated", "DEADLINE": "terminated", "CANCELLED": "terminated"}
"""State (`record.schema.State`) by SLURM's of a job that recorded no end; others have failed."""


def state_of(folder: Path, slurm_id: str | None, slurm_state: str | None, log: Path) -> tuple[str, str]:
    """State of a job, `init` or one of `record.schema.State`, and a note; `slurm_state` is None for what SLURM forgot."""
    record = recorded(folder)
    state, note = record.get("state"), str(record.get("error") or "")
    if is_on_its_way(slurm_state):
        assert slurm_state is not None
        return ("init" if slurm_state in WAITING else state or "running"), slurm_state.lower()
    if state not in (None, "running"):
        return str(state), note
    if slurm_id is None:
        return "init", "not submitted"
    ended = ENDS.get(slurm_state or "", "failed")
    if not log.exists():
        return (ended if slurm_state else "terminated"), f"{(slurm_state or 'cancelled').lower()} before it began"
    return ended, f"SLURM: {slurm_state or 'no longer known'}; see {log}"


def recorded(folder: Path) -> dict[str, Any]:
    """`job.json` of a job's folder; empty where there is none yet, or only half of one."""
    try:
        return read_object(folder / "job.json")
    except UserError:
        return {}


def figures_of(folder: Path) -> str:
    """The numbers that matter of what a job has measured or learned so far; empty where there are none."""
    try:
        summary = read_object(Path(recorded(folder)["run_directory"]) / "summary.json")
    except (KeyError, TypeError, UserError):
        return ""
    if "loss" in summary and summary.get("command") == "train":
        return f"loss {summary['loss']:.4f} at step {summary.get('step', 0):,}"
    rate = summary.get("samples_per_s_per_gpu", {}).get("mean")
    return f"{rate:,.2f} samples/s/GPU" if rate else ""
