"""SIGTERM, SIGUSR1 and SIGINT while training: all ranks finish the step under way and save; a later signal ends at once."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist

from clap_ds.engine.ending import STOP_SIGNALS
from clap_ds.ranks.failure import STOPPED, leave_word

REPEAT_S = 5.0
"""One request reaches a rank several times: from the terminal and the launcher, from SLURM and the job script. Signals within
this time of the first are taken for repetitions."""


class StopRequest:
    """Notes the first signal; one that comes later than its repetitions ends this rank.

    Launchers signal ranks one after the other, some only when the first has ended: so ranks share what they got after every
    step, through the hosts, for which no device has to wait. Signals are received by a thread, for the main one may be waiting
    for a rank that is gone.

    Args:
        end_at_once: called by that thread with the later signal's number, to end the process.
    """

    def __init__(self, end_at_once: Callable[[int], Any]) -> None:
        self._end_at_once = end_at_once
        self._number = 0
        self._group = dist.new_group(backend="gloo")

    def agreed(self) -> int:
        """Number of the signal that some rank was sent, 0 for none; the same on all. A collective."""
        number = torch.tensor([self._number])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)

    def _receive(self) -> None:
        first_s = 0.0
        while number := self._receiver.recv(1)[0]:
            if number not in STOP_SIGNALS:
                continue  # another handler's, such as the end of a child
            if not self._number:
                self._number, first_s = number, time.monotonic()
                leave_word(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
            elif time.monotonic() - first_s > REPEAT_S:
                self._end_at_once(number)

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._receive, daemon=True, name="clap.stop")
        self._thread.start()
        self._previous = {number: signal.signal(number, lambda number, frame: None) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._sender.send(bytes([0]))
        self._thread.join()
        self._receiver.close()
        self._sender.close()
