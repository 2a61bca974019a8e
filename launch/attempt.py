"""Determine how an attempt, one run of the launcher, ended.

Ranks report in error files. Of ranks that could not write one, the launcher's output says how they
ended or why they never started. Its lines are those of srun's `_task_finish`, `_node_fail_handler`
and `_fail_step_tasks`. With torchrun, tasks are its agents.
"""

from __future__ import annotations

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

UNCLEAR_KINDS = (STOPPED, "", LINK, LOST_PEER, STALL, UNREACHABLE)
"""Kinds and faults of failures that a host may have caused without a rank naming it."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended.

    Attributes:
        at_fault: suspects, if a host and not the program may have caused the failure.
        kind: fault or kind of the root cause, if any.
    """

    state: State
    error: str
    exit_code: int
    at_fault: list[str] = field(default_factory=list)
    kind: str = ""

    @property
    def is_a_hosts(self) -> bool:
        """Whether another attempt without the suspects may succeed."""
        return self.state == "failed" and bool(self.at_fault)

    @property
    def is_unclear(self) -> bool:
        """Whether no rank reported a cause other than an unresponsive peer, or a stop that may be
        its host's."""
        if self.at_fault:
            return False
        return self.kind == STOPPED or (self.state == "failed" and self.kind in UNCLEAR_KINDS)


def find_run_directory(folder: Path) -> RunDirectory | None:
    """Return the run directory of an attempt's folder, or None if rank 0 has not created one."""
    path = folder / "run_directory"
    if not path.is_file():
        return None
    return RunDirectory(Path(read_bytes(path).decode().strip()))


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of an attempt's run; empty if there is none."""
    with suppress(OSError, ValueError):
        run = find_run_directory(folder)
        if run is not None:
            return {**run.summary()}
    return {}


def describe_lost_hosts(hosts: dict[str, str], code: int) -> AttemptOutcome:
    """Return the outcome of losing hosts, given why each is considered lost."""
    reasons = "; ".join(f"{host}: {reason}" for host, reason in hosts.items())
    return AttemptOutcome("failed", f"lost {reasons}", code or 1, [*hosts])


def determine_outcome(
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
    run = find_run_directory(folder)
    summary = read_summary(folder)
    state = summary.get("state")
    if code == 0 and state == "completed" and stopped is None:
        return AttemptOutcome("completed", "", 0)
    # Errors of ranks are consequences of a lost host.
    if down:
        return describe_lost_hosts(down, code)
    # Shells report the end by signal N as 128 + N.
    if state == "timeout" or signal.SIGUSR1 in (stopped, code - 128):
        return _timed_out(summary)
    if stopped is not None:
        return AttemptOutcome("terminated", f"stopped by {stopped.name}", 128 + stopped)
    # Ranks of a completed run end without files, so none is missing.
    hosts_with_files = () if state == "completed" else hosts
    cause = find_root_cause(run.path if run else None, folder, hosts_with_files, launcher.first)
    if cause is None or (cause.kind == STOPPED and state == "failed"):
        return _without_cause(code, summary, launcher)
    if cause.kind == STOPPED:
        exit_code = code or 128 + signal.SIGTERM
        return AttemptOutcome("terminated", cause.message, exit_code, kind=STOPPED)
    return _with_cause(cause, code, state, launcher)


def _timed_out(summary: Mapping[str, Any]) -> AttemptOutcome:
    """Return the outcome of a time limit. It is a success if the last checkpoint was saved."""
    checkpoints = summary.get("checkpoints") or [{}]
    if summary.get("state") == "failed" or not checkpoints[-1].get("saved"):
        return AttemptOutcome("timeout", "stopped before the time limit", 128 + signal.SIGUSR1)
    message = f"stopped before the time limit, and saved at step {summary.get('step')}"
    return AttemptOutcome("timeout", message, 0)


def _with_cause(
    cause: RankError, code: int, state: str | None, launcher: LauncherErrors
) -> AttemptOutcome:
    """Return the outcome of a failure with a known root cause."""
    message = cause.message
    # Such as slurmstepd's `execve(): …: No such file or directory`, which names no task.
    if cause.kind == KILLED and cause.fault == IMPORT and launcher.remark:
        message = f"{message} ({launcher.remark})"
    if cause.kind == USER:
        exit_code = USER_ERROR
    elif cause.kind in (SIGNAL, KILLED):
        exit_code = code or 1
    else:
        # srun's code is the highest of all ranks, including those that it killed.
        exit_code = 1
    end_state: State = "out_of_memory" if "out_of_memory" in (cause.kind, state) else "failed"
    kind = cause.fault or cause.kind
    return AttemptOutcome(end_state, message, exit_code, cause.hosts, kind)


def _without_cause(
    code: int, summary: Mapping[str, Any], launcher: LauncherErrors
) -> AttemptOutcome:
    """Return the outcome of an attempt of which no rank has a cause."""
    state = summary.get("state")
    error = summary.get("error")
    if state == "terminated":
        return AttemptOutcome("terminated", error or "cancelled", code or 128 + signal.SIGTERM)
    if not error:
        error = (
            f"the launcher exited with code {code}, and no rank reported an error"
            " (killed, out of memory?); see the launcher's output above"
        )
        printed = launcher.first.message if launcher.first else launcher.remark
        if printed:
            error = f"{error}: {printed}"
    end_state: State = "out_of_memory" if state == "out_of_memory" else "failed"
    return AttemptOutcome(end_state, error, code or 1)


MAX_LINE_BYTES = 1000
# With `srun --label`, lines begin with their task.
_TASK = re.compile(r"(?:\d+: )?srun: error: ((?P<hosts>\S+): tasks? \d\S*: (?P<end>.+))")
_NODE = re.compile(
    r"(?:\d+: )?srun: error: "
    r"(?P<end>(?:Node failure|Task launch for .+ failed) on (?:node )?(?P<hosts>[^\s:]+).*)"
)
# Not steps that a task's end cancels.
_REMARK = re.compile(r"(?:\d+: )?(?:srun|slurmstepd\S*): error: (?!.*CANCELLED)(.+)")
_STOPS = "Terminated|Interrupt|Hangup|User defined signal 1|Exited with exit code (129|130|138|143)"
_ENDS = (
    (_STOPS, STOPPED, PROGRAM),
    ("Exited with exit code (?!137)", KILLED, IMPORT),
    ("Node failure|Task launch", KILLED, HOST),
    ("", KILLED, KILLED),
)
"""Kind and fault of the ends of a task: by signals that ask it to stop, by itself, by losing its
host, by other signals."""
AGENT_FAILED = "Exited with exit code 1"
"""How torchrun's agents end, also if another host's agent fails."""


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
        self._first_end = ""
        self._line = b""

    def read(self, output: bytes) -> None:
        """Read the next part of the output."""
        *lines, self._line = (self._line + output).split(b"\n")
        self._line = self._line[:MAX_LINE_BYTES]
        for line in lines:
            with suppress(ValueError):  # a malformed list of hosts
                self._read_line(line[:MAX_LINE_BYTES].decode(errors="replace"))

    def _read_line(self, line: str) -> None:
        match = _TASK.match(line) or _NODE.match(line)
        if match is None:
            remark = _REMARK.match(line)
            if remark is not None and not self.remark:
                self.remark = remark[1]
            return
        end = match["end"]
        hosts = [host for host in expand(match["hosts"]) if host in self._hosts]
        if self.first is None:
            if hosts:
                message = f"lost {hosts[0]}: {end}" if match.re is _NODE else match[1]
                self._set_first(end, hosts, message)
        elif self.first.fault == IMPORT and end == self._first_end != AGENT_FAILED:
            # All hosts may lack the program.
            self.first.hosts[:] = dict.fromkeys([*self.first.hosts, *hosts])

    def _set_first(self, end: str, hosts: list[str], message: str) -> None:
        self._first_end = end
        for pattern, kind, fault in _ENDS:
            if re.match(pattern, end):
                self.first = RankError(0.0, 0, hosts[0], kind, message, hosts=hosts, fault=fault)
                return
