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
from clap_ds.distributed.error_file import write_stopped


class StopRequest:
    """The first signal that any rank receives, which all ranks agree on.

    Launchers signal ranks one after the other. A rank writes its signal to the rendezvous store.
    Rank 0 broadcasts the store's value during each step, and whether a checkpoint is late. The
    broadcast is over gloo, so no device waits. While the main thread is inside a library, the
    watchdog records signals.
    """

    def __init__(self) -> None:
        self._number = 0
        self._store = dist.distributed_c10d._get_default_store()
        # A new key, because ranks of an earlier start may have used the same store.
        self._key = run_on_rank0(lambda: f"stop {uuid.uuid4().hex}")

    def ask(self, is_late: bool = False) -> None:
        """Start a collective whose result `wait` returns. Call before each step. `is_late`: rank
        0's counts."""
        number = 0
        if rank() == 0 and self._store.check([self._key]):
            number = int(self._store.get(self._key))
        self._agreed = torch.tensor([number, is_late])
        # None with a single rank.
        self._broadcast = dist.broadcast(self._agreed, src=0, group=hosts(), async_op=True)

    # `clap_ds.distributed.root_cause` recognizes waiting functions by the name `wait`.
    def wait(self) -> tuple[int, bool]:
        """Return the signal that a rank received before the step, or 0, and `is_late`. All ranks
        get the same. Call after the step."""
        if self._broadcast is not None:
            self._broadcast.wait()
        number, is_late = self._agreed.tolist()
        return number, bool(is_late)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # The first signal counts.
        if self._number:
            return
        self._number = number
        write_stopped(number)
        # If rank 0, which has the store, is gone, the step raises an error.
        with suppress(RuntimeError):
            self._store.set(self._key, str(number))

    def __enter__(self) -> Self:
        self._previous = {
            number: signal.signal(number, self._receive) for number in watchdog.SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
