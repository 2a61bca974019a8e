"""The job's end of its host agents: starts one on each host, counts their heartbeats, and speaks to all of them.

Leaves to `launch/host_agent.py` what happens on a host, and to `launch/job.py` what to do about a host that is lost.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO

from clap_ds.launch.launchers import on_host, script_command

CONNECT_S = 30.0  # that a host has to answer at the start
LOST_S = 20.0  # without a heartbeat, of which an agent sends one every 2 s


@dataclass
class Host:
    name: str
    heard: float | None = None
    num_ranks: int = 0
    most_ranks: int = 0
    fewer_since: float | None = None
    gone: bool = False
    last_words: str = ""

    def hear(self, word: str, number: int) -> None:
        """Take note of what its agent says: `alive NUM_RANKS` or `gone NUM_KILLED`."""
        self.heard = time.monotonic()
        self.gone = word == "gone"
        if not self.gone:
            self.num_ranks, self.most_ranks = number, max(self.most_ranks, number)
            self.fewer_since = None if number == self.most_ranks else self.fewer_since or self.heard


def _ignore_signals() -> None:
    # scancel signals every process of the batch step at once; connections to the hosts must outlive the first signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Agents:
    """One agent per host: a child process here, over ssh, or all of them as one SLURM step."""

    def __init__(self, hosts: list[str], job: str, python: str, launcher: str) -> None:
        """Start them the way the launcher starts ranks; `job` is the value of `CLAP_JOB` in the ranks' environment."""
        self.hosts = {name: Host(name) for name in hosts}
        self._processes: dict[str | None, subprocess.Popen[bytes]] = {}
        agent = script_command(python, "host_agent.py", job)
        if launcher == "pdsh":
            for host in hosts:
                self._start(host, on_host(host, [*agent, host]))
        else:
            step = ["srun", "--overlap", "--quiet", f"--nodes={len(hosts)}", "--ntasks-per-node=1"]
            self._start(None, [*step, f"--ntasks={len(hosts)}", "--nodelist", ",".join(hosts), *agent])

    def _start(self, host: str | None, command: list[str]) -> None:
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=both, preexec_fn=_ignore_signals)
        self._processes[host] = process
        threading.Thread(target=self._listen, args=(host, process.stdout), daemon=True).start()

    def _listen(self, host: str | None, lines: IO[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").strip()
            words = text.split()
            if words[:1] == ["clap-agent"] and len(words) == 4 and words[1] in self.hosts:
                self.hosts[words[1]].hear(words[2], int(words[3]))
                continue
            for known in self.hosts.values():
                if text and (host == known.name or (host is None and known.name in text)):
                    known.last_words = text

    def _running(self) -> set[str | None]:
        return {host for host, process in self._processes.items() if process.poll() is None}

    def say(self, line: str) -> None:
        """Send a line to every agent that can still be reached."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()

    def lost(self) -> list[Host]:
        """Hosts that answered once and are silent now."""
        ended, now = set(self._processes) - self._running(), time.monotonic()
        known = [host for host in self.hosts.values() if host.heard is not None and not host.gone]
        return [host for host in known if host.name in ended or now - (host.heard or now) > LOST_S]

    def short_of_ranks(self, seconds: float = 0.0) -> list[Host]:
        """Hosts on which a rank ended longer ago than this, the first to lose one first."""
        latest = time.monotonic() - seconds
        short = {host.name: host.fewer_since for host in self.hosts.values() if host.fewer_since is not None}
        return [self.hosts[name] for name in sorted(short, key=short.__getitem__) if short[name] <= latest]

    def wait_for_all(self) -> list[Host]:
        """Wait until every host has answered; the ones that haven't in time, or whose connection was refused."""
        deadline = time.monotonic() + CONNECT_S
        while silent := [host for host in self.hosts.values() if host.heard is None]:
            if time.monotonic() > deadline or not self._running() & {None, *(host.name for host in silent)}:
                break
            time.sleep(0.05)
        return silent

    def stop(self, timeout_s: float) -> list[Host]:
        """Have every host end what is left of the job; the hosts that didn't confirm it in time."""
        self.say("stop")
        deadline = time.monotonic() + timeout_s
        while (
            time.monotonic() < deadline and self._running() and any(h.heard and not h.gone for h in self.hosts.values())
        ):
            time.sleep(0.05)
        for process in self._processes.values():
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                process.kill()  # the agent sees its input end and does the same by itself
        return [host for host in self.hosts.values() if not host.gone]
