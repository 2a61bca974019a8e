"""One attempt's ranks on one host: started, read, asked where they are, ended. Standard library only.

Leaves hearing the job, and what an attempt is, to `launch/host_agent.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clap_ds.launch.connection import LAST_LINES_S, Message
from clap_ds.launch.host_processes import end_all, oom_kills, parent_and_state, ranks_of, send
from clap_ds.launch.rank_commands import rank_commands, visible_gpus

STACKS_S = 3.0  # that ranks have to write where they are


class HostRanks:
    """
    Args:
        start: the job's message that starts them.
        say: passes fields of a message on to the job.
    """

    def __init__(self, start: Message, host: str, say: Callable[..., None]) -> None:
        self.attempt = start["attempt"]
        self._start, self._host, self._say = start, host, say
        self._progress = temporary_folder() / f"clap-{self.attempt}-{os.getpid()}"
        self._progress.mkdir(mode=0o700)
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._last_words = ""
        self._starting, self._over = threading.Lock(), False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Wait for the files that the ranks read, start the ranks, and say how they ended."""
        missing, killed_before = self._missing(), oom_kills()
        problem = f"can't see {missing}, which is there on {self._start['job_host']}" if missing else ""
        with self._starting:
            if self._over:
                return  # no rank of an attempt that has ended
            problem = problem or self._start_ranks()
        if problem:
            self._say(attempt=self.attempt, ended=1, why=problem)
            return
        code = self._wait_for_launchers()
        for reader in self._readers:
            reader.join(LAST_LINES_S)
        killed = oom_kills() - killed_before
        why = f"the kernel ended {killed} processes for want of memory (out of memory)" if code and killed > 0 else ""
        self._say(attempt=self.attempt, ended=code, why=why or self._last_words)

    def _missing(self) -> str:
        """The first file that isn't there in time as the job's host sees it; a shared file system may show it late."""
        until, next_word = time.monotonic() + self._start["start_limit_s"], time.monotonic() + 5.0
        while True:
            late = [path for path, size in self._start["files"].items() if _size_of(path) != size]
            if not late or time.monotonic() > until or self._over:
                return late[0] if late else ""
            for path in late:
                with contextlib.suppress(OSError):
                    os.listdir(os.path.dirname(path))  # has NFS look again
            if time.monotonic() > next_word:
                self._say(waits=f"for {late[0]} to be visible there")
                next_word += 10.0
            time.sleep(0.5)

    def _start_ranks(self) -> str:
        """Start the launcher, or the ranks themselves; why they can't be started, if so."""
        start = self._start
        environment = {**start["environment"], "CLAP_JOB": self.attempt, "CLAP_PROGRESS": str(self._progress)}
        if not os.path.isdir(environment.get("TMPDIR", "/")):
            del environment["TMPDIR"]  # one that SLURM makes for a job on some hosts
        try:
            gpus = visible_gpus(start["slots"][self._host], start["gpus"].get(self._host, []))
            for command, variables in rank_commands(start, self._host, gpus):
                process = subprocess.Popen(
                    command, cwd=start["folder"], env={**environment, **variables}, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                self._launchers.append(process)
                for name, stream in (("out", process.stdout), ("err", process.stderr)):
                    self._readers.append(threading.Thread(target=self._copy, args=(name, stream), daemon=True))
                    self._readers[-1].start()
        except OSError as error:
            return f"{error.filename or start['folder']}: {error.strerror}"
        return ""

    def _copy(self, name: str, stream: Any) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            if "[launch.py:" in text and "sigkill_handler" in text:
                continue  # DeepSpeed's launcher on how it ends the others; the job says why
            if name == "err" and text.strip() and not text.startswith("[W"):  # a warning of torch's
                self._last_words = text.strip()[:300]
            self._say(**{name: text})

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

    # --- while they run

    def note_of(self, pid: int, rank: int) -> Message:
        """What a rank last noted of its progress, with `age`, the seconds since then, and the kernel's letter for its state."""
        note: Message = {"rank": rank, "state": (parent_and_state(pid) or (0, "X"))[1]}
        with contextlib.suppress(OSError, ValueError):
            noted = json.loads((self._progress / str(rank)).read_text())
            age = time.monotonic() - noted["at"]
            note |= {"step": noted["step"], "made": noted["made"], "doing": noted["doing"], "age": age}
        return note

    def tell_stacks(self) -> None:
        """Have the ranks write where they are, and say what they wrote."""
        # One that hasn't noted anything hasn't said yet what the signal means, and would end of it.
        ranks = {pid: rank for pid, rank in ranks_of(self.attempt).items() if (self._progress / str(rank)).exists()}
        before = {rank: self._stacks_of(rank) for rank in ranks.values()}
        send(ranks, signal.SIGUSR2)
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until and any(self._stacks_of(rank) == before[rank] for rank in before):
            time.sleep(0.1)
        time.sleep(0.3)  # for the last to write all of it
        for pid, rank in ranks.items():
            self._say(stacks=self._stacks_of(rank)[len(before[rank]) :], **self.note_of(pid, rank))

    def _stacks_of(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self._progress / f"{rank}.stacks").read_text()
        return ""

    def end(self) -> int:
        """End what there is of them; how many processes that were."""
        import shutil  # here, for agents are to start fast

        with self._starting:
            self._over = True
        number = end_all(self.attempt)
        for process in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
        shutil.rmtree(self._progress, ignore_errors=True)
        return number


def temporary_folder() -> Path:
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    return folder if folder.is_dir() else Path("/tmp")


def _size_of(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return None
