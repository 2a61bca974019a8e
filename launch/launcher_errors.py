"""Read from a launcher's output where ranks ended or never started, for ranks that could not write
an error file.

The lines are those of srun's `_task_finish`, `_node_fail_handler` and `_fail_step_tasks`. With
torchrun, tasks are its agents.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

from clap_ds.distributed.error_file import HOST, IMPORT, KILLED, PROGRAM, STOPPED, RankError
from clap_ds.distributed.hostfile import expand

MOST_BYTES = 1000  # of a line
# With `srun --label`, lines begin with their task.
_TASK = re.compile(r"(?:\d+: )?srun: error: ((?P<hosts>\S+): tasks? \d\S*: (?P<end>.+))")
_NODE = re.compile(
    r"(?:\d+: )?srun: error: (?P<end>(?:Node failure|Task launch for .+ failed) on (?:node )?(?P<hosts>[^\s:]+).*)"
)
_REMARK = re.compile(
    r"(?:\d+: )?(?:srun|slurmstepd\S*): error: (?!.*CANCELLED)(.+)"
)  # steps that a task's end cancels
_STOPS = "Terminated|Interrupt|Hangup|User defined signal 1|Exited with exit code (129|130|138|143)"
_ENDS = (
    (_STOPS, STOPPED, PROGRAM),
    ("Exited with exit code (?!137)", KILLED, IMPORT),
    ("Node failure|Task launch", KILLED, HOST),
    ("", KILLED, KILLED),
)
"""Kind and fault of the ends of a task: by signals that ask it to stop, by itself, by losing its
host, by other signals."""
AGENT_FAILED = "Exited with exit code 1"  # of torchrun, also if another host's agent fails


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
        self._end = ""  # of the first task
        self._line = b""

    def read(self, output: bytes) -> None:
        """Read the next part of the output."""
        *lines, self._line = (self._line + output).split(b"\n")
        self._line = self._line[:MOST_BYTES]
        for line in lines:
            with suppress(ValueError):  # a malformed list of hosts
                self._read_line(line[:MOST_BYTES].decode(errors="replace"))

    def _read_line(self, line: str) -> None:
        match = _TASK.match(line) or _NODE.match(line)
        if match is None:
            remark = _REMARK.match(line)
            if remark is not None and not self.remark:
                self.remark = remark[1]
            return
        end = match["end"]
        hosts = [host for host in expand(match["hosts"]) if host in self._hosts]
        if self.first is not None:
            if (
                self.first.fault == IMPORT and end == self._end != AGENT_FAILED
            ):  # all hosts may lack the program
                self.first.hosts[:] = dict.fromkeys([*self.first.hosts, *hosts])
        elif hosts:
            self._end = end
            kind, fault = next(
                (kind, fault) for pattern, kind, fault in _ENDS if re.match(pattern, end)
            )
            message = f"lost {hosts[0]}: {end}" if fault == HOST else match[1]
            self.first = RankError(0.0, 0, hosts[0], kind, message, hosts=hosts, fault=fault)
