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

from clap_ds.launch.connection import LAST_LINES_S, MARK, Connection, Message, RunningClock, groups_of, ssh_to, to_line
from clap_ds.launch.host_processes import end_all, ends_of, is_running, oom_kills, parent_and_state, ranks_of, send
from clap_ds.launch.rank_commands import rank_commands, visible_gpus

BEAT_S = 2.0
LOOK_S = 0.2  # between looks for ranks that ended, where the kernel doesn't tell: the host that lost one first is to be named
IDLE_S = 0.5
STACKS_S = 3.0  # that ranks have to write where they are
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
        self.attempt, self.progress = "", Path()
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._monitor: subprocess.Popen[bytes] | None = None
        self._lock, self._over, self._job_is_gone = threading.Lock(), False, False
        self._starting = threading.Lock()  # no rank of an attempt that has ended
        self._serve, self._run_directory = serve, ""
        self._oom_kills = oom_kills()
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
        with self._starting:
            attempt, self.attempt = self.attempt, ""
        number = end_all(self.run + ".")
        if attempt:
            _remove(self.progress)
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
                ranks = ranks_of(self.attempt) if len(left) == len(ranks) and self.attempt else left
                self.say(ranks=[self._note_of(pid, rank) for pid, rank in ranks.items()])
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

    def _note_of(self, pid: int, rank: int) -> Message:
        """What a rank last noted of its progress, with `age`, the seconds since then, and the kernel's letter for its state."""
        note: Message = {"rank": rank, "state": (parent_and_state(pid) or (0, "X"))[1]}
        with contextlib.suppress(OSError, ValueError):
            noted = json.loads((self.progress / str(rank)).read_text())
            age = time.monotonic() - noted["at"]
            note |= {"step": noted["step"], "made": noted["made"], "doing": noted["doing"], "age": age}
        return note

    def _obey(self, line: bytes) -> bool:
        """Act on a line; False when it is the last."""
        for connection in self._below:
            connection.say(line + b"\n")
        message = json.loads(line)
        what = message["do"]
        if what == "start":
            self._start(message)
        elif what == "signal":
            ranks = ranks_of(self.attempt)
            send(ranks, message["number"])
            self.say(ranks=[self._note_of(*each) for each in ranks.items()])  # the job gives these the time to end
        elif what == "stacks":
            threading.Thread(target=self._tell_stacks, daemon=True).start()
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

    # --- ranks

    def _start(self, message: Message) -> None:
        if self.host not in message["slots"]:
            return
        self.attempt = message["attempt"]
        self.progress = _temporary_folder() / f"clap-{self.attempt}-{os.getpid()}"
        self.progress.mkdir(mode=0o700)
        threading.Thread(target=self._run_ranks, args=(message, self.attempt), daemon=True).start()

    def _run_ranks(self, message: Message, attempt: str) -> None:
        """Wait for the files that the ranks read, start the ranks, and say how they ended."""
        missing = self._missing(message["files"], message["start_limit_s"], attempt)
        if missing:
            self.say(attempt=attempt, ended=1, why=f"can't see {missing}, which is there on {message['job_host']}")
            return
        with self._starting:
            if self.attempt != attempt:
                return
            threads, last_words, problem = self._start_ranks(message)
        if problem:
            self.say(attempt=attempt, ended=1, why=problem)
            return
        code = self._wait_for_launchers()
        for thread in threads:
            thread.join(LAST_LINES_S)
        killed = oom_kills() - self._oom_kills
        why = f"the kernel ended {killed} processes for want of memory (out of memory)" if code and killed > 0 else ""
        self.say(attempt=attempt, ended=code, why=why or last_words[0])

    def _start_ranks(self, message: Message) -> tuple[list[threading.Thread], list[str], str]:
        """Threads that read what the ranks say, a list with their last line of it, and why they can't be started."""
        environment = {**message["environment"], "CLAP_JOB": self.attempt, "CLAP_PROGRESS": str(self.progress)}
        if not os.path.isdir(environment.get("TMPDIR", "/")):
            del environment["TMPDIR"]  # one that SLURM makes for a job on some hosts
        threads: list[threading.Thread] = []
        last_words = [""]
        try:
            gpus = visible_gpus(message["slots"][self.host], message["gpus"].get(self.host, []))
            for command, variables in rank_commands(message, self.host, gpus):
                process = subprocess.Popen(
                    command, cwd=message["folder"], env={**environment, **variables}, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                self._launchers.append(process)
                for name, stream in (("out", process.stdout), ("err", process.stderr)):
                    threads.append(threading.Thread(target=self._copy, args=(name, stream, last_words), daemon=True))
                    threads[-1].start()
        except OSError as error:
            return threads, last_words, f"{error.filename or message['folder']}: {error.strerror}"
        return threads, last_words, ""

    def _wait_for_launchers(self) -> int:
        """The first exit code that isn't 0, once one has ended with it or all have ended."""
        left = list(self._launchers)
        while left:
            for process in left:
                if process.poll() is not None:
                    if process.returncode:
                        return process.returncode if process.returncode > 0 else 128 - process.returncode
                    left.remove(process)
                    break
            time.sleep(0.1)
        return 0

    def _copy(self, name: str, stream: Any, last_words: list[str]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            # DeepSpeed's launcher tells of the end itself; [W… is a warning of torch's.
            if name == "err" and text.strip() and "[launch.py:" not in text and not text.startswith("[W"):
                last_words[0] = text.strip()[:300]
            self.say(**{name: text})

    def _missing(self, files: dict[str, int], limit_s: float, attempt: str) -> str:
        """The first file that isn't there in time as the job's host sees it; a shared file system may show it late."""
        until, next_word = time.monotonic() + limit_s, time.monotonic() + 5.0
        while True:
            late = [path for path, size in files.items() if _size_of(path) != size]
            if not late or time.monotonic() > until or self.attempt != attempt:
                return late[0] if late else ""
            for path in late:
                with contextlib.suppress(OSError):
                    os.listdir(os.path.dirname(path))  # has NFS look again
            if time.monotonic() > next_word:
                self.say(waits=f"for {late[0]} to be visible there")
                next_word += 10.0
            time.sleep(0.5)

    def _tell_stacks(self) -> None:
        """Have the ranks write where they are, and say what they wrote."""
        # One that hasn't noted anything hasn't said yet what the signal means, and would end of it.
        ranks = {pid: rank for pid, rank in ranks_of(self.attempt).items() if (self.progress / str(rank)).exists()}
        before = {rank: self._stacks_of(rank) for rank in ranks.values()}
        send(ranks, signal.SIGUSR2)
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until and any(self._stacks_of(rank) == before[rank] for rank in before):
            time.sleep(0.1)
        time.sleep(0.3)  # for the last to write all of it
        for pid, rank in ranks.items():
            text = self._stacks_of(rank)[len(before[rank]) :]
            self.say(stacks=text, **self._note_of(pid, rank))

    def _stacks_of(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self.progress / f"{rank}.stacks").read_text()
        return ""

    def _end_attempt(self) -> None:
        """End what there is of this attempt; the agent stays for another."""
        with self._starting:
            attempt, self.attempt = self.attempt, ""
        number = end_all(attempt)
        for process in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
        self._launchers.clear()
        self._end_monitor()
        if attempt:
            _remove(self.progress)
        self.say(attempt=attempt, clear=number)

    def _complete_record(self) -> None:
        """Say how it ended in place of the job, which was killed before it could."""
        from clap_ds.record.directory import RunDirectory  # here, for agents are to start fast

        message = "launch/job.py was ended before it could say why; the ranks were ended then"
        for folder, name in ((self._serve["folder"], "job.json"), (self._run_directory, "summary.json")):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(Path(folder, name).read_text())
                if record.get("state") == "running":
                    RunDirectory(Path(folder)).write_json(name, {**record, "state": "failed", "error": message})

    def _end_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.kill()  # it keeps nothing back
            self._monitor.wait()
            self._monitor = None


def _temporary_folder() -> Path:
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    return folder if folder.is_dir() else Path("/tmp")


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _size_of(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return None


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
        for folder in _temporary_folder().glob(f"clap-{agent.run}.*"):
            _remove(folder)
        agent.serve()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
