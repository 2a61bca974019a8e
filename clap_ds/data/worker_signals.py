"""How data workers take signals: they are meant for the rank, which finishes its step, saves, and ends its workers itself."""

from __future__ import annotations

import signal
from types import FrameType


def leave_signals_to_rank() -> None:
    """Call first in a worker process, whose forked handlers are the rank's.

    Launchers send SIGTERM to a rank's whole process tree. A worker that obeyed would take the data from a rank that still has a
    step to finish, so it lets the first one pass and obeys the next.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)


def _obey_the_next(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
