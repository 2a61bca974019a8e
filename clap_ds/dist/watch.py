"""Each rank watches itself: one that makes no step for too long writes its stacks, and the run ends saying who held it up.

faulthandler's own thread writes them, whatever the rank's other threads do, Python's lock held or not; a rank that is stopped
writes none, and that tells, too. A thread of this module has the lowest rank that stands still judge, print and record; then all
leave. It also leaves a word of a signal that comes while the main thread is inside a library. Works alike under every launcher.
Whom the stacks blame is left to `clap_ds.dist.verdict`. Standard library only.
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
from pathlib import Path
from typing import NoReturn

from clap_ds.dist import stacks
from clap_ds.dist.failure import STOPPED, leave_word
from clap_ds.dist.limits import within
from clap_ds.dist.verdict import judge
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import

LEAST_S, MEDIANS, PAUSES = 60.0, 20.0, 3.0
"""A rank stands still when it makes no step for so many seconds, median steps and longest times between steps so far."""
UNTIMED_S = 600.0  # before a step has been timed
DOING_S = 1800.0  # while it starts, saves, evaluates, compiles …
GRACE_S = 8.0  # for the other ranks to write theirs
SPEAK_S = 20.0  # for the record and the terminal
LOOK_S = 1.0
STARTING, ENDING = "starting", "ending"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class _Watch:
    """One rank's watch; `armed` is the time of the last sign of life and how long after it the next is due."""

    def __init__(self, run_directory: Path, rank: int, host: str, neighbours: range) -> None:
        self._run_directory, self._rank, self._host, self._neighbours = run_directory, rank, host, neighbours
        path = stacks.path_of(run_directory, rank)
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._durations: deque[float] = deque(maxlen=200)
        self._longest_s = 0.0
        self._stepped_at: float | None = None  # where nothing but the next step has been begun since
        self.steps, self.doing, self._noted_s = 0, STARTING, 0.0
        self.armed = (time.monotonic(), math.inf)
        self.arm()
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._attend, daemon=True, name="clap.watch").start()

    # --- by the main thread

    def limit_s(self) -> float:
        if self.doing:
            return math.inf if self.doing == ENDING else DOING_S
        if not self._durations:
            return UNTIMED_S
        return max(LEAST_S, MEDIANS * statistics.median(self._durations), PAUSES * self._longest_s)

    def arm(self) -> None:
        """A sign of life: the next is due within the limit."""
        (before, limit_s), now = self.armed, time.monotonic()
        stood_still = now - before > limit_s
        limit_s = self.limit_s()
        self.armed = (now, limit_s)
        if stood_still:
            os.ftruncate(self._file, stacks.FIRST_LINE_BYTES)
        if stood_still or not 0.9 < min(limit_s, DOING_S) / max(self._noted_s, 1e-9) < 1.1:
            self._note(self.doing or "stepping", min(limit_s, DOING_S))
        if limit_s == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            os.lseek(self._file, stacks.FIRST_LINE_BYTES, os.SEEK_SET)
            faulthandler.dump_traceback_later(limit_s, file=self._file)

    def step(self, number: int) -> None:
        now = time.monotonic()
        if self._stepped_at is not None:
            self._durations.append(now - self._stepped_at)
            self._longest_s = max(self._longest_s, now - self._stepped_at)
        self._stepped_at, self.steps, self.doing = now, number, ""
        self.arm()

    def change(self, doing: str) -> str:
        """Do something else from now on; what was done before."""
        before, self.doing, self._stepped_at = self.doing, doing, None
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
                stacks.path_of(self._run_directory, self._rank).unlink()

    # --- by either thread

    def _note(self, doing: str, limit_s: float) -> None:
        self._noted_s = limit_s
        line = stacks.first_line(self._rank, self._host, os.getpid(), doing, self.steps, limit_s)
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, line, 0)
            os.fsync(self._file)  # other hosts are to see it

    # --- by the watch's own thread

    def _attend(self) -> None:
        while True:
            self._hear(LOOK_S)
            armed = self.armed
            if time.monotonic() > armed[0] + armed[1] + LOOK_S / 2:
                self._stand_still(armed)

    def _hear(self, for_s: float) -> None:
        """Wait, and leave a word of signals that come meanwhile: the main thread may never get to it."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._signalled], [], [], left_s)[0]:
                for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                    leave_word(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)

    def _stand_still(self, armed: tuple[float, float]) -> None:
        self._note(stacks.STILL, armed[1])
        self._hear(GRACE_S)
        while self.armed == armed:
            if self._is_lowest() and time.monotonic() - armed[0] > self._longest_wait_s():
                with suppress(Exception):
                    within(SPEAK_S, self._speak)
                self._leave()
            with suppress(OSError, ValueError):
                if RunDirectory(self._run_directory).summary().get("state") != "running":
                    self._leave()
            self._hear(LOOK_S)

    def _is_lowest(self) -> bool:
        """Of the ranks that stand still and whose threads run."""
        lower = (stacks.read(stacks.path_of(self._run_directory, rank)) for rank in range(self._rank))
        return not any(each and each.doing == stacks.STILL for each in lower)

    def _longest_wait_s(self) -> float:
        """How long the ranks that don't stand still, as far as they could say, may take; one of them may compile."""
        waiting = (each.limit_s for each in stacks.read_all(self._run_directory) if each.still_s is None)
        return 1.1 * max(waiting, default=0.0) + GRACE_S

    def _speak(self) -> None:
        verdict = judge(self._run_directory, None, ())
        message = verdict.message if verdict else "no step, and no stacks"
        RunDirectory(self._run_directory).finish("failed", message)
        print(f"error: {message}; stacks: {self._run_directory / stacks.FOLDER}", file=sys.stderr, flush=True)

    def _leave(self) -> NoReturn:
        """End, and with it ranks of this host that are stopped, for which a launcher would wait."""
        for rank in self._neighbours:
            neighbour = stacks.read(stacks.path_of(self._run_directory, rank))
            if neighbour and neighbour.host == self._host and _is_stopped_sibling(neighbour.pid):
                os.kill(neighbour.pid, signal.SIGKILL)
        os._exit(1)


_watch: _Watch | None = None  # a process is one rank


def start(run_directory: Path, rank: int, host: str, neighbours: range = range(0)) -> None:
    """Begin to watch this rank, in a run directory that is there; `neighbours` are the ranks of its host. A host that doesn't
    see the directory has no watch. Crashes leave no core."""
    global _watch
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        _watch = _Watch(run_directory, rank, host, neighbours)
    except OSError as error:
        print(f"warning: {host}: rank {rank} can't be watched: {error}", file=sys.stderr, flush=True)


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
    if _watch is None:
        yield
        return
    before = _watch.change(what)
    try:
        yield
    finally:
        if _watch is not None and _watch.doing == what:
            _watch.change(before)


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


def _is_stopped_sibling(pid: int) -> bool:
    with suppress(OSError, IndexError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return state == "T" and int(parent) == os.getppid()
    return False


os.register_at_fork(after_in_child=_forget)
