"""Supervise a run inside an allocation and retry it after host failures. The last line of a job
script.

Examples:
    python -m clap_ds.launch.supervisor --folder F -- clap_ds/bench.py --deepspeed_config C

If a host fails, a spare host replaces it (`--spare_nodes`), the job continues on fewer hosts
(`--fewer_nodes`), or SLURM requeues it without that host. `attempts.json` in the folder and the run
directory record the outcome.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.distributed.error_file import IMPORT, KILLED, SIGNAL
from clap_ds.distributed.hostfile import (
    format_hostfile,
    list_rank_hosts,
    read_hostfile,
    slots_from_slurm,
)
from clap_ds.launch import slurm
from clap_ds.launch.attempt import (
    AttemptOutcome,
    LauncherErrors,
    describe_lost_hosts,
    determine_outcome,
    find_run_directory,
    read_summary,
)
from clap_ds.launch.cluster_profile import ATTEMPTS, PROFILE, ClusterProfile, job_file
from clap_ds.launch.launchers import environment, launch_command, prepare_attempt
from clap_ds.run_records.lock import FolderLock
from clap_ds.run_records.run_dir import warn_on_disk_full
from clap_ds.utils.errors import exit_code_of, printable
from clap_ds.utils.files import hold_folder, read_object, write_atomically, write_object
from clap_ds.utils.redaction import redact_all

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
SOFTWARE_FAULTS = (KILLED, SIGNAL, IMPORT)
"""Kinds of failures that aren't a host's if they recur on another host."""
SAVE_LIMIT_S = 300.0  # for ranks to save after a signal
# For the launcher to exit after its run: it would wait for an unreachable host.
EXIT_LIMIT_S = 45.0
POLL_INTERVAL_S = 0.5


class RunningJob:
    """One start of a job.

    Attributes:
        slots: ranks by allocated host.
        num_hosts: hosts of an attempt; others are spare.
        host_counts: this, then the smaller numbers on which the run can continue.
        start: how often SLURM has requeued the job.
        attempts: records of all attempts, those of earlier starts included.
        stop_signal: the first signal that asked the job to stop.
        launcher_errors: of the last attempt, if this process started it.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        spare_nodes: int = 0,
        fewer_nodes: Sequence[int] = (),
        *,
        auto_requeue: bool = False,
        slots: int | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.command = [*command]
        self.auto_requeue = auto_requeue
        hostfile = self.folder / "hostfile"
        if slots is not None:
            write_atomically(hostfile, format_hostfile(slots_from_slurm(os.environ, slots)))
        self.slots = read_hostfile(hostfile)
        self.num_hosts = len(self.slots) - spare_nodes
        self.host_counts = [self.num_hosts, *sorted(fewer_nodes, reverse=True)]
        # A requeued job doesn't wait for as many nodes as at first.
        self.requeue_changes = ""
        if slots and spare_nodes:
            self.requeue_changes = slurm.without_spares(self.num_hosts, slots)
        self.profile = ClusterProfile(**read_object(job_file(self.folder, PROFILE)))
        self.job = os.environ["SLURM_JOB_ID"]
        self.start = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.attempts: list[dict[str, Any]] = []
        path = job_file(self.folder, ATTEMPTS)
        if path.exists():
            earlier = read_object(path)
            # Else another job has run in this folder.
            if earlier.get("job") == self.job:
                self.attempts = earlier["attempts"]
        self.stop_signal: signal.Signals | None = None
        self.launcher_errors = LauncherErrors([])
        self.record: dict[str, Any] = {
            "job": self.job,
            "command": self.command,
            "hosts": self.slots,
            "started": _now(),
            "attempts": self.attempts,
        }

    def run(self) -> int:
        """Run attempts until no other can help, and return the job's exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        if self.attempts and not self.attempts[-1]["finished"]:
            self._record_interrupted_attempt()
        hosts = self.choose_hosts()
        while True:
            outcome = self._run_attempt(hosts)
            if not outcome.is_a_hosts or self.stop_signal:
                return self._finish(outcome)
            hosts = self.choose_hosts()
            if not hosts:
                return self._finish(outcome)
            plan = f"restarting without {', '.join(outcome.at_fault)}"
            if len(hosts) < self.num_hosts:
                plan += f" on {len(hosts)} of {self.num_hosts} nodes, with the same global batch"
            _report(f"error: {outcome.error}\n{plan}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or signal.Signals(number)

    def _record_interrupted_attempt(self) -> None:
        """Record the last attempt of an earlier start, which SLURM ended, or whose supervisor's
        host went down."""
        last = self.attempts[-1]
        down = slurm.find_lost_nodes(last["hosts"]) or dict.fromkeys(last["at_fault"], "down")
        folder = self._attempt_folder()
        self.record_outcome(
            determine_outcome(1, folder, last["hosts"], signal.SIGTERM, down, self.launcher_errors)
        )

    def find_excluded_hosts(self) -> list[str]:
        """Return the hosts that are blamed for failed attempts."""
        hosts: dict[str, None] = {}
        for attempt in self.attempts:
            hosts |= dict.fromkeys(attempt["at_fault"])
        return [*hosts]

    def choose_hosts(self) -> dict[str, int]:
        """Return the hosts of the next attempt; empty if too few are left."""
        excluded = self.find_excluded_hosts()
        hosts = [host for host in self.slots if host not in excluded]
        is_new_start = all(attempt["start"] != self.start for attempt in self.attempts)
        if len(hosts) < self.num_hosts and is_new_start:
            hosts = [*self.slots]  # SLURM allocated an excluded host again
        for num_hosts in self.host_counts:
            if num_hosts <= len(hosts):
                return {host: self.slots[host] for host in hosts[:num_hosts]}
        return {}

    def _attempt_folder(self) -> Path:
        """Return the folder of the last attempt."""
        return self.folder / "attempts" / str(len(self.attempts) - 1)

    def _run_attempt(self, hosts: dict[str, int]) -> AttemptOutcome:
        """Run the launcher until it exits, and return the outcome."""
        self.begin_attempt(hosts)
        folder = self._attempt_folder()
        step = f"{self.job}.{len(self.attempts)}"
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier job in this folder
        with hold_folder(folder) as private_folder:
            prepare_attempt(private_folder, hosts)
        words = [*self.command, "--job_folder", str(folder)]
        # This process runs outside of the ranks' container, whose Python is another one.
        python = self.profile.interpreter() if self.profile.container() else sys.executable
        launcher = subprocess.Popen(
            launch_command(self.profile, python, hosts, folder / "hostfile", words, step),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Signals to this process group must not kill the launcher, whose ranks would keep
            # running.
            start_new_session=True,
        )
        self.launcher_errors = LauncherErrors(hosts)
        copy_arguments = (launcher.stdout, sys.stdout.fileno(), self.launcher_errors)
        copying = threading.Thread(target=copy_output, args=copy_arguments, daemon=True)
        copying.start()
        code = self._wait(launcher, copying, step)
        outcome = self._determine_outcome(code)
        # Ranks notice a lost host before SLURM does.
        if outcome.is_unclear:
            silent = slurm.find_silent_nodes([*hosts])
            if silent:
                outcome = describe_lost_hosts(dict.fromkeys(silent, "srun can't reach it"), code)
        return self.record_outcome(outcome)

    def _wait(self, launcher: subprocess.Popen[bytes], copying: threading.Thread, step: str) -> int:
        """Wait until the launcher and its children, which share its output, have exited, and return
        its exit code. Kill them if they exit too late after a signal or the run's end."""
        kill_at = float("inf")
        is_signaled = False
        has_run_ended = False
        while launcher.poll() is None or copying.is_alive():
            if self.stop_signal is not None and not is_signaled:
                is_signaled = True
                kill_at = min(kill_at, time.monotonic() + SAVE_LIMIT_S)
                slurm.signal_step(self.job, step, self.stop_signal)
                # SLURM may not wait until the ranks have ended.
                self.record_expected(self._determine_outcome(128 + self.stop_signal))
            state = read_summary(self._attempt_folder()).get("state")
            if state not in (None, "running") and not has_run_ended:
                has_run_ended = True
                kill_at = min(kill_at, time.monotonic() + EXIT_LIMIT_S)
            if time.monotonic() > kill_at:
                slurm.signal_step(self.job, step, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
            time.sleep(POLL_INTERVAL_S)
        # As in a shell: Popen's code is the negative number of a fatal signal.
        code = launcher.returncode
        return code if code >= 0 else 128 - code

    def _determine_outcome(self, code: int) -> AttemptOutcome:
        hosts = self.attempts[-1]["hosts"]
        # At the time limit, what the ranks have saved counts.
        down = {} if self.stop_signal == signal.SIGUSR1 else slurm.find_lost_nodes(hosts)
        host_of_rank = list_rank_hosts({host: self.slots.get(host, 1) for host in hosts})
        folder = self._attempt_folder()
        return determine_outcome(
            code, folder, host_of_rank, self.stop_signal, down, self.launcher_errors
        )

    def begin_attempt(self, hosts: dict[str, int]) -> None:
        """Record an attempt as running."""
        attempt = {
            "hosts": [*hosts],
            "started": _now(),
            "finished": None,
            "state": "running",
            "error": "",
            "at_fault": [],
            "start": self.start,
            "requeued": False,
            "saved": False,
        }
        self.attempts.append(attempt)
        self._write_record(state="running", error=None)

    def record_outcome(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Record the outcome of the last attempt, and return it without hosts if it isn't their
        fault."""
        earlier_hosts = []
        if outcome.kind in SOFTWARE_FAULTS and outcome.at_fault:
            for attempt in self.attempts[:-1]:
                if attempt.get("kind") == outcome.kind:
                    earlier_hosts += attempt["at_fault"]
        repeats = [host for host in earlier_hosts if host not in outcome.at_fault]
        if repeats:
            error = f"{outcome.error}; as before on {', '.join(repeats)}: not a host's fault"
            outcome = replace(outcome, at_fault=[], error=error)
        self.attempts[-1]["finished"] = _now()
        self.record_expected(outcome)
        # Ranks that were killed could not record how their run ended.
        run = find_run_directory(self._attempt_folder())
        if run and (outcome.state == "failed" or run.summary().get("state") != outcome.state):
            run.update_summary(state=outcome.state, error=outcome.error or None, finished=_now())
        return outcome

    def record_expected(self, outcome: AttemptOutcome) -> None:
        """Record an outcome of the last attempt, which may still run."""
        checkpoints = read_summary(self._attempt_folder()).get("checkpoints") or []
        saved = any(checkpoint.get("saved") for checkpoint in checkpoints)
        self.attempts[-1].update(asdict(outcome), saved=saved)
        self._write_record(error=outcome.error)

    def _finish(self, outcome: AttemptOutcome) -> int:
        """Report and record the outcome, requeue the job if that helps, and return the exit
        code."""
        requeues = self.should_requeue(outcome)
        self.attempts[-1]["requeued"] = requeues
        run = find_run_directory(self._attempt_folder())
        run_path = str(run.path) if run else None
        self._write_record(**asdict(outcome), finished=_now(), run_directory=run_path)
        if outcome.error:
            _report(f"error: {outcome.error}" if outcome.exit_code else outcome.error)
        if requeues:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # requeueing ends this job
            excluded = self.find_excluded_hosts()
            hint = f" without {', '.join(excluded)}" if excluded else ""
            _report(f"requeueing this job{hint}")
            problem = slurm.requeue(self.start, excluded, self.requeue_changes)
            if problem:
                _report(f"warning: {problem}")
        return outcome.exit_code

    def should_requeue(self, outcome: AttemptOutcome) -> bool:
        """Return whether another start of the job may succeed, and is allowed."""
        if self.stop_signal in (signal.SIGTERM, signal.SIGINT):
            return False
        if self.auto_requeue and outcome.state == "timeout" and outcome.exit_code == 0:
            return True
        # A checkpoint starts the count anew, as the job makes progress.
        num_requeues = 0
        for attempt in self.attempts:
            if attempt["saved"]:
                num_requeues = 0
            num_requeues += attempt["requeued"]
        return outcome.is_a_hosts and num_requeues < self.profile.requeues

    def _write_record(self, **fields: object) -> None:
        """Merge fields into `attempts.json`."""
        self.record.update(fields)
        path = self.folder / ATTEMPTS
        with warn_on_disk_full(path):
            write_object(path, redact_all(self.record))


def supervise(folder: Path, **options: Any) -> int:
    """Run the job in its folder unless another job runs there, and return the job's exit code."""
    slurm.require_commands()
    lock = FolderLock(folder.resolve())
    lock.acquire()
    try:
        return RunningJob(folder, **options).run()
    finally:
        lock.release()


def copy_output(source: IO[bytes], log: int, errors: LauncherErrors) -> None:
    """Copy the launcher's output to the log. If the disk is full, some is lost; srun would never
    write to the log again."""
    while output := os.read(source.fileno(), 2**16):
        errors.read(output)
        with suppress(OSError):
            os.write(log, output)


def _report(text: str) -> None:
    print(printable(text, "\n"), file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def counts(text: str) -> list[int]:
    """Read whole numbers that commas separate."""
    return [*map(whole_number(), text.split(","))]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    folder_help = (
        f"read {PROFILE} in this job folder, and write hostfile, records and attempts to it"
    )
    add("--folder", type=Path, required=True, metavar="FOLDER", help=folder_help)
    slots_help = "write the hostfile, with N ranks per host (default: read it)"
    add("--slots", type=whole_number(), metavar="N", help=slots_help)
    spare_help = "keep N hosts as hot spares"
    add("--spare_nodes", type=whole_number(0), default=0, metavar="N", help=spare_help)
    fewer_help = "continue on so many hosts, the most that are left, if spares are used up"
    add("--fewer_nodes", type=counts, default=(), metavar="N,N", help=fewer_help)
    add("--auto_requeue", action="store_true", help="requeue training after each time limit")
    command_help = "after --: script that the ranks run, with its arguments"
    add("command", nargs="+", metavar="SCRIPT …", help=command_help)
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: supervise(**vars(arguments)))


if __name__ == "__main__":
    sys.exit(main())
