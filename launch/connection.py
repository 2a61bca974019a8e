"""Lines to and from host agents: a child process (ssh to one host and those behind it, or one srun step) whose standard input
and output are the line. Standard library only: a relay uses this, too.

What goes down is one JSON object a line; what comes up is `clap-agent` and one JSON object. Anything else that comes up was
said by ssh, srun or a login script, and is kept as last words.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

MARK = b"clap-agent "
FANOUT = 32
"""Connections that one process holds: two levels reach 1,000 hosts, with few files and processes on each."""
LAST_LINES_S = 1.0
"""To read what a child said last; what it left behind could hold its output open."""

_OF_A_FAILURE = re.compile(
    r"(?i)error|fail|killed|refused|closed|timed out|no route|reset|denied|not (found|known)|no such"
)
Message = dict[str, Any]


class RunningClock:
    """Seconds for which this process ran. After a pause of its own (memory pressure, a suspended machine) it would otherwise
    take the silence for the others'."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """To be asked several times a second."""
        looked = time.monotonic()
        self._seconds += min(looked - self._looked, 1.0)
        self._looked = looked
        return self._seconds


def _ignore_signals() -> None:
    # scancel signals every process of the batch step at once; connections to the hosts must outlive the first signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Connection:
    """One child process that leads to agents.

    Args:
        hosts: that are reached by it, the nearest first.
        command: the child's command line.
        hear: called with each line of an agent's, by a thread.
        over: called with this connection when the child has ended, by a thread.
    """

    def __init__(
        self, hosts: list[str], command: list[str], hear: Callable[[bytes], None], over: Callable[[Connection], None]
    ) -> None:
        self.hosts, self.last_words = hosts, ""
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=both, preexec_fn=_ignore_signals)
        self._hear, self._over = hear, over
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self._hear(line)
                continue
            text = line.decode(errors="replace").strip()
            if text and (not self.last_words or _OF_A_FAILURE.search(text)):
                self.last_words = text
        self.process.stdout.close()
        self.process.wait()
        self._lines.put(None)  # nobody reads any more
        self._over(self)

    def _write(self) -> None:
        """By a thread: what leads to a host that is gone may take nothing any more."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (line := self._lines.get()) is not None:
                self.process.stdin.write(line)
                self.process.stdin.flush()
            self.process.stdin.close()

    def say(self, line: bytes) -> None:
        self._lines.put(line)

    def end(self, timeout_s: float) -> None:
        """Wait for the child to end by itself, having closed its input, and kill it after the time."""
        self._lines.put(None)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # an agent that sees its input end does all that it was to do
        self._reader.join(LAST_LINES_S)


def groups_of(hosts: list[str], most: int) -> list[list[str]]:
    """Hosts in at most so many groups as even as can be; the first of each passes on to the others."""
    count = min(most, len(hosts))
    bounds = [len(hosts) * number // count for number in range(count + 1)] if count else []
    return [hosts[first:last] for first, last in itertools.pairwise(bounds)]


def to_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def ssh_to(
    hosts: list[str], serve: Message, hear: Callable[[bytes], None], over: Callable[[Connection], None]
) -> Connection:
    """Start the agent of the first host, over ssh unless it is `serve["here"]`, and tell it to reach the others.

    Args:
        serve: what every agent is told first; with `agent` and `ssh`, the command lines of the agent and of ssh, and
            `fanout`, the most connections of one process.
    """
    host, *below = hosts
    command = serve["agent"] if host == serve["here"] else [*serve["ssh"], host, shlex.join(serve["agent"])]
    connection = Connection(hosts, command, hear, over)
    connection.say(to_line({**serve, "do": "serve", "host": host, "below": below}))
    return connection
