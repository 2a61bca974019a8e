"""The job's end of its host agents: starts one on each host, takes note of what they say, and speaks to all of them.

Leaves to `launch/host_agent.py` what happens on a host, and to `launch/job.py` what to do about a host that is lost.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clap_ds.launch.connection import FANOUT, MARK, Connection, Message, RunningClock, groups_of, ssh_to, to_line
from clap_ds.launch.launchers import SSH, script_command, this_host

CUT_OFF = 0.75
"""Of the silence after which the job gives a host up: that after which the host ends its ranks, so that none is left."""
SAY_S = 10.0  # between words about who is missing
PING_S = 5.0  # between words to agents: those that hear nothing for long take themselves for cut off


@dataclass
class Host:
    name: str
    heard: float | None = None  # by the job's running clock
    gone: bool = False
    lost: str | None = None  # why it counts as lost
    is_silent: bool = False  # for so long that asking again is of no use
    last_words: str = ""
    notes: dict[int, Message] = field(default_factory=dict)  # of its ranks, by rank
    most_ranks: int = 0
    fewer_since: float | None = None
    first_gone: list[int] = field(default_factory=list)  # ranks that ended before the others here
    ended: tuple[int, str] | None = None  # exit code of its launcher, and why
    clear: bool = False
    refused: int = 0  # how often no connection to it could be made
    way: Connection | None = None  # by which it is reached now, perhaps over other hosts
    attempt: str = ""

    def begin(self, attempt: str) -> None:
        """An attempt starts."""
        self.attempt = attempt
        self.notes, self.first_gone, self.most_ranks = {}, [], 0
        self.fewer_since, self.ended, self.clear = None, None, False

    def hear(self, message: Message, now: float) -> None:
        self.heard, self.lost = now, None
        if "ranks" in message:
            before, self.notes = self.notes, {note["rank"]: note for note in message["ranks"]}
            self.first_gone = self.first_gone or sorted({*before} - {*self.notes})
            self.most_ranks = max(self.most_ranks, len(self.notes))
            self.fewer_since = None if len(self.notes) == self.most_ranks else self.fewer_since or time.monotonic()
        elif "ended" in message:
            if message["attempt"] == self.attempt:  # ranks that were ended with the last attempt may be late to say so
                self.ended = (message["ended"], message["why"])
        elif "clear" in message:
            self.clear = True
        elif "gone" in message:
            self.gone, self.lost = True, message["why"] or "it took itself for cut off"


class Agents:
    """One agent on each host: a child process here, over ssh, or all of them as one SLURM step.

    Args:
        job: the run's name; agents end what an earlier attempt of it left behind.
        step: options of srun, where the agents are a SLURM step; None reaches them over ssh.
        lost_after_s: silence after which a host counts as lost.
        hear: called, by a thread, with what an agent says that isn't about its own state: output, stacks, answers.
        folder: with `job.json`, which the agent of this host completes where the job can't any more.
    """

    def __init__(
        self, job: str, step: list[str] | None, lost_after_s: float, hear: Callable[[Message], None], folder: str = ""
    ) -> None:
        self.hosts: dict[str, Host] = {}
        self.step, self.lost_after_s, self._hear_rest = step, lost_after_s, hear
        self.clock = RunningClock()
        self._connections: list[Connection] = []
        self._lock, self._again = threading.Lock(), list[str]()
        self._stopped = threading.Event()
        # By a thread: hosts may take long to come up, and a file system to answer.
        threading.Thread(target=self._ping, daemon=True).start()
        # Without site-packages, which agents do without, they start in half the time.
        agent = script_command(sys.executable, "host_agent.py", options=["-S"])
        self._serve: Message = {
            "do": "serve", "job": job, "silence_s": CUT_OFF * lost_after_s, "here": this_host(), "agent": agent, "ssh": SSH,
            "job_host": this_host(), "folder": folder, "fanout": FANOUT,
        }  # fmt: skip

    def connect(self, names: Sequence[str], limit_s: float, stopped: Callable[[], bool] = lambda: False) -> list[Host]:
        """Start agents on hosts that have none, and wait for all to answer; who hasn't in time, or can't be reached.

        Says every few seconds who is missing. `stopped` true ends the wait.
        """
        self.hosts.update(
            {name: Host(name) for name in names if name not in self.hosts or self.hosts[name].lost is not None}
        )
        # A second agent on a host that only takes its time would start its ranks twice.
        self._start([name for name in names if self.hosts[name].heard is None and not self._is_on_its_way(name)])
        began = time.monotonic()
        next_word, half_time = began + SAY_S, began + limit_s / 2
        while (silent := [self.hosts[name] for name in names if self._is_silent(name)]) and not stopped():
            with self._lock:
                again, self._again = self._again, []
            # Whoever was behind a host that can't be reached is tried by another way; the host itself, once more.
            for host in map(self.hosts.__getitem__, again):
                host.lost = (host.last_words or "no connection") if host.refused > 1 else None
            again.sort(key=lambda name: self.hosts[name].refused)  # these lead to no others but each other
            self._start([name for name in again if self.hosts[name].lost is None], again=True)
            if time.monotonic() > half_time:
                half_time = float("inf")
                self._give_up_silent_ways()
            if time.monotonic() - began > limit_s or all(host.lost is not None for host in silent):
                break
            if time.monotonic() > next_word:
                missing = ", ".join(host.name for host in silent[:8]) + (", …" if len(silent) > 8 else "")
                waited = f"{len(names) - len(silent)} of {len(names)} hosts after {time.monotonic() - began:.0f} s"
                print(f"{waited}, missing: {missing}", file=sys.stderr, flush=True)
                next_word += SAY_S
            time.sleep(0.05)
        return silent

    def _is_silent(self, name: str) -> bool:
        return self.hosts[name].heard is None

    def _give_up_silent_ways(self) -> None:
        """End connections whose first host doesn't answer, so that those behind it are tried by another way."""
        for connection in self._connections if self.step is None else []:
            if len(connection.hosts) > 1 and self._is_silent(connection.hosts[0]):
                connection.process.kill()

    def _is_on_its_way(self, name: str) -> bool:
        way = self.hosts[name].way
        return way is not None and way.process.poll() is None

    def _start(self, names: list[str], again: bool = False) -> None:
        if not names:
            return
        if self.step is not None:
            # A step that fails doesn't say of whom: the second time there are several.
            for group in groups_of(names, FANOUT) if again else [names]:
                command = ["srun", "--overlap", "--quiet", "--no-kill", "--cpu-bind=none", "--ntasks-per-node=1"]
                command += [
                    f"--nodes={len(group)}",
                    f"--ntasks={len(group)}",
                    f"--nodelist={','.join(group)}",
                    *self.step,
                ]
                with self._lock:
                    connection = Connection(group, [*command, *self._serve["agent"]], self._hear, self._end)
                    self._add(connection)
                connection.say(to_line(self._serve))
            return
        here = [name for name in names if name == self._serve["here"]]
        for group in [here] * bool(here) + groups_of([name for name in names if name not in here], FANOUT):
            with self._lock:
                self._add(ssh_to(group, self._serve, self._hear, self._end))

    def _add(self, connection: Connection) -> None:
        self._connections.append(connection)
        for name in connection.hosts:
            self.hosts[name].way = connection

    def _hear(self, line: bytes) -> None:
        message = json.loads(line[len(MARK) :])
        with self._lock:
            if "lost" in message:
                return self._cut(message["lost"], self.hosts[message["host"]].way, message["why"])
            host = self.hosts.get(message["host"])
            if host is not None:
                host.hear(message, self.clock.now())
        if host is not None and not {"ranks", "clear", "gone"} & set(message):
            self._hear_rest(message)

    def _end(self, connection: Connection) -> None:
        with self._lock:
            self._cut(connection.hosts, connection, connection.last_words)

    def _cut(self, names: list[str], way: Connection | None, why: str) -> None:
        """A connection has ended: hosts that had spoken are lost, of the others another way is tried."""
        for host in (self.hosts[name] for name in names):
            if host.gone or host.way is not way:  # reached by another way meanwhile
                continue
            if host.heard is None:
                host.last_words = why if host.name in why or host.name == names[0] else host.last_words
                self._again.append(host.name)
                # Of a step of several nobody knows who made it fail.
                host.refused += host.name == names[0] and (self.step is None or len(names) == 1)
            elif host.lost is None:
                host.lost = f"its connection ended ({why})" if why else "its connection ended"

    def say(self, **message: Any) -> None:
        """Send a message to every agent that can still be reached."""
        for connection in self._connections:
            if connection.process.poll() is None:
                connection.say(to_line(message))

    def _ping(self) -> None:
        while not self._stopped.wait(PING_S):
            self.say(do="ping")

    def lost(self, names: Sequence[str]) -> dict[str, str]:
        """Hosts that answered once and are lost now, with the reason."""
        lost = {}
        with self._lock:
            now = self.clock.now()
            for host in map(self.hosts.__getitem__, names):
                if host.lost is None and host.heard is not None and now - host.heard > self.lost_after_s:
                    host.lost, host.is_silent = f"no sign of life for {now - host.heard:.0f} s", True
                if host.heard is not None and host.lost is not None:
                    lost[host.name] = host.lost
        return lost

    def short_of_ranks(self, seconds: float = 0.0) -> list[Host]:
        """Hosts on which a rank ended longer ago than this, the first to lose one first."""
        latest = time.monotonic() - seconds
        short = {host.name: host.fewer_since for host in self.hosts.values() if host.fewer_since is not None}
        return [self.hosts[name] for name in sorted(short, key=short.__getitem__) if short[name] <= latest]

    def end_attempt(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """Have hosts end what is left of an attempt; those that didn't confirm it in time. Agents stay."""
        for name in names:
            self.hosts[name].clear = False
        self.say(do="end")
        deadline = time.monotonic() + timeout_s
        waits = lambda: [n for n in names if not self.hosts[n].clear and self.hosts[n].lost is None]  # noqa: E731
        while waits() and time.monotonic() < deadline:
            time.sleep(0.05)
        return [name for name in names if not self.hosts[name].clear]

    def stop(self, timeout_s: float) -> list[str]:
        """Have every host end what is left of the run, and its agent; the hosts that didn't confirm it in time."""
        self._stopped.set()
        self.say(do="stop")
        deadline = time.monotonic() + timeout_s
        waits = lambda: any(h.heard and not h.gone and h.lost is None for h in self.hosts.values())  # noqa: E731
        while time.monotonic() < deadline and waits():
            time.sleep(0.05)
        for connection in self._connections:
            connection.end(0.5)
        return [host.name for host in self.hosts.values() if not host.gone and host.heard is not None]
