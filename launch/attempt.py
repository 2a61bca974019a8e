"""Determine how an attempt, one run of the launcher, ended.

Read from a launcher's output where ranks ended or never started, for ranks that could not write
an error file.

The lines are those of srun's `_task_finish`, `_node_fail_handler` and `_fail_step_tasks`. With
torchrun, tasks are its agents.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.distributed.error_file import (
    HOST,
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    PROGRAM,
    SIGNAL,
    STALL,
    STOPPED,
    UNREACHABLE,
    USER,
    RankError,
)
from clap_ds.distributed.hostfile import expand
from clap_ds.distributed.root_cause import find_root_cause
from clap_ds.run_records.run_dir import RunDirectory  # imports only the standard library
from clap_ds.run_records.schema import State
from clap_ds.utils.errors import USER_ERROR
from clap_ds.utils.files import read_bytes


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


MOST_BYTES = 1000  # of a line
# With `srun --label`, lines begin with their task.
_TASK = re.compile(r"(?:\d+: )?srun: error: ((?P<hosts>\S+): tasks? \d\S*: (?P<end>.+))")
_NODE = re.compile(
    r"(?:\d+: )?srun: error: (?P<end>(?:Node failure|Task launch for .+ failed) on (?:node )?(?P<hosts>[^\s:]+).*)"
)
_REMARK = re.compile(
    r"(?:\d+: )?(?:srun|slurmstepd\S*): error: (?!.*CANCELLED)(.+)"
)  # steps that a task's end cancels
_STOPS = "Terminated|Interrupt|Hangup|User defined signal 1|Exited with exit code (129|130|138|143)"
_ENDS = (
    (_STOPS, STOPPED, PROGRAM),
    ("Exited with exit code (?!137)", KILLED, IMPORT),
    ("Node failure|Task launch", KILLED, HOST),
    ("", KILLED, KILLED),
)
"""Kind and fault of the ends of a task: by signals that ask it to stop, by itself, by losing its
host, by other signals."""
AGENT_FAILED = "Exited with exit code 1"  # of torchrun, also if another host's agent fails


class LauncherErrors:
    """The first error of a task in a launcher's output, in bounded memory.

    Attributes:
        first: the error. `hosts` are those of which srun says the same.
        remark: the first error that names no task, such as a program that doesn't exist.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self.first: RankError | None = None
        self.remark = ""
        self._hosts = hosts
        self._end = ""  # of the first task
        self._line = b""

    def read(self, output: bytes) -> None:
        """Read the next part of the output."""
        *lines, self._line = (self._line + output).split(b"\n")
        self._line = self._line[:MOST_BYTES]
        for line in lines:
            with suppress(ValueError):  # a malformed list of hosts
                self._read_line(line[:MOST_BYTES].decode(errors="replace"))

    def _read_line(self, line: str) -> None:
        match = _TASK.match(line) or _NODE.match(line)
        if match is None:
            remark = _REMARK.match(line)
            if remark is not None and not self.remark:
                self.remark = remark[1]
            return
        end = match["end"]
        hosts = [host for host in expand(match["hosts"]) if host in self._hosts]
        if self.first is not None:
            if (
                self.first.fault == IMPORT and end == self._end != AGENT_FAILED
            ):  # all hosts may lack the program
                self.first.hosts[:] = dict.fromkeys([*self.first.hosts, *hosts])
        elif hosts:
            self._end = end
            kind, fault = next(
                (kind, fault) for pattern, kind, fault in _ENDS if re.match(pattern, end)
            )
            message = f"lost {hosts[0]}: {end}" if fault == HOST else match[1]
            self.first = RankError(0.0, 0, hosts[0], kind, message, hosts=hosts, fault=fault)
