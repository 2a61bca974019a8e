"""One per host of a job: starts the host's ranks, watches them, hears signals for them, and leaves none of them behind.

Started by `launch/agents.py` over ssh (then it may pass on to the hosts behind it) or as a task of one srun step. All it
needs comes by its standard input, the ranks' environment with it. When the job falls silent or its connection closes, it ends
the ranks by itself. Leaves what to do about a host or rank that fails to `launch/job.py`. Standard library only.

Hears JSON objects with `do`: serve, ping, start, signal, stacks, monitor, ask, end, stop. Says `clap-agent` and a JSON object
with `host` and one of `ranks`, `waits`, `out`, `err`, `ended`, `stacks`, `answer`, `clear`, `lost`, `gone`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from clap_ds.launch.connection import MARK, Connection, Message, RunningClock, groups_of, ssh_to, to_line
from clap_ds.launch.host_processes import end_all, ends_of, is_running, ranks_of, send
from clap_ds.launch.host_ranks import HostRanks, temporary_folder
from clap_ds.launch.rank_commands import visible_gpus

BEAT_S = 2.0
LOOK_S = 0.2  # between looks for ranks that ended, where the kernel doesn't tell: the host that lost one first is to be named
IDLE_S = 0.5
BELOW_S = 12.0  # that agents behind this one have to end
ANSWER_S = 50.0  # that a command that is asked for may take
SERVE_S = 60.0  # that an agent waits for its first line


class Agent:
    """
    Args:
        serve: the job's first message: `job` (a run's name, to which `.N` is added for each attempt), `silence_s`, `host`,
            and over ssh `below` (the hosts behind this one), `agent`, `ssh` and `fanout` (how they are reached).
    """

    def __init__(self, serve: Message) -> None:
        self.run, self.silence_s = serve["job"], serve["silence_s"]
        self.host = serve.get("host") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.ranks: HostRanks | None = None  # of the attempt there is
        self._monitor: subprocess.Popen[bytes] | None = None
        self._lock, self._over, self._job_is_gone = threading.Lock(), False, False
        self._serve, self._run_directory = serve, ""
        on_way = {**serve, "here": self.host}
        self._below = [
            ssh_to(group, on_way, self._pass_up, self._report)
            for group in groups_of(serve.get("below", []), serve.get("fanout", 1))
        ]

    # --- saying

    def say(self, **fields: Any) -> None:
        self._pass_up(MARK + to_line({"host": self.host, **fields}))

    def _pass_up(self, line: bytes) -> None:
        # Nobody may listen any more; what has to be done stays the same.
        with self._lock, contextlib.suppress(OSError):
            while line:  # a signal may interrupt it half-way
                line = line[os.write(1, line) :]

    def _report(self, connection: Connection) -> None:
        if not self._over:
            self.say(lost=connection.hosts, why=connection.last_words)

    # --- hearing

    def serve(self) -> None:
        """Serve until told to stop, cut off, or left alone; then end what is left of the run here."""
        why = ""
        try:
            self._serve_job()
        except Exception as error:  # whatever it is, no rank may stay
            why = f"its agent failed: {type(error).__name__}: {error}"
        self._over = True
        self._end_monitor()
        number = self.ranks.end() if self.ranks else 0
        number += end_all(self.run + ".")
        if self._job_is_gone and self.host == self._serve["job_host"]:
            self._complete_record()
        self.say(gone=number, why=why)
        for connection in self._below:
            connection.end(BELOW_S)

    def _serve_job(self) -> None:
        clock, buffer, heard, next_beat = RunningClock(), b"", 0.0, 0.0
        ranks: dict[int, int] = {}
        while clock.now() - heard <= self.silence_s:
            left = {pid: rank for pid, rank in ranks.items() if is_running(pid)}
            if time.monotonic() >= next_beat or len(left) < len(ranks):
                # What ended is said before anything else: who says so first is taken for the cause.
                ranks = ranks_of(self.ranks.attempt) if len(left) == len(ranks) and self.ranks else left
                self.say(ranks=self._notes(ranks))
                next_beat = time.monotonic() + BEAT_S
            with ends_of(list(ranks)) as ends:
                ready = select.select([0, *ends], [], [], LOOK_S if len(ends) < len(ranks) else IDLE_S)[0]
            if 0 in ready:
                received = os.read(0, 65536)
                if not received:
                    self._job_is_gone = True
                    break
                heard = clock.now()
                *lines, buffer = (buffer + received).split(b"\n")
                if not all(self._obey(line) for line in lines):
                    break

    def _notes(self, ranks: dict[int, int]) -> list[Message]:
        return [self.ranks.note_of(pid, rank) for pid, rank in ranks.items()] if self.ranks else []

    def _obey(self, line: bytes) -> bool:
        """Act on a line; False when it is the last."""
        for connection in self._below:
            connection.say(line + b"\n")
        message = json.loads(line)
        what = message["do"]
        if what == "start" and self.host in message["slots"]:
            self.ranks = HostRanks(message, self.host, self.say)
        elif what == "signal":
            ranks = ranks_of(self.ranks.attempt) if self.ranks else {}
            send(ranks, message["number"])
            self.say(ranks=self._notes(ranks))  # the job gives these the time to end
        elif what == "stacks" and self.ranks:
            threading.Thread(target=self.ranks.tell_stacks, daemon=True).start()
        elif what == "monitor" and self._monitor is None:
            self._run_directory = message["run_directory"]
            command = [sys.executable, str(Path(__file__).with_name("monitor.py")), "watch", self._run_directory]
            null = subprocess.DEVNULL
            # It watches its input, and goes when this process does, however that ends.
            with contextlib.suppress(OSError):  # the ranks go on without one
                self._monitor = subprocess.Popen(
                    [*command, "--while_open"], stdin=subprocess.PIPE, stdout=null, stderr=null
                )
        elif what == "ask":
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        elif what == "end":
            self._end_attempt()
        return bool(what != "stop")

    def _answer(self, message: Message) -> None:
        """Run a command as a rank would be, seeing the GPUs of all of them; say what it printed, and when by this clock."""
        began = time.time()
        gpus = visible_gpus(message["slots"][self.host], message["gpus"].get(self.host, []))
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        try:
            result = subprocess.run(
                message["command"], cwd=message["folder"], env={**message["environment"], **visible}, timeout=ANSWER_S,
                capture_output=True, text=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            answer, code, error = result.stdout, result.returncode, result.stderr.strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired:
            answer, code, error = "", 1, f"no answer in {ANSWER_S:.0f} s"
        except OSError as problem:
            answer, code, error = "", 1, f"{problem.filename}: {problem.strerror}"
        self.say(answer=answer, code=code, error=error, times=[began, time.time()])

    def _end_attempt(self) -> None:
        """End what there is of this attempt; the agent stays for another."""
        attempt, number = (self.ranks.attempt, self.ranks.end()) if self.ranks else ("", 0)
        self.ranks = None
        self._end_monitor()
        self.say(attempt=attempt, clear=number)

    def _complete_record(self) -> None:
        """Say how it ended in place of the job, which was killed before it could."""
        from clap_ds.record.directory import RunDirectory  # here, for agents are to start fast

        message = "launch/job.py was ended before it could say why; the ranks were ended then"
        for folder, name in ((self._serve["folder"], "job.json"), (self._run_directory, "summary.json")):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(Path(folder, name).read_text()) if folder else {}
                if record.get("state") == "running":
                    RunDirectory(Path(folder)).write_json(name, {**record, "state": "failed", "error": message})

    def _end_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.kill()  # it keeps nothing back
            self._monitor.wait()
            self._monitor = None


def _first_line() -> bytes:
    """The job's first line, read byte by byte: what follows is `select`ed for. Empty where it doesn't come."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([0], [], [], SERVE_S)[0] or not (received := os.read(0, 1)):
            return b""
        line += received
    return line


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be handed down to ranks and their data workers
    if line := _first_line():
        agent = Agent(json.loads(line))
        # What an earlier start of the same job left here, before a requeue or a node failure.
        end_all(agent.run + ".", last_words_s=0.0)
        import shutil  # here, for agents are to start fast

        for folder in temporary_folder().glob("clap-*.*.*-*"):  # of agents that were killed, this run's or another's
            pid = folder.name.rpartition("-")[2]
            if pid.isdecimal() and not is_running(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        agent.serve()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
