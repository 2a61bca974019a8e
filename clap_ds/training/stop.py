"""SIGTERM, SIGUSR1 and SIGINT while training: all ranks finish the step under way and save; a later signal ends at once."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_S = 5.0
"""One wish reaches a rank several times: by the terminal and the launcher, by SLURM and the job script. So long it is one."""


class StopRequest:
    """Notes the first signal; one that comes later than its repetitions ends this rank.

    Launchers signal ranks one after the other, some only when the first has ended: so ranks tell each other after every step.
    They do so through the hosts, for which no device has to wait. Signals are heard by a thread, for the main one may be
    waiting for a rank that is gone.

    Args:
        end_at_once: called by that thread with the later signal's number, to end the process.
    """

    def __init__(self, end_at_once: Callable[[int], Any]) -> None:
        self._end_at_once = end_at_once
        self._number = 0
        self._previous: dict[int, Any] = {}
        self._group = dist.new_group(backend="gloo")

    def agreed(self) -> int:
        """Number of the signal that some rank was sent, 0 for none; the same on all. A collective."""
        told = torch.tensor([self._number])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        return int(told)

    def _listen(self) -> None:
        first_s = 0.0
        while number := self._ear.recv(1)[0]:
            if number not in NUMBERS:
                continue  # somebody else's, such as the end of a child
            if not self._number:
                self._number, first_s = number, time.monotonic()
            elif time.monotonic() - first_s > REPEAT_S:
                self._end_at_once(number)

    def __enter__(self) -> StopRequest:
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="clap.stop")
        self._thread.start()
        self._previous = {number: signal.signal(number, lambda number, frame: None) for number in NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._mouth.send(bytes([0]))
        self._thread.join()
        self._ear.close()
        self._mouth.close()
