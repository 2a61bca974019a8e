"""Determine how an attempt, one run of the launcher, ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.errors import USER_ERROR
from clap_ds.config.files import read_bytes
from clap_ds.distributed.error_file import (
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    SIGNAL,
    STALL,
    STOPPED,
    UNREACHABLE,
    USER,
    RankError,
)
from clap_ds.distributed.root_cause import find_root_cause
from clap_ds.launch.launcher_errors import LauncherErrors
from clap_ds.run_records.metrics_schema import State
from clap_ds.run_records.run_dir import RunDirectory  # imports only the standard library


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended. `at_fault` are the suspects if a host and not the program may have
    caused the failure."""

    state: State
    error: str
    exit_code: int
    at_fault: list[str] = field(default_factory=list)
    kind: str = ""  # fault or kind of the root cause, if any

    @property
    def is_a_hosts(self) -> bool:
        """Whether another attempt without the suspects may succeed."""
        return self.state == "failed" and bool(self.at_fault)

    @property
    def is_unclear(self) -> bool:
        """Whether no rank reported a cause other than an unresponsive peer, or a stop that may be
        its host's."""
        kinds = (
            (STOPPED, "", LINK, LOST_PEER, STALL, UNREACHABLE)
            if self.state == "failed"
            else (STOPPED,)
        )
        return not self.at_fault and self.kind in kinds


def run_directory_of(folder: Path) -> RunDirectory | None:
    """Return the run directory of an attempt's folder, or None if rank 0 has not created one."""
    path = folder / "run_directory"
    return RunDirectory(Path(read_bytes(path).decode().strip())) if path.is_file() else None


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of an attempt's run; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if run := run_directory_of(folder):
            return {**run.summary()}
    return {}


def lost(hosts: dict[str, str], code: int) -> AttemptOutcome:
    """Return the outcome of losing hosts, given why each is considered lost."""
    return AttemptOutcome(
        "failed", f"lost {'; '.join(map(': '.join, hosts.items()))}", code or 1, [*hosts]
    )


def outcome_of(
    code: int,
    folder: Path,
    hosts: Sequence[str],
    stopped: signal.Signals | None,
    down: dict[str, str],
    launcher: LauncherErrors,
) -> AttemptOutcome:
    """Determine how an attempt ended.

    Args:
        code: the launcher's exit code; DeepSpeed's may be 0 if its srun was killed or lost all
          hosts.
        hosts: host of each rank.
        stopped: the signal that this job received.
        down: hosts that SLURM considers down, with their SLURM states.
        launcher: what the launcher printed.
    """
    run = run_directory_of(folder)
    summary = summary_of(folder)
    state = summary.get("state")
    if code == 0 and state == "completed" and stopped is None:
        return AttemptOutcome("completed", "", 0)
    if down:
        return lost(down, code)
    if state == "timeout" or signal.SIGUSR1 in (stopped, code - 128):
        return _timed_out(summary)
    if stopped is not None:
        return AttemptOutcome("terminated", f"stopped by {stopped.name}", 128 + stopped)
    expected_hosts = (
        () if state == "completed" else hosts
    )  # ranks of a completed run end without files
    cause = find_root_cause(run.path if run else None, folder, expected_hosts, launcher.first)
    if cause is None or (cause.kind == STOPPED and state == "failed"):
        return _without_cause(code, summary, launcher)
    if cause.kind == STOPPED:
        return AttemptOutcome(
            "terminated", cause.message, code or 128 + signal.SIGTERM, kind=STOPPED
        )
    return _with_cause(cause, code, state, launcher)


def _timed_out(summary: Mapping[str, Any]) -> AttemptOutcome:
    """Return the outcome of a time limit. It is a success if the last checkpoint was saved."""
    last_checkpoint = (summary.get("checkpoints") or [{}])[-1]
    if summary.get("state") == "failed" or not last_checkpoint.get("saved"):
        return AttemptOutcome("timeout", "stopped before the time limit", 128 + signal.SIGUSR1)
    return AttemptOutcome(
        "timeout", f"stopped before the time limit, and saved at step {summary.get('step')}", 0
    )


def _with_cause(
    cause: RankError, code: int, state: str | None, launcher: LauncherErrors
) -> AttemptOutcome:
    message = cause.message
    if cause.kind == KILLED and cause.fault == IMPORT and launcher.remark:
        message = f"{message} ({launcher.remark})"
    if cause.kind == USER:
        code = USER_ERROR
    elif cause.kind not in (SIGNAL, KILLED):
        code = 1  # srun's is the highest of all ranks, including those it killed
    ended: State = "out_of_memory" if "out_of_memory" in (cause.kind, state) else "failed"
    return AttemptOutcome(ended, message, code or 1, cause.hosts, cause.fault or cause.kind)


def _without_cause(
    code: int, summary: Mapping[str, Any], launcher: LauncherErrors
) -> AttemptOutcome:
    state = summary.get("state")
    error = summary.get("error")
    if state == "terminated":
        return AttemptOutcome("terminated", error or "cancelled", code or 128 + signal.SIGTERM)
    printed = launcher.first.message if launcher.first else launcher.remark
    unexplained = (
        f"the launcher exited with code {code}, and no rank reported an error (killed, out of memory?);"
        f" see the launcher's output above{': ' if printed else ''}{printed}"
    )
    ended: State = "out_of_memory" if state == "out_of_memory" else "failed"
    return AttemptOutcome(ended, error or unexplained, code or 1)
