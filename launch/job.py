"""Runs a command's ranks on the hosts of a hostfile, and sees to how that ends. The last line of a job script.

    exec python launch/job.py --hostfile H --folder F -- clap_ds/bench.py --deepspeed_config C

DeepSpeed's launcher over pdsh hangs when a host can't be reached, leaves ranks behind when it is signalled, and may end
with 0 all the same. Here signals reach every rank, a host or rank that is lost ends the job with its name, no process
stays on any host, and the exit code is the run's. `job.json` in the folder says how it went; the run directory's state
is filled in when the ranks were killed before they could. Leaves what happens on a host to `launch/host_agent.py`. No
torch, no DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

if __package__ in (None, ""):
    # By its path, as job scripts start it: of a checkout or of an installed package.
    sys.path[0] = next(str(folder) for folder in Path(__file__).resolve().parents if (folder / "clap_ds").is_dir())

from clap_ds.config.places import work_folder
from clap_ds.dist.hostfile import read_hostfile
from clap_ds.launch.agents import Agents
from clap_ds.launch.launchers import launch_command
from clap_ds.record.directory import RunDirectory, State

RANK_LOST_S = 20.0
"""A rank may end this much before the others."""
WARNING_GRACE_S = 20.0
TERM_GRACE_S = 10.0
"""Time for ranks to record their end: after the warning before the time limit, and after SIGTERM (SLURM kills after 30).
`--grace` allows more, for ranks that save what they have."""
PING_S = 5.0
LAST_LINES_S = 1.0
"""Time to read what the launcher said last, which may name the run; a process it left behind could hold its output open."""
FAILED = 1

_RUN_DIRECTORY = re.compile(rb"run directory: (\S.*)")
_PDSH_EXIT = re.compile(rb"pdsh@\S+: (\S+): (?:ssh )?exited with exit code (\d+)")
_SRUN_EXIT = re.compile(rb"srun: error: (\S+): tasks? [\d,\-\[\]]+: (.*)")


@dataclass
class Ending:
    """Why the job ends, when it isn't the launcher's own end."""

    state: State
    message: str
    code: int


class Job:
    """One start of a launcher, from its hosts' first answer to their last."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.slots = read_hostfile(arguments.hostfile)
        self.name = f"{os.environ.get('SLURM_JOB_ID', f'p{os.getpid()}')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self.record = RunDirectory(arguments.folder)
        self.run_directory: Path | None = None
        self.failures: list[tuple[float, str]] = []
        self.signalled: int | None = None
        self.agents: Agents | None = None
        self.started = time.monotonic()
        self._readers: list[threading.Thread] = []
        self._told: dict[str, object] = {"job": self.name, "command": arguments.command}

    def run(self) -> int:
        """Run it; the job's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._hear_signal)
        self._tell(state="running", started=_now(), hosts=self.slots, launcher=self.arguments.launcher)
        self.agents = Agents(
            list(self.slots),
            self.name,
            self.arguments.python,
            through="ssh" if self.arguments.launcher == "pdsh" else "srun",
        )
        silent = self.agents.wait_for_all()
        if silent and self.signalled is None:
            told = "; ".join(f"{host.name} ({host.last_words or 'no answer'})" for host in silent)
            ending = Ending("failed", f"{len(silent)} of {len(self.slots)} hosts can't be reached: {told}", FAILED)
            return self._finish(ending, None)
        if self.signalled is not None:
            return self._finish(self._signal_ending(), None)
        launcher = self._launch()
        return self._finish(self._watch(launcher), launcher)

    def _hear_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = self.signalled or number

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CLAP_JOB": self.name, "PYTHONUNBUFFERED": "1"}
        if self.arguments.launcher == "pdsh":
            environment["DS_ENV_FILE"] = str(self._environment_file())
        process = subprocess.Popen(
            launch_command(self.arguments, self.slots, self.name), cwd=work_folder(), env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            self._readers.append(threading.Thread(target=self._pass_on, args=(stream, out.buffer), daemon=True))
            self._readers[-1].start()
        return process

    def _environment_file(self) -> Path:
        path = Path(self.arguments.folder) / "environment"
        given = self.arguments.environment.read_text().splitlines() if self.arguments.environment else []
        path.write_text("\n".join([*(line for line in given if line.strip()), f"CLAP_JOB={self.name}"]))
        return path.resolve()

    def _pass_on(self, stream: IO[bytes], out: IO[bytes]) -> None:
        """Copy the launcher's output, having noted what it says: who reads of the run there finds it known here."""
        for line in stream:
            self._note(line)
            out.write(line)
            out.flush()

    def _note(self, line: bytes) -> None:
        """What a line of the launcher's says of the run and of hosts that failed."""
        if found := _RUN_DIRECTORY.search(line):
            self.run_directory = Path(os.fsdecode(found.group(1).strip()))
            if self.arguments.monitor and self.agents:
                self.agents.say(f"monitor {self.run_directory}")
        elif found := _PDSH_EXIT.search(line):
            host, code = found.group(1).decode(), int(found.group(2))
            killed = f" (killed by {signal.Signals(256 - code).name})" if 0 < 256 - code < 32 else ""
            told = "can't be reached any more" if code == 255 else f"its ranks ended with code {code}{killed}"
            self.failures.append((time.monotonic(), f"{host}: {told}"))
        elif found := _SRUN_EXIT.search(line):
            self.failures.append((time.monotonic(), f"{found.group(1).decode()}: {found.group(2).decode()}"))

    def _watch(self, launcher: subprocess.Popen[bytes]) -> Ending | None:
        """Wait for the launcher's end, or for a reason to end it."""
        assert self.agents is not None
        next_ping = 0.0
        while launcher.poll() is None:
            if self.signalled is not None:
                return self._signal_ending()
            lost = self.agents.lost()
            if lost:
                names = ", ".join(host.name for host in lost)
                silent_s = time.monotonic() - min(host.heard or 0.0 for host in lost)
                return Ending("failed", f"lost {names}: no sign of life for {silent_s:.0f} s", FAILED)
            if self.failures and time.monotonic() - self.failures[0][0] > RANK_LOST_S:
                return Ending("failed", f"{self.failures[0][1]}; the other hosts went on waiting for it", FAILED)
            short = self.agents.short_of_ranks(RANK_LOST_S)
            if short:
                told = "; ".join(f"{host.name} has {host.num_ranks} of {host.most_ranks} ranks left" for host in short)
                return Ending("failed", f"ranks ended while others went on: {told}", FAILED)
            if time.monotonic() >= next_ping:
                self.agents.say("ping")
                next_ping = time.monotonic() + PING_S
            time.sleep(0.1)
        return self._signal_ending() if self.signalled is not None else None

    def _signal_ending(self) -> Ending:
        assert self.signalled is not None
        name = signal.Signals(self.signalled).name
        if self.signalled == signal.SIGUSR1:
            return Ending(
                "timeout",
                f"stopped by {name}, {time.monotonic() - self.started:.0f} s after its start",
                128 + self.signalled,
            )
        return Ending("terminated", f"stopped by {name}", 128 + self.signalled)

    def _finish(self, ending: Ending | None, launcher: subprocess.Popen[bytes] | None) -> int:
        """End what still runs, on every host; say and record how it went."""
        assert self.agents is not None
        began = time.monotonic()
        if launcher is not None and ending is not None and launcher.poll() is None and self.signalled is not None:
            self.agents.say(f"signal {self.signalled}")
            grace = WARNING_GRACE_S if self.signalled == signal.SIGUSR1 else TERM_GRACE_S
            grace = max(grace, self.arguments.grace)
            next_ping = began + PING_S
            while launcher.poll() is None and time.monotonic() - began < grace and not self._no_ranks_left(began):
                if time.monotonic() >= next_ping:
                    self.agents.say("ping")  # or they would take themselves for cut off
                    next_ping += PING_S
                time.sleep(0.1)
        unconfirmed = self.agents.stop(timeout_s=15.0)
        if launcher is not None:
            try:
                launcher.wait(2.0)
            except subprocess.TimeoutExpired:
                _kill_group(launcher)
            for reader in self._readers:
                reader.join(LAST_LINES_S)
        return self._conclude(ending, launcher, [host.name for host in unconfirmed], time.monotonic() - began)

    def _no_ranks_left(self, since: float) -> bool:
        """By what every host has said since then: of ranks that have only just started, none has said anything before."""
        assert self.agents is not None
        return all((host.heard or 0.0) >= since and not host.num_ranks for host in self.agents.hosts.values())

    def _conclude(
        self, ending: Ending | None, launcher: subprocess.Popen[bytes] | None, unconfirmed: list[str], took_s: float
    ) -> int:
        assert self.agents is not None
        state, message = self._run_state()
        where = ""
        if ending is None:
            assert launcher is not None
            code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
            first = self.agents.first_short()
            where = f"a rank on {first.name} ended first; " if first and len(self.slots) > 1 else ""
            told = where + (self.failures[0][1] if self.failures else f"the launcher ended with code {code}")
            if state == "terminated":
                # Not by us: a launcher ends the other ranks with SIGTERM when one fails.
                state = "running"
            if state == "completed" and code == 0:
                ending = Ending("completed", "", 0)
            elif state in (None, "running"):
                # A launcher may end with 0 although its ranks did not; a command without a run directory has only its code.
                clean = code == 0 and state is None and message is None
                told += f"; {message}" if state is None and message else ""
                ending = Ending("completed", "", 0) if clean else Ending("failed", told, code or FAILED)
            else:
                ending = Ending(state, where + message if message else told, code or FAILED)
        elif state not in (None, "running", "completed") and self.signalled is None:
            ending = Ending(state, f"{ending.message} ({message})" if message else ending.message, ending.code)
        elif state == "completed" and launcher is not None and launcher.returncode == 0:
            ending = Ending("completed", "", 0)
        if self.run_directory is not None:
            # However that goes, the job's own record and exit code tell how it ended.
            with contextlib.suppress(OSError, ValueError):
                run = RunDirectory(self.run_directory)
                run.finish(ending.state, ending.message or None)
                if run.summary().get("state") != ending.state or where:
                    run.update_summary(state=ending.state, error=ending.message or None)
        self._tell(
            state=ending.state, error=ending.message or None, exit_code=ending.code, finished=_now(),
            run_directory=str(self.run_directory) if self.run_directory else None,
            seconds=round(time.monotonic() - self.started, 1), seconds_to_stop=round(took_s, 1), unconfirmed=unconfirmed,
        )  # fmt: skip
        if ending.message:
            print(f"error: {ending.message}", file=sys.stderr, flush=True)
        if unconfirmed:
            print(
                f"warning: no word from {', '.join(unconfirmed)} that its processes are gone",
                file=sys.stderr,
                flush=True,
            )
        return ending.code

    def _run_state(self) -> tuple[State | None, str | None]:
        if self.run_directory is None:
            return None, None
        try:
            summary = RunDirectory(self.run_directory).summary()
        except (OSError, ValueError) as error:
            return None, f"{self.run_directory}/summary.json can't be read: {error}"
        return summary.get("state"), summary.get("error")

    def _tell(self, **fields: object) -> None:
        """Merge fields into `job.json`; a new start of a requeued job begins it anew."""
        self._told.update(fields)
        self.record.write_json("job.json", self._told)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/job.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the job's own folder, on a shared file system")
    parser.add_argument("--environment", type=Path, help="NAME=value lines for ranks on other hosts")
    parser.add_argument("--launcher", choices=["pdsh", "slurm", "srun"], default="pdsh")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the ranks")
    parser.add_argument(
        "--grace", type=float, default=0.0, metavar="S", help="seconds that ranks may take to save after a signal"
    )
    parser.add_argument(
        "--monitor", action=argparse.BooleanOptionalAction, default=True, help="sample GPUs into the run directory"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script and its arguments")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        arguments.command = arguments.command[1:]
    if not arguments.command:
        parser.error("nothing to run: give the script after --")
    try:
        return Job(arguments).run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
