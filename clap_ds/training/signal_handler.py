"""Handle SIGTERM, SIGUSR1, SIGINT and SIGHUP in training: all ranks finish the current or the next step, and save."""

import signal
import socket
import threading
import uuid
from contextlib import suppress
from typing import Self

import torch
import torch.distributed as dist

from clap_ds.distributed.collectives import hosts, rank, run_on_rank0
from clap_ds.distributed.error_file import STOPPED, write_error_file
from clap_ds.engine.exit_handling import STOP_SIGNALS

LOOK_S = 0.1  # interval at which rank 0 checks whether any rank received a signal


class StopRequest:
    """Agrees on the first signal, which launchers send to ranks one after the other.

    A rank writes its signal to the rendezvous store. Rank 0 broadcasts the store's value during each step over gloo, so no
    device waits. A thread receives signals, because the main thread may be waiting for a dead rank.
    """

    def __init__(self) -> None:
        self._number = self._found = 0
        self._store = dist.distributed_c10d._get_default_store()
        self._key = run_on_rank0(lambda: f"stop {uuid.uuid4().hex}")

    def ask(self) -> None:
        """Start a collective whose result `wait` returns. Call before each step."""
        self._answer = torch.tensor(self._found)
        self._sending = dist.broadcast(self._answer, src=0, group=hosts(), async_op=True)

    def wait(self) -> int:  # `clap_ds.distributed.root_cause` recognizes waiting functions by this name
        """Return the signal that a rank received before the step, 0 for none; the same on all ranks. Call after the step."""
        if self._sending is not None:  # None with a single rank
            self._sending.wait()
        return int(self._answer)

    def _receive(self) -> None:
        number = -1
        while number:
            try:
                number = self._receiver.recv(1)[0]
            except TimeoutError:
                with suppress(RuntimeError):  # the store is gone, as the run ends
                    if not self._found and self._store.check([self._key]):
                        self._found = int(self._store.get(self._key))
                continue
            if number in STOP_SIGNALS and not self._number:  # other signals have their own handlers
                self._number = number
                write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
                with suppress(RuntimeError):  # rank 0, or its host, is gone
                    self._store.set(self._key, str(number))

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.settimeout(LOOK_S if rank() == 0 else None)
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
