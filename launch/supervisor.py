"""Supervise a run inside an allocation and retry it after host failures. The last line of a job
script.

Examples:
    python -m clap_ds.launch.supervisor --folder F -- clap_ds/bench.py --deepspeed_config C

If a host fails, a spare host replaces it (`--spare_nodes`), or SLURM requeues the job without that
host. `attempts.json` in the folder and the run directory record the outcome.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.distributed.error_file import IMPORT, KILLED, SIGNAL
from clap_ds.distributed.hostfile import format_hostfile, read_hostfile, slots_from_slurm
from clap_ds.launch import slurm
from clap_ds.launch.attempt import (
    AttemptOutcome,
    LauncherErrors,
    lost,
    outcome_of,
    run_directory_of,
    summary_of,
)
from clap_ds.launch.cluster_profile import ATTEMPTS, PROFILE, ClusterProfile, job_file
from clap_ds.launch.launchers import environment, launch_command, prepare_attempt
from clap_ds.run_records.lock import FolderLock
from clap_ds.run_records.run_dir import warn_on_disk_full
from clap_ds.utils.errors import exit_code_of, printable
from clap_ds.utils.files import own_folder, read_object, write_atomically, write_object
from clap_ds.utils.redaction import redacted_all

STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
FOLLOW_THE_PROGRAM = (KILLED, SIGNAL, IMPORT)
"""Kinds of failures that aren't a host's if they recur on another host."""
SAVE_S = 300.0  # grace period for ranks to save after a signal
# grace period for the launcher to exit after its run: it would wait for an unreachable host
LINGER_S = 45.0
LOOK_S = 0.5


class RunningJob:
    """One start of a job."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        spare_nodes: int = 0,
        *,
        auto_requeue: bool = False,
        slots: int | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.command = [*command]
        self.auto_requeue = auto_requeue
        if slots is not None:
            write_atomically(
                self.folder / "hostfile", format_hostfile(slots_from_slurm(os.environ, slots))
            )
        self.slots = read_hostfile(self.folder / "hostfile")
        self.wanted = len(self.slots) - spare_nodes
        self.changes = slurm.without_spares(self.wanted, slots) if slots and spare_nodes else ""
        self.profile = ClusterProfile(**read_object(job_file(self.folder, PROFILE)))
        self.job = os.environ["SLURM_JOB_ID"]
        self.start = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        path = job_file(self.folder, ATTEMPTS)
        earlier = read_object(path) if path.exists() else {}
        self.attempts: list[dict[str, Any]] = (
            earlier["attempts"] if earlier.get("job") == self.job else []
        )
        self.stopped: signal.Signals | None = None
        self.launcher = LauncherErrors([])  # of the last attempt, if this process started it
        self.record: dict[str, Any] = {
            "job": self.job, "command": self.command, "hosts": self.slots, "started": _now(), "attempts": self.attempts,
        }  # fmt: skip

    def run(self) -> int:
        """Run attempts until no other can help, and return the job's exit code."""
        for number in STOPS:
            signal.signal(number, self._hear)
        if (
            self.attempts and not (last := self.attempts[-1])["finished"]
        ):  # SLURM ended that start, or its host went down
            down = slurm.lost_nodes(last["hosts"]) or dict.fromkeys(last["at_fault"], "down")
            self.note(
                outcome_of(1, self._folder(), last["hosts"], signal.SIGTERM, down, self.launcher)
            )
        hosts = self.choose_hosts()
        while True:
            outcome = self._attempt(hosts)
            hosts = self.choose_hosts() if outcome.is_a_hosts and not self.stopped else {}
            if not hosts:
                return self._finish(outcome)
            _say(f"error: {outcome.error}\nrestarting without {', '.join(outcome.at_fault)}")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stopped = self.stopped or signal.Signals(number)

    def excluded(self) -> list[str]:
        """Return the hosts that are blamed for failed attempts."""
        return list(
            dict.fromkeys(name for attempt in self.attempts for name in attempt["at_fault"])
        )

    def choose_hosts(self) -> dict[str, int]:
        """Return the hosts of the next attempt; empty if too few are left."""
        excluded = self.excluded()
        good = [name for name in self.slots if name not in excluded]
        if len(good) < self.wanted and not any(
            attempt["start"] == self.start for attempt in self.attempts
        ):
            good = [*self.slots]  # SLURM allocated an excluded host again
        return (
            {name: self.slots[name] for name in good[: self.wanted]}
            if len(good) >= self.wanted
            else {}
        )

    def _folder(self) -> Path:
        """Return the folder of the last attempt."""
        return self.folder / "attempts" / str(len(self.attempts) - 1)

    def _attempt(self, hosts: dict[str, int]) -> AttemptOutcome:
        """Run the launcher until it exits, and return the outcome."""
        self.begin(hosts)
        folder = self._folder()
        step = f"{self.job}.{len(self.attempts)}"
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier job in this folder
        with own_folder(folder) as there:
            prepare_attempt(there, hosts)
        words = [*self.command, "--job_folder", str(folder)]
        python = self.profile.interpreter() if self.profile.container() else sys.executable
        command = launch_command(self.profile, python, hosts, folder / "hostfile", words, step)
        # A new session: signals to this process group must not kill the launcher, whose ranks would
        # keep running.
        child = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.launcher = LauncherErrors(hosts)
        copying = threading.Thread(
            target=copy, args=(child.stdout, sys.stdout.fileno(), self.launcher), daemon=True
        )
        copying.start()
        code = self._wait(child, copying, step)
        outcome = self._outcome(code)
        if outcome.is_unclear and (silent := slurm.silent_nodes([*hosts])):
            outcome = lost(dict.fromkeys(silent, "srun can't reach it"), code)
        return self.note(outcome)

    def _wait(self, child: subprocess.Popen[bytes], copying: threading.Thread, step: str) -> int:
        """Wait until the launcher and its children, which share its output, have exited, and return
        its exit code."""
        told = over = None
        while child.poll() is None or copying.is_alive():
            now_s = time.monotonic()
            number = self.stopped
            if number is not None and told is None:
                told = now_s
                slurm.signal_step(self.job, step, number)
                self.expect(
                    self._outcome(128 + number)
                )  # SLURM may not wait until the ranks have ended
            over = over or (
                now_s if summary_of(self._folder()).get("state") not in (None, "running") else None
            )
            if now_s - (told or now_s) > SAVE_S or now_s - (over or now_s) > LINGER_S:
                slurm.signal_step(self.job, step, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            time.sleep(LOOK_S)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _outcome(self, code: int) -> AttemptOutcome:
        hosts = self.attempts[-1]["hosts"]
        down = slurm.lost_nodes(hosts) if self.stopped != signal.SIGUSR1 else {}
        hosts_of_ranks = [host for host in hosts for _ in range(self.slots.get(host, 1))]
        return outcome_of(code, self._folder(), hosts_of_ranks, self.stopped, down, self.launcher)

    def begin(self, hosts: dict[str, int]) -> None:
        """Record an attempt as running."""
        self.attempts.append({
            "hosts": [*hosts], "started": _now(), "finished": None, "state": "running", "error": "", "at_fault": [],
            "start": self.start, "requeued": False, "saved": False,
        })  # fmt: skip
        self._record(state="running", error=None)

    def note(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Record the outcome of the last attempt, and return it without hosts if it isn't their
        fault."""
        before = [
            host for each in self.attempts[:-1] for host in each["at_fault"]
            if each.get("kind") == outcome.kind in FOLLOW_THE_PROGRAM and host not in outcome.at_fault
        ]  # fmt: skip
        if before and outcome.at_fault:
            message = f"{outcome.error}; as before on {', '.join(before)}: not a host's fault"
            outcome = replace(outcome, at_fault=[], error=message)
        self.attempts[-1]["finished"] = _now()
        self.expect(outcome)
        run = run_directory_of(self._folder())
        if run and (outcome.state == "failed" or run.summary().get("state") != outcome.state):
            run.update_summary(state=outcome.state, error=outcome.error or None, finished=_now())
        return outcome

    def expect(self, outcome: AttemptOutcome) -> None:
        """Record an outcome of the last attempt."""
        saved = any(
            each.get("saved") for each in summary_of(self._folder()).get("checkpoints") or []
        )
        self.attempts[-1].update(asdict(outcome), saved=saved)
        self._record(error=outcome.error)

    def _finish(self, outcome: AttemptOutcome) -> int:
        """Report and record the outcome, requeue the job if that helps, and return the exit
        code."""
        self.attempts[-1]["requeued"] = again = self.asks_for_another_start(outcome)
        run = run_directory_of(self._folder())
        self._record(
            **asdict(outcome), finished=_now(), run_directory=str(run.path) if run else None
        )
        if outcome.error:
            _say(f"{'error: ' if outcome.exit_code else ''}{outcome.error}")
        if again:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # requeueing ends this job
            without = self.excluded()
            _say(f"requeueing this job{' without ' * bool(without)}{', '.join(without)}")
            if problem := slurm.requeue(self.start, without, self.changes):
                _say(f"warning: {problem}")
        return outcome.exit_code

    def asks_for_another_start(self, outcome: AttemptOutcome) -> bool:
        if self.stopped in (signal.SIGTERM, signal.SIGINT):
            return False
        if self.auto_requeue and outcome.state == "timeout" and outcome.exit_code == 0:
            return True
        since = max(
            (index for index, attempt in enumerate(self.attempts) if attempt["saved"]), default=0
        )
        done = sum(attempt["requeued"] for attempt in self.attempts[since:])
        return outcome.is_a_hosts and done < self.profile.requeues

    def _record(self, **fields: object) -> None:
        """Merge fields into `attempts.json`."""
        self.record.update(fields)
        with warn_on_disk_full(path := self.folder / ATTEMPTS):
            write_object(path, redacted_all(self.record))


def supervise(folder: Path, **options: Any) -> int:
    """Run the job in its folder unless another job runs there, and return the job's exit code."""
    slurm.require_commands()
    lock = FolderLock(folder.resolve())
    lock.acquire()
    try:
        return RunningJob(folder, **options).run()
    finally:
        lock.release()


def copy(source: IO[bytes], log: int, errors: LauncherErrors) -> None:
    """Copy the launcher's output to the log. If the disk is full, some is lost; srun would never
    write to the log again."""
    while text := os.read(source.fileno(), 2**16):
        errors.read(text)
        with contextlib.suppress(OSError):
            os.write(log, text)


def _say(text: str) -> None:
    print(printable(text, "\n"), file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    folder_help = (
        f"read {PROFILE} in this job folder, and write hostfile, records and attempts to it"
    )
    add("--folder", type=Path, required=True, metavar="FOLDER", help=folder_help)
    slots_help = "write the hostfile, with N ranks per host (default: read it)"
    add("--slots", type=whole_number(), metavar="N", help=slots_help)
    add(
        "--spare_nodes",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="keep N hosts as hot spares",
    )
    add("--auto_requeue", action="store_true", help="requeue training after each time limit")
    add(
        "command",
        nargs="+",
        metavar="SCRIPT …",
        help="after --: script that the ranks run, with its arguments",
    )
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: supervise(**vars(arguments)))


if __name__ == "__main__":
    sys.exit(main())
