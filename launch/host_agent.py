"""One per host beside a job's ranks: hears signals for them, says that the host is alive, and leaves none of them
behind.

Started by `launch/job.py` over ssh or srun, and spoken to by lines on standard input. Ranks that pdsh started live
under sshd, where SLURM neither sees nor ends them: so when the job falls silent or its connection closes, the agent
ends them itself. A rank's process is known by `CLAP_JOB` in its environment. Uses the standard library only.

Lines in: `ping`, `signal N`, `monitor RUN_DIRECTORY`, `stop`. Lines out: `clap-agent HOST alive NUM_RANKS`, `clap-agent
HOST gone NUM_KILLED`.
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
LOOK_S = 0.2
"""How often it looks whether the ranks it knows are still there, where the kernel doesn't tell: the host that lost one first
is the one to name."""
SILENCE_S = 45.0
"""Without a line from the job for this long, the host takes itself for cut off."""
LAST_WORDS_S = 5.0
"""From the polite signal to SIGKILL: time for a rank to record its end."""


def processes_of(job: str) -> dict[int, tuple[int, bool]]:
    """This host's processes of a job, by process id: parent, and whether the process is a rank.

    Args:
        job: the value of `CLAP_JOB`; a trailing `.` matches every restart of the job.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = dict(line.partition(b"=")[::2] for line in file.read().split(b"\0"))
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # gone meanwhile, or somebody else's
        value = variables.get(b"CLAP_JOB", b"").decode(errors="replace")
        if state != b"Z" and (value == job or (job.endswith(".") and value.startswith(job))):
            # Only a launcher sets these for a rank; the batch step's own processes have neither.
            started_as_rank = b"RANK" in variables or b"SLURM_LAUNCH_NODE_IPADDR" in variables
            found[int(name)] = (int(parent), started_as_rank)
    return found


def ranks_of(job: str) -> list[int]:
    """Process ids of the ranks themselves, without their data workers."""
    found = processes_of(job)
    return [pid for pid, (parent, is_rank) in found.items() if is_rank and not found.get(parent, (0, False))[1]]


def has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


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
    for _ in range(20):
        left = processes_of(job)
        if not left:
            break
        send(list(left), signal.SIGKILL)
        time.sleep(0.1)
    return len(found)


class Agent:
    def __init__(self, job: str, host: str) -> None:
        self.job, self.host = job, host
        self.heard = time.monotonic()
        self.monitor: subprocess.Popen[bytes] | None = None

    def say(self, *words: object) -> None:
        # Nobody may listen any more; what has to be done stays the same.
        with contextlib.suppress(OSError):
            print("clap-agent", self.host, *words, flush=True)

    def serve(self) -> None:
        """Serve until told to stop, cut off, or left alone; then end what is left of the job here."""
        next_beat = 0.0
        buffer = b""
        ranks: list[int] = []
        while True:
            now = time.monotonic()
            left = [pid for pid in ranks if not has_ended(pid)]
            if len(left) < len(ranks):
                self.say("alive", len(left))  # before anything else: who says so first is taken for the cause
                ranks = left
            if now >= next_beat:
                ranks = ranks_of(self.job)
                self.say("alive", len(ranks))
                next_beat = now + BEAT_S
            if now - self.heard > SILENCE_S:
                break
            with ends_of(ranks) as ends:
                ready = select.select([0, *ends], [], [], LOOK_S)[0]
            if 0 in ready:
                received = os.read(0, 4096)
                if not received:
                    break
                self.heard = time.monotonic()
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
            self.monitor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        return words[:1] != ["stop"]


def main() -> None:
    job, host = (
        sys.argv[1],
        sys.argv[2] if len(sys.argv) > 2 else os.environ.get("SLURMD_NODENAME", os.uname().nodename),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # What an earlier start of the same job left here, before a requeue or a node failure.
    end_all(job.rpartition(".")[0] + ".", last_words_s=0.0)
    Agent(job, host).serve()


if __name__ == "__main__":
    main()
