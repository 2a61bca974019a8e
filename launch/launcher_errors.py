"""Read from a launcher's output where ranks ended or never started, for ranks that could not write an error file.

The lines are those of srun's `_task_finish`, `_node_fail_handler` and `_fail_step_tasks`. With torchrun, tasks are its agents.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

from clap_ds.distributed.error_file import HOST, IMPORT, KILLED, STOPPED, RankError
from clap_ds.distributed.hostfile import expand

MOST_BYTES = 1000  # of a line
_ERROR = re.compile(r"(?:\d+: )?(?:srun|slurmstepd\S*): error: (.+)")  # labeled by `srun --label`
_TASKS = re.compile(r"(\S+): tasks? (\d+)\S*: (.+)")
_LOST_NODE = re.compile(r"(?:Node failure|Task launch for .+ failed) on (?:node )?([^\s:]+)")
_STOPS = re.compile("Terminated|Interrupt|Hangup|User defined signal 1|Exited with exit code (129|130|138|143)")
_STARTED_NOTHING = re.compile(r"Exited with exit code (?!137)\d+")
AGENT_FAILED = "Exited with exit code 1"


class LauncherErrors:
    """The first error of a task in a launcher's output, in bounded memory.

    Attributes:
        first: the error. `hosts` are those of which srun says the same.
        remark: the first error that names no task, such as a program that doesn't exist.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self.first: RankError | None = None
        self.remark = ""
        self._hosts = hosts
        self._how = ""  # the first task ended
        self._line = b""

    def read(self, output: bytes) -> None:
        """Read the next part of the output."""
        *lines, self._line = (self._line + output).split(b"\n")
        self._line = self._line[:MOST_BYTES]
        for line in lines:
            match = _ERROR.match(line[:MOST_BYTES].decode(errors="replace"))
            if match is not None:
                with suppress(ValueError):  # a malformed list of hosts
                    self._read_error(match[1])

    def _read_error(self, text: str) -> None:
        task = _TASKS.match(text)
        match = task or _LOST_NODE.match(text)
        if match is None:
            if not self.remark and "CANCELLED" not in text:  # a consequence of another task's end
                self.remark = text
            return
        known_hosts = self.first.hosts if self.first else []
        hosts = [host for host in expand(match[1]) if host in self._hosts and host not in known_hosts]
        if not hosts:
            return
        if self.first is not None:
            # All hosts may lack what the program needs. Agents of torchrun also exit with 1 if another one fails.
            if self.first.fault == IMPORT and text.endswith(self._how) and self._how != AGENT_FAILED:
                self.first.hosts.extend(hosts)
            return
        if task is None:
            self.first = RankError(0.0, 0, hosts[0], KILLED, f"lost {match[1]}: {text}", hosts=hosts, fault=HOST)
            return
        self._how = task[3]
        kind = STOPPED if _STOPS.match(self._how) else KILLED
        fault = IMPORT if _STARTED_NOTHING.match(self._how) else KILLED
        self.first = RankError(0.0, int(task[2]), hosts[0], kind, text, hosts=hosts, fault=fault)
