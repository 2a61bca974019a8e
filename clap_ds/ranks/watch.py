"""Each rank watches itself: one that makes no step for too long writes its stacks, and the run ends saying who held it up.

faulthandler's own thread writes them, whatever the rank's other threads do, Python's lock held or not; a rank that is stopped
writes none, and that tells, too. A thread of this module sees to the end (`clap_ds.ranks.standstill`), and leaves a word of a
signal that comes while the main thread is inside a library. Works alike under every launcher. Standard library only.
"""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import select
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from clap_ds.ranks import stacks, standstill
from clap_ds.ranks.failure import STOPPED, leave_word
from clap_ds.ranks.standstill import Place

LEAST_S, MEDIANS, PAUSES = 60.0, 20.0, 3.0
"""A rank stands still when it makes no step for so many seconds, median steps and longest times between steps so far."""
UNTIMED_S = 600.0  # before a step has been timed
DOING_S = 1800.0  # while it starts, saves, evaluates, compiles …
LOOK_S = 1.0
_NOTHING = 1e-9
STARTING, ENDING = "starting", "ending"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Pace:
    """How long a rank takes from step to step, where nothing else is done in between."""

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=200)
        self._longest_s = 0.0
        self._last: float | None = None

    def step(self, now: float) -> None:
        if self._last is not None:
            self._step_s.append(now - self._last)
            self._longest_s = max(self._longest_s, now - self._last)
        self._last = now

    def interrupt(self) -> None:
        """Something else is done before the next step."""
        self._last = None

    def limit_s(self) -> float:
        """How long after a step the next is due."""
        if not self._step_s:
            return UNTIMED_S
        return max(LEAST_S, MEDIANS * statistics.median(self._step_s), PAUSES * self._longest_s)


class Watch:
    """One rank's; `armed` is when it last gave a sign of life, and for how long none needs to follow."""

    def __init__(self, place: Place) -> None:
        self._place = place
        place.path.parent.mkdir(exist_ok=True)
        self._file = os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._pace, self._noted_s = Pace(), _NOTHING
        self.steps, self.doing = 0, STARTING
        self.armed = (time.monotonic(), math.inf)
        self.arm()
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._attend, daemon=True, name="clap.watch").start()

    def limit_s(self) -> float:
        if self.doing:
            return math.inf if self.doing == ENDING else DOING_S
        return self._pace.limit_s()

    def arm(self) -> None:
        """A sign of life."""
        now, limit_s = time.monotonic(), self.limit_s()
        stood_still = now - self.armed[0] > self.armed[1]
        self.armed = (now, limit_s)
        if stood_still and self.doing != ENDING:  # it goes on; of one that ends, the stacks may say why
            os.ftruncate(self._file, stacks.FIRST_LINE_BYTES)
        told_s = min(limit_s, DOING_S)
        if stood_still or not 1 / stacks.SLACK < told_s / self._noted_s < stacks.SLACK:
            self._note(self.doing or "stepping", told_s)
        if limit_s < math.inf:
            os.lseek(self._file, stacks.FIRST_LINE_BYTES, os.SEEK_SET)
            faulthandler.dump_traceback_later(limit_s, file=self._file)
        else:
            faulthandler.cancel_dump_traceback_later()

    def step(self, number: int) -> None:
        self._pace.step(time.monotonic())
        self.steps, self.doing = number, ""
        self.arm()

    def change(self, doing: str) -> str:
        """Do something else from now on; what was done before."""
        before, self.doing = self.doing, doing
        self._pace.interrupt()
        self.arm()
        return before

    def close(self) -> None:
        """Take the file away where it has no stacks."""
        self.change(ENDING)
        faulthandler.disable()
        with suppress(ValueError):  # by another thread than the main one
            signal.set_wakeup_fd(self._wakeup_fd)
        with suppress(OSError):
            if os.fstat(self._file).st_size <= stacks.FIRST_LINE_BYTES:
                self._place.path.unlink()

    def _note(self, doing: str, limit_s: float) -> None:
        self._noted_s = limit_s
        line = stacks.first_line(self._place.rank, self._place.host, os.getpid(), doing, self.steps, limit_s)
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, line, 0)
            os.fsync(self._file)  # other hosts are to see it

    def _attend(self) -> None:
        """The watch's own thread."""
        while True:
            self._hear(LOOK_S)
            since, limit_s = armed = self.armed
            if time.monotonic() > since + limit_s + LOOK_S / 2:
                self._note(stacks.STILL, limit_s)
                self._hear(standstill.GRACE_S)
                while self.armed == armed:
                    standstill.leave_together(self._place, time.monotonic() - since)
                    self._hear(LOOK_S)
                self._noted_s = _NOTHING  # it goes on, and is to say so

    def _hear(self, for_s: float) -> None:
        """Wait, and leave a word of signals that come meanwhile: the main thread may never get to it."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._signalled], [], [], left_s)[0]:
                for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                    leave_word(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)


_watch: Watch | None = None  # a process is one rank


def start(place: Place) -> None:
    """Begin to watch this rank. Where the run directory can't be seen, it isn't watched. Crashes leave no core."""
    global _watch
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        _watch = Watch(place)
    except OSError as error:
        print(f"warning: {place.host}: rank {place.rank} isn't watched: {error}", file=sys.stderr, flush=True)


def step(number: int) -> None:
    """An optimiser step has been made, the `number`th of the training."""
    if _watch is not None:
        _watch.step(number)


def alive() -> None:
    """What is being done goes on."""
    if _watch is not None:
        _watch.arm()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """While the body runs, which may take long, this rank is doing `what`."""
    before = _watch and _watch.change(what)
    try:
        yield
    finally:
        if _watch is not None and _watch.doing == what:
            _watch.change(before or "")


def ending() -> None:
    """This rank makes no more steps: what follows takes as long as it takes."""
    if _watch is not None:
        _watch.change(ENDING)


def stop() -> None:
    """An orderly end: leave no stacks behind."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close()


def _forget() -> None:
    """In a forked process: its crashes and signals aren't the rank's."""
    global _watch
    if _watch is not None:
        _watch = None
        faulthandler.disable()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
