"""Runs a command's ranks on the hosts of a hostfile, and sees to how that ends. The last line of a job script.

    exec python launch/job.py --hostfile H --folder F -- clap_ds/bench.py --deepspeed_config C

DeepSpeed's launcher over pdsh hangs when a host can't be reached, leaves ranks behind when it is signalled, and may end
with 0 all the same. Here signals reach every rank, a host or rank that is lost ends the job with its name, no process
stays on any host, and the exit code is the run's. `job.json` in the folder says how it went, and the run directory, too,
when the ranks were killed before they could. Leaves what happens on a host to `launch/host_agent.py`. No torch.
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
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from clap_ds.config.errors import exit_code_of
from clap_ds.config.places import work_folder
from clap_ds.dist.hostfile import read_hostfile
from clap_ds.launch.agents import Agents
from clap_ds.launch.launchers import launch_command
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import
from clap_ds.record.schema import State

RANK_LOST_S = 20.0  # that a rank may end before the others
GRACE_S = {signal.SIGUSR1: 20.0, signal.SIGTERM: 10.0, signal.SIGINT: 10.0}
"""Time for ranks to record their end (SLURM kills 30 s after SIGTERM); `--grace` allows more, for those that save."""
PING_S = 5.0
LAST_LINES_S = 1.0
"""To read what the launcher said last, which may name the run; what it left behind could hold its output open."""
FAILED = 1
_RUN_DIRECTORY = re.compile(rb"run directory: (\S.*)")
_PDSH_EXIT = re.compile(rb"pdsh@\S+: (\S+): (?:ssh )?exited with exit code (\d+)")
_SRUN_EXIT = re.compile(rb"srun: error: (\S+): tasks? [\d,\-\[\]]+: (.*)")


class Ending(NamedTuple):
    state: State
    message: str
    code: int


class Job:
    """One start of a launcher, from its hosts' first answer to their last."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Read the hostfile and start the hosts' agents; a ValueError or OSError where one of the files can't be used."""
        self.arguments = arguments
        self.slots = read_hostfile(arguments.hostfile)
        self.name = f"{os.environ.get('SLURM_JOB_ID', f'p{os.getpid()}')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.run_directory: Path | None = None
        self.failures: list[tuple[float, str]] = []
        self.signalled: signal.Signals | None = None
        self.started = time.monotonic()
        self._readers: list[threading.Thread] = []
        self._next_ping = 0.0
        self._recorded: dict[str, object] = {"job": self.name, "command": arguments.command}
        for number in GRACE_S:
            signal.signal(number, self._hear_signal)
        self._record(state="running", started=_now(), hosts=self.slots, launcher=arguments.launcher)
        self.agents = Agents(list(self.slots), self.name, arguments.python, arguments.launcher)

    def run(self) -> int:
        """Run it; the job's exit code."""
        silent, ending = self.agents.wait_for_all(), None
        if silent and self.signalled is None:
            reasons = "; ".join(f"{host.name} ({host.last_words or 'no answer'})" for host in silent)
            ending = Ending("failed", f"{len(silent)} of {len(self.slots)} hosts can't be reached: {reasons}", FAILED)
        elif self.signalled is None:
            self.launcher = self._launch()
            while self.launcher.poll() is None and ending is None and self.signalled is None:
                ending = self._reason_to_end()
                self._pause()
        return self._finish(ending or (self._signal_ending(self.signalled) if self.signalled else None))

    def _hear_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = self.signalled or signal.Signals(number)

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CLAP_JOB": self.name, "PYTHONUNBUFFERED": "1"}
        if self.arguments.launcher == "pdsh":
            given = self.arguments.environment.read_text().splitlines() if self.arguments.environment else []
            path = Path(self.arguments.folder, "environment").resolve()
            path.write_text("\n".join([*filter(str.strip, given), f"CLAP_JOB={self.name}"]))
            environment["DS_ENV_FILE"] = str(path)
        process = subprocess.Popen(
            launch_command(self.arguments, self.slots, self.name), cwd=work_folder(), env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        for pair in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            self._readers.append(threading.Thread(target=self._pass_on, args=pair, daemon=True))
            self._readers[-1].start()
        return process

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
            self.agents.say(f"monitor {self.run_directory}")
        elif found := _PDSH_EXIT.search(line):
            host, code = found.group(1).decode(), int(found.group(2))
            killed = f" (killed by {signal.Signals(256 - code).name})" if 0 < 256 - code < 32 else ""
            what = "can't be reached any more" if code == 255 else f"its ranks ended with code {code}{killed}"
            self.failures.append((time.monotonic(), f"{host}: {what}"))
        elif found := _SRUN_EXIT.search(line):
            self.failures.append((time.monotonic(), f"{found.group(1).decode()}: {found.group(2).decode()}"))

    def _pause(self) -> None:
        """Wait a moment; agents that hear nothing for long take themselves for cut off."""
        if time.monotonic() >= self._next_ping:
            self.agents.say("ping")
            self._next_ping = time.monotonic() + PING_S
        time.sleep(0.1)

    def _reason_to_end(self) -> Ending | None:
        """Why the ranks are to be ended now, if they are, but for a signal."""
        now, hosts, message = time.monotonic(), self.agents.hosts.values(), ""
        if lost := self.agents.lost():
            silent_s = now - min(host.heard or 0.0 for host in lost)
            message = f"lost {', '.join(host.name for host in lost)}: no sign of life for {silent_s:.0f} s"
        elif self.failures and now - self.failures[0][0] > RANK_LOST_S:
            message = f"{self.failures[0][1]}; the other hosts went on waiting for it"
        elif any(host.num_ranks for host in hosts) and (short := self.agents.short_of_ranks(RANK_LOST_S)):
            left = "; ".join(f"{host.name} has {host.num_ranks} of {host.most_ranks} ranks left" for host in short)
            message = f"ranks ended while others went on: {left}"
        return Ending("failed", message, FAILED) if message else None

    def _signal_ending(self, number: signal.Signals) -> Ending:
        message = f"stopped by {number.name}, {time.monotonic() - self.started:.0f} s after its start"
        return Ending("timeout" if number == signal.SIGUSR1 else "terminated", message, 128 + number)

    def _finish(self, ending: Ending | None) -> int:
        """End what still runs, on every host; say and record how it went. No `ending`: the launcher ended by itself."""
        began = time.monotonic()
        if self.launcher is not None and self.launcher.poll() is None and self.signalled is not None:
            self.agents.say(f"signal {int(self.signalled)}")
            until = began + max(GRACE_S[self.signalled], self.arguments.grace)
            hosts = self.agents.hosts.values()
            while self.launcher.poll() is None and time.monotonic() < until:
                # Of ranks that have only just started, none may have said anything before the signal.
                if all((host.heard or 0.0) >= began and not host.num_ranks for host in hosts):
                    break
                self._pause()
        unconfirmed = [host.name for host in self.agents.stop(timeout_s=15.0)]
        code = None
        if self.launcher is not None:
            try:
                self.launcher.wait(2.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(self.launcher.pid, signal.SIGKILL)
            code = self.launcher.wait()
            for reader in self._readers:
                reader.join(LAST_LINES_S)
        ending = self._conclude(ending, code if code is None or code >= 0 else 128 - code)
        self._complete_run_record(ending)
        self._record(
            state=ending.state, error=ending.message or None, exit_code=ending.code, finished=_now(),
            run_directory=str(self.run_directory) if self.run_directory else None, unconfirmed=unconfirmed,
            seconds=round(time.monotonic() - self.started, 1), seconds_to_stop=round(time.monotonic() - began, 1),
        )  # fmt: skip
        if ending.message:
            print(f"error: {ending.message}", file=sys.stderr, flush=True)
        for name in unconfirmed:
            print(f"warning: {name} didn't confirm that its processes are gone", file=sys.stderr, flush=True)
        return ending.code

    def _conclude(self, ending: Ending | None, code: int | None) -> Ending:
        """How the job ended: by why it was ended, if it was, the launcher's exit code, and what the run recorded."""
        state, message = self._run_state()
        if state == "completed" and code == 0:
            return Ending("completed", "", 0)
        if ending is not None:
            if state in (None, "running", "completed") or self.signalled is not None:
                return ending
            return ending._replace(state=state, message=ending.message + (f" ({message})" if message else ""))
        assert code is not None
        first = next(iter(self.agents.short_of_ranks()), None)
        where = f"a rank on {first.name} ended first; " if first and len(self.slots) > 1 else ""
        reason = where + (self.failures[0][1] if self.failures else f"the launcher ended with code {code}")
        if state is None and message is None and code == 0:
            return Ending("completed", "", 0)  # a command without a run directory has only its code
        if state in (None, "running", "terminated"):
            # A launcher may end with 0 although its ranks did not, and ends the others with SIGTERM when one fails.
            return Ending("failed", f"{reason}; {message}" if state is None and message else reason, code or FAILED)
        return Ending(state, where + message if message else reason, code or FAILED)

    def _complete_run_record(self, ending: Ending) -> None:
        """Have the run directory say how the run ended, where its ranks couldn't or didn't know the cause."""
        if self.run_directory is not None:
            # However that goes, the job's own record and exit code tell how it ended.
            with contextlib.suppress(OSError, ValueError):
                run = RunDirectory(self.run_directory)
                run.finish(ending.state, ending.message or None)
                knows_more = self.signalled is None and ending.state != "completed"
                if knows_more or run.summary().get("state") != ending.state:
                    run.update_summary(state=ending.state, error=ending.message or None)

    def _run_state(self) -> tuple[State | None, str | None]:
        try:
            summary = RunDirectory(self.run_directory).summary() if self.run_directory else {}
        except (OSError, ValueError) as error:
            return None, f"{self.run_directory}/summary.json can't be read: {error}"
        return summary.get("state"), summary.get("error")

    def _record(self, **fields: object) -> None:
        """Merge fields into `job.json`; a new start of a requeued job begins it anew."""
        self._recorded.update(fields)
        RunDirectory(self.arguments.folder).write_json("job.json", self._recorded)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/job.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the job's own folder, on a shared file system")
    parser.add_argument("--environment", type=Path, help="NAME=value lines for ranks on other hosts")
    parser.add_argument("--launcher", choices=["pdsh", "slurm", "srun"], default="pdsh")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the ranks")
    parser.add_argument("--grace", type=float, default=0.0, metavar="S", help="seconds to save after a signal")
    parser.add_argument("command", nargs="+", help="-- script and its arguments")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: Job(arguments).run())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
