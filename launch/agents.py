"""The job's end of its host agents: starts one on each host, counts their heartbeats, and speaks to all of them.

Leaves to `launch/host_agent.py` what happens on a host, and to `launch/job.py` what to do about a host that is lost.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

AGENT = Path(__file__).resolve().parent / "host_agent.py"
CONNECT_S = 30.0
"""Time a host has to answer at the start."""
LOST_S = 20.0
"""Without a heartbeat for this long, a host is lost (an agent's beat is 2 s)."""


@dataclass
class Host:
    """What is known of one host."""

    name: str
    heard: float | None = None
    num_ranks: int = 0
    most_ranks: int = 0
    fewer_since: float | None = None
    gone: bool = False
    last_words: str = ""


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _ignore_signals() -> None:
    # scancel signals every process of the batch step at once; connections to the hosts must outlive the first signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Agents:
    """One agent per host: a child process here, over ssh, or all of them as one SLURM step."""

    def __init__(self, hosts: list[str], job: str, python: str, *, through: str) -> None:
        """Start them.

        Args:
            hosts: host names, the one this process runs on among them or not.
            job: value of `CLAP_JOB` in the ranks' environment.
            python: interpreter on the hosts.
            through: `ssh` or `srun`.
        """
        self.hosts = {name: Host(name) for name in hosts}
        self._processes: list[tuple[str | None, subprocess.Popen[bytes]]] = []
        agent = [python, "-u", str(AGENT), job]
        if through == "srun":
            step = [
                "srun",
                "--overlap",
                "--quiet",
                f"--nodes={len(hosts)}",
                f"--ntasks={len(hosts)}",
                "--ntasks-per-node=1",
            ]
            self._start(None, [*step, "--nodelist", ",".join(hosts), *agent])
        else:
            ssh = [
                "ssh",
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=15",
                "-o",
                "ServerAliveInterval=5",
                "-o",
                "ServerAliveCountMax=3",
            ]
            for host in hosts:
                command = [*agent, host]
                self._start(host, command if host == this_host() else [*ssh, host, shlex.join(command)])

    def _start(self, host: str | None, command: list[str]) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_ignore_signals
        )
        self._processes.append((host, process))
        threading.Thread(target=self._listen, args=(host, process), daemon=True).start()

    def _listen(self, host: str | None, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.decode(errors="replace").split()
            if words[:1] != ["clap-agent"] or len(words) != 4 or words[1] not in self.hosts:
                text = line.decode(errors="replace").strip()
                for known in self.hosts.values():
                    if text and (host == known.name or (host is None and known.name in text)):
                        known.last_words = text
                continue
            self._hear(self.hosts[words[1]], words[2], int(words[3]))

    @staticmethod
    def _hear(host: Host, word: str, number: int) -> None:
        host.heard = time.monotonic()
        if word == "gone":
            host.gone = True
            return
        host.num_ranks = number
        host.most_ranks = max(host.most_ranks, number)
        if number == host.most_ranks:
            host.fewer_since = None
        elif host.fewer_since is None:
            host.fewer_since = host.heard

    def say(self, line: str) -> None:
        """Send a line to every agent that can still be reached."""
        for _, process in self._processes:
            try:
                assert process.stdin is not None
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
            except OSError:
                pass

    def silent(self) -> list[Host]:
        """Hosts that have not answered yet."""
        return [host for host in self.hosts.values() if host.heard is None]

    def lost(self) -> list[Host]:
        """Hosts that answered once and are silent now."""
        ended = {name for name, process in self._processes if name is not None and process.poll() is not None}
        now = time.monotonic()
        return [
            host
            for host in self.hosts.values()
            if host.heard is not None and not host.gone and (now - host.heard > LOST_S or host.name in ended)
        ]

    def short_of_ranks(self, seconds: float) -> list[Host]:
        """Hosts on which a rank ended while others went on for longer than this."""
        if not any(host.num_ranks for host in self.hosts.values()):
            return []
        now = time.monotonic()
        return [h for h in self.hosts.values() if h.fewer_since is not None and now - h.fewer_since > seconds]

    def first_short(self) -> Host | None:
        """The host on which a rank ended before any other."""
        short = [host for host in self.hosts.values() if host.fewer_since is not None]
        return min(short, key=lambda host: host.fewer_since or 0.0, default=None)

    def wait_for_all(self) -> list[Host]:
        """Wait until every host has answered; the ones that haven't in time, or whose connection was refused."""
        deadline = time.monotonic() + CONNECT_S
        while self.silent() and time.monotonic() < deadline:
            if all(process.poll() is not None for _, process in self._processes):
                break
            ended = {name for name, process in self._processes if process.poll() is not None}
            if all(host.name in ended for host in self.silent()):
                break
            time.sleep(0.05)
        return self.silent()

    def stop(self, timeout_s: float) -> list[Host]:
        """Have every host end what is left of the job; the hosts that didn't confirm it in time."""
        self.say("stop")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(host.gone or host.heard is None for host in self.hosts.values()):
                break
            if all(process.poll() is not None for _, process in self._processes):
                break
            time.sleep(0.05)
        for _, process in self._processes:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                process.kill()  # the agent sees its input end and does the same by itself
        return [host for host in self.hosts.values() if not host.gone]
