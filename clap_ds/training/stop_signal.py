"""Handle SIGTERM, SIGUSR1, SIGINT and SIGHUP in training: all ranks finish the current or the next
step, and save."""

import signal
import uuid
from contextlib import suppress
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from clap_ds.distributed import watchdog
from clap_ds.distributed.collectives import hosts, rank, run_on_rank0
from clap_ds.distributed.error_file import STOPPED, write_error_file


class StopRequest:
    """Agrees on the first signal, which launchers send to ranks one after the other.

    A rank writes its signal to the rendezvous store. Rank 0 broadcasts the store's value during
    each step over gloo, so no device waits, and whether a checkpoint is late. While the main thread
    is inside a library, the watchdog records signals.
    """

    def __init__(self) -> None:
        self._number = 0
        self._store = dist.distributed_c10d._get_default_store()
        self._key = run_on_rank0(lambda: f"stop {uuid.uuid4().hex}")

    def ask(self, is_late: bool = False) -> None:
        """Start a collective whose result `wait` returns. Call before each step. `is_late`: rank
        0's counts."""
        is_known = rank() == 0 and self._store.check([self._key])
        self._answer = torch.tensor([int(self._store.get(self._key)) if is_known else 0, is_late])
        self._sending = dist.broadcast(self._answer, src=0, group=hosts(), async_op=True)

    def wait(
        self,
    ) -> tuple[
        int, bool
    ]:  # `clap_ds.distributed.root_cause` recognizes waiting functions by this name
        """Return the signal that a rank received before the step, 0 for none, and `is_late`; the
          same on all ranks. Call after
        the step."""
        if self._sending is not None:  # None with a single rank
            self._sending.wait()
        number, is_late = self._answer.tolist()
        return number, bool(is_late)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._number:
            self._number = number
            write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
            with suppress(RuntimeError):  # rank 0 is gone, as the step finds out
                self._store.set(self._key, str(number))

    def __enter__(self) -> Self:
        self._previous = {
            number: signal.signal(number, self._receive) for number in watchdog.SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
