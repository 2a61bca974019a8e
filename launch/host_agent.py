"""One per host beside a job's ranks: hears signals for them, says that the host is alive, and leaves none of them behind.

Started by `launch/job.py` over ssh or srun. Ranks that pdsh started live under sshd, where SLURM neither sees nor ends
them: so when the job falls silent or its connection closes, the agent ends them itself. A rank's process is known by
`CLAP_JOB` in its environment. Standard library only.

Hears `ping`, `signal N`, `monitor RUN_DIRECTORY` and `stop`; says `clap-agent HOST alive NUM_RANKS` or `… gone NUM_KILLED`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BEAT_S = 2.0
LOOK_S = 0.2  # between looks for ranks that ended, where the kernel doesn't tell: the host that lost one first is to be named
SILENCE_S = 45.0  # without a line from the job, after which the host takes itself for cut off
LAST_WORDS_S = 5.0  # from SIGTERM to SIGKILL, for a rank to record its end


def parent_of(pid: int) -> int | None:
    """Process id of a process's parent; None when the process has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return None
    return None if state == b"Z" else int(parent)


def processes_of(job: str) -> dict[int, tuple[int, bool]]:
    """Parent, and whether it is a rank, of this job's processes here, by process id. `JOB.` stands for all starts of a job."""
    found = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or somebody else's
        variables = dict(line.partition(b"=")[::2] for line in lines)
        value = variables.get(b"CLAP_JOB", b"").decode(errors="replace")
        is_of_job = value == job or (job.endswith(".") and value.startswith(job))
        if is_of_job and pid != os.getpid() and (parent := parent_of(pid)) is not None:
            # Only a launcher sets these for a rank; the batch step's own processes have neither.
            found[pid] = (parent, b"RANK" in variables or b"SLURM_LAUNCH_NODE_IPADDR" in variables)
    return found


def ranks_of(job: str) -> list[int]:
    """Process ids of the ranks themselves, without their data workers."""
    found = processes_of(job)
    return [pid for pid, (parent, is_rank) in found.items() if is_rank and not found.get(parent, (0, False))[1]]


@contextlib.contextmanager
def ends_of(pids: list[int]) -> Iterator[list[int]]:
    """Files that become readable the moment a process ends, where the kernel has them (Linux 5.3)."""
    with contextlib.ExitStack() as stack:
        files = []
        for pid in pids:
            with contextlib.suppress(OSError, AttributeError):
                files.append(os.pidfd_open(pid))
                stack.callback(os.close, files[-1])
        yield files


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end_all(job: str, last_words_s: float = LAST_WORDS_S) -> int:
    """End every process of the job on this host: SIGTERM, a moment to record it, SIGKILL. Returns how many there were."""
    found = processes_of(job)
    send(ranks_of(job), signal.SIGTERM)
    deadline = time.monotonic() + last_words_s
    while ranks_of(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline += 2.0
    while (left := processes_of(job)) and time.monotonic() < deadline:
        send(list(left), signal.SIGKILL)
        time.sleep(0.1)
    return len(found)


class Agent:
    def __init__(self, job: str, host: str) -> None:
        self.job, self.host = job, host
        self.monitor: subprocess.Popen[bytes] | None = None

    def say(self, *words: object) -> None:
        # Nobody may listen any more; what has to be done stays the same.
        with contextlib.suppress(OSError):
            print("clap-agent", self.host, *words, flush=True)

    def serve(self) -> None:
        """Serve until asked to stop, cut off, or left alone; then end what is left of the job here."""
        heard, next_beat, buffer = time.monotonic(), 0.0, b""
        ranks: list[int] = []
        while time.monotonic() - heard <= SILENCE_S:
            left = [pid for pid in ranks if parent_of(pid) is not None]
            if len(left) < len(ranks):
                self.say("alive", len(left))  # before anything else: who says so first is taken for the cause
                ranks = left
            if time.monotonic() >= next_beat:
                ranks = ranks_of(self.job)
                self.say("alive", len(ranks))
                next_beat = time.monotonic() + BEAT_S
            with ends_of(ranks) as ends:
                ready = select.select([0, *ends], [], [], LOOK_S)[0]
            if 0 in ready:
                received = os.read(0, 4096)
                if not received:
                    break
                heard = time.monotonic()
                *lines, buffer = (buffer + received).split(b"\n")
                if not all(self.obey(line.decode(errors="replace").split()) for line in lines):
                    break
        if self.monitor is not None:
            self.monitor.kill()  # it keeps nothing back
            self.monitor.wait()
        self.say("gone", end_all(self.job))

    def obey(self, words: list[str]) -> bool:
        """Act on a line; False when it is the last."""
        if words[:1] == ["signal"] and len(words) == 2 and words[1].isdecimal():
            ranks = ranks_of(self.job)
            send(ranks, int(words[1]))
            self.say("alive", len(ranks))  # the job gives these the time to end
        elif words[:1] == ["monitor"] and self.monitor is None:
            command = [sys.executable, str(Path(__file__).with_name("monitor.py")), "watch", " ".join(words[1:])]
            null = subprocess.DEVNULL
            self.monitor = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
        return words[:1] != ["stop"]


def main() -> None:
    job, *named = sys.argv[1:]
    host = named[0] if named else os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # What an earlier start of the same job left here, before a requeue or a node failure.
    end_all(job.rpartition(".")[0] + ".", last_words_s=0.0)
    Agent(job, host).serve()


if __name__ == "__main__":
    main()
