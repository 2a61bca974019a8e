"""Run the launcher once and determine the outcome of the run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from clap_ds.config.errors import USER_ERROR
from clap_ds.distributed.error_file import LOST_PEER, STALL, UNREACHABLE, read_errors
from clap_ds.distributed.hostfile import free_port
from clap_ds.distributed.root_cause import find_root_cause
from clap_ds.launch import slurm
from clap_ds.launch.launchers import Launcher, environment
from clap_ds.run_records.metrics_schema import State
from clap_ds.run_records.run_dir import RunDirectory  # imports only the standard library

SAVE_S = 300.0  # grace period for ranks to save after a signal
LINGER_S = 45.0  # grace period for the launcher to exit after its run: it would wait for an unreachable host
LOOK_S = 0.5
IMPORT = "import"  # kind of an outcome: a package is missing
_IMPORT_ERROR = re.compile(r"ModuleNotFoundError|ImportError")


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended. `at_fault` are the suspects if a host and not the program may have caused the failure."""

    state: State
    error: str
    exit_code: int
    at_fault: list[str] = field(default_factory=list)
    kind: str = ""  # of the root cause, if any

    @property
    def is_a_hosts(self) -> bool:
        """Whether another attempt without the suspects may succeed."""
        return self.state == "failed" and bool(self.at_fault)

    @property
    def is_unclear(self) -> bool:
        """Whether no rank reported a cause other than an unresponsive peer."""
        return self.state == "failed" and not self.at_fault and self.kind in ("", LOST_PEER, STALL, UNREACHABLE)


def run_directory_of(folder: Path) -> RunDirectory | None:
    """Return the run directory of an attempt's folder, or None if rank 0 has not created one."""
    path = folder / "run_directory"
    return RunDirectory(Path(path.read_text().strip())) if path.is_file() else None


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of an attempt's run; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if run := run_directory_of(folder):
            return {**run.summary()}
    return {}


def lost(hosts: dict[str, str], code: int) -> AttemptOutcome:
    """Return the outcome of losing hosts, given why each is considered lost."""
    return AttemptOutcome("failed", f"lost {'; '.join(map(': '.join, hosts.items()))}", code or 1, [*hosts])


def outcome_of(
    code: int, folder: Path, hosts: Sequence[str], stopped: signal.Signals | None, down: dict[str, str]
) -> AttemptOutcome:
    """Determine how an attempt ended.

    Args:
        code: the launcher's exit code; DeepSpeed's may be 0 if its srun was killed or lost all hosts.
        hosts: host of each rank.
        stopped: the signal that this job received.
        down: hosts that SLURM considers down, with their SLURM states.
    """
    run, summary = run_directory_of(folder), summary_of(folder)
    state, error = summary.get("state"), summary.get("error")
    found = find_root_cause(run.path if run else None, folder, hosts)
    if down:
        return lost(down, code)
    if code == 0 and (state == "completed" or (run is None and found is None)) and stopped is None:
        return AttemptOutcome("completed", "", 0)
    if state == "timeout" or stopped == signal.SIGUSR1 or code == 128 + signal.SIGUSR1:
        saved = state != "failed" and any(each.get("saved") for each in (summary.get("checkpoints") or [])[-1:])
        at = f", and saved at step {summary.get('step')}" if saved else ""
        return AttemptOutcome("timeout", f"stopped before the time limit{at}", 0 if saved else 128 + signal.SIGUSR1)
    if stopped is not None:
        return AttemptOutcome("terminated", f"stopped by {stopped.name}", 128 + stopped)
    if found is not None and found.kind != "stopped":
        # srun's exit code is the highest of all ranks, including those it killed.
        code = USER_ERROR if found.kind == "user" else code if found.kind in ("signal", "killed") and code else 1
        ended: State = "out_of_memory" if found.kind == "out_of_memory" else "failed"
        if _IMPORT_ERROR.search(found.message):  # a host's fault unless all have it
            lacking = {each.host for each in read_errors(folder) if _IMPORT_ERROR.search(each.message)}
            return AttemptOutcome(ended, found.message, code, sorted(lacking) if {*hosts} - lacking else [], IMPORT)
        return AttemptOutcome(ended, found.message, code, found.hosts, found.kind)
    if state == "terminated":
        return AttemptOutcome("terminated", error or "cancelled", code or 128 + signal.SIGTERM)
    unsaid = f"the launcher exited with code {code}, and no rank reported an error; see the launcher's output above"
    return AttemptOutcome(state if state == "out_of_memory" else "failed", error or unsaid, code or 1)


@dataclass(frozen=True)
class Attempt:
    """One run of the launcher.

    Attributes:
        hosts: number of ranks by host.
        folder: holds the hostfile; ranks write their files there.
        stopped: returns the signal that this job received, if any; it is forwarded to the ranks.
        expect: receives the expected outcome when a signal comes: SLURM may not wait until the ranks have ended.
    """

    launcher: Launcher
    hosts: dict[str, int]
    folder: Path
    stopped: Callable[[], signal.Signals | None]
    expect: Callable[[AttemptOutcome], object]

    def run(self, words: Sequence[str]) -> AttemptOutcome:
        """Run the launcher until it exits, and return the outcome."""
        command = self.launcher.command(self.hosts, self.folder / "hostfile", free_port(), words)
        # A new session: signals to this process group must not kill the launcher, whose ranks would keep running.
        child = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        copying = threading.Thread(target=copy, args=(child.stdout, sys.stdout.fileno()), daemon=True)
        copying.start()
        code = self._wait(child, copying)
        outcome = self._outcome(code)
        if slurm.job_id() and outcome.is_unclear and (silent := slurm.silent_nodes([*self.hosts])):
            outcome = lost(dict.fromkeys(silent, "srun can't reach it"), code)
        return outcome

    def _outcome(self, code: int) -> AttemptOutcome:
        stopped, is_complete = self.stopped(), code == 0 and summary_of(self.folder).get("state") == "completed"
        asks = slurm.job_id() and not is_complete and stopped != signal.SIGUSR1
        down = slurm.lost_nodes([*self.hosts]) if asks else {}
        ranks = [host for host, count in self.hosts.items() for _ in range(count)]
        return outcome_of(code, self.folder, ranks, stopped, down)

    def _wait(self, child: subprocess.Popen[bytes], copying: threading.Thread) -> int:
        """Wait until the launcher and its children, which share its output, have exited, and return its exit code."""
        told = over = None
        while child.poll() is None or copying.is_alive():
            now_s, number = time.monotonic(), self.stopped()
            if number is not None and told is None:
                told = now_s
                slurm.signal_step(self.launcher.attempt, number)
                self.expect(self._outcome(128 + number))
            over = over or (now_s if summary_of(self.folder).get("state") not in (None, "running") else None)
            if now_s - (told or now_s) > SAVE_S or now_s - (over or now_s) > LINGER_S:
                slurm.signal_step(self.launcher.attempt, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            time.sleep(LOOK_S)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def copy(source: IO[bytes], log: int) -> None:
    """Copy the launcher's output to the log. If the disk is full, some is lost; srun would never write to the log again."""
    while text := os.read(source.fileno(), 2**16):
        with contextlib.suppress(OSError):
            os.write(log, text)
