"""SIGTERM, SIGUSR1, SIGINT and SIGHUP while training: all ranks finish the step under way and save."""

import signal
import socket
import threading
from typing import Self

import torch
import torch.distributed as dist

from clap_ds.engine.ending import STOP_SIGNALS
from clap_ds.ranks.failure import STOPPED, leave_word


class StopRequest:
    """Notes the first signal; it reaches a rank several times, from the terminal, the launcher, SLURM and the job script.

    Launchers signal ranks one after the other, some only when the first has ended: so ranks share what they got after every
    step, through the hosts, for which no device has to wait. Signals are received by a thread, for the main one may be waiting
    for a rank that is gone.
    """

    def __init__(self) -> None:
        self._number = 0
        self._group = dist.new_group(backend="gloo")

    def agreed(self) -> int:
        """Number of the signal that some rank was sent, 0 for none; the same on all. A collective."""
        number = torch.tensor([self._number])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)

    def _receive(self) -> None:
        while number := self._receiver.recv(1)[0]:
            if (
                number in STOP_SIGNALS and not self._number
            ):  # others have their own handlers, such as the end of a child
                self._number = number
                leave_word(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)

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
