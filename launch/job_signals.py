"""The signals a job is sent: by SLURM before its time limit, by scancel, by Ctrl-C. Standard library only."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from clap_ds.launch import slurm_job


class Signals:
    """The first signal the job was sent.

    Args:
        warning_s: how long before its time limit SLURM sends SIGUSR1. Of a job whose time is hardly longer than that, it
            comes at once, and is taken for sent after half of the time.
    """

    def __init__(self, warning_s: float) -> None:
        self._warning_s = warning_s
        self._received: signal.Signals | None = None
        self._due: float | None = None
        self._numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        for number in self._numbers:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        used, left = (
            (slurm_job.seconds_used_and_left() or (0, 0)) if number == signal.SIGUSR1 and self._warning_s else (0, 0)
        )
        # SLURM may give its warning a minute early.
        if self._due is None and self._received is None and used < left and used + left <= 2 * self._warning_s + 60:
            self._due = time.monotonic() + (left - used) / 2
            shown = f"its ranks are told to stop in {(left - used) / 2:.0f} s, after half of it"
            print(f"the time limit is short, and SLURM announced its end early: {shown}", file=sys.stderr, flush=True)
        else:
            self._received = self._received or signal.Signals(number)

    def received(self) -> signal.Signals | None:
        if self._received is None and self._due is not None and time.monotonic() > self._due:
            self._received = signal.SIGUSR1
        return self._received

    def ignore(self) -> None:
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
