"""Each rank watches itself: one that makes no step for too long writes its stacks, and the run ends saying who held it up.

faulthandler's own thread writes them, Python's lock held or not. A thread of this module sees to the end: of the ranks that
stand still, the lowest judges and records why; then all leave. It also leaves a word of signals that come while the main
thread is inside a library. Standard library only.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clap_ds.config.errors import printable
from clap_ds.config.files import open_own, own_folder
from clap_ds.distributed.error_file import STALL, STOPPED, leave_word
from clap_ds.distributed.root_cause import STACKS, STEPPING, STILL, judge, read_stacks
from clap_ds.distributed.timeout import within
from clap_ds.run_records.run_dir import RunDirectory  # the standard library alone, at import

LEAST_S, PAUSES = 60.0, 5.0
"""A rank stands still when it makes no step for so many seconds, and longest times between steps so far."""
UNTIMED_S = 600.0  # before a step has been timed
DOING_S = 1800.0  # while it starts, saves, evaluates, compiles …
LOOK_S = 1.0
GRACE_S = 8.0  # for the other ranks to write their stacks
SPEAK_S = 20.0  # for the record and the terminal
FIRST_LINE_BYTES = 400
STARTING, ENDING = "starting", "ending"
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under `nohup`
    SIGNALS += (signal.SIGHUP,)


class Watch:
    """One rank's; `armed` is when it last gave a sign of life, and for how long none needs to follow."""

    def __init__(self, run_directory: Path, rank: int, host: str) -> None:
        self._run, self._rank, self._host = run_directory, rank, host
        self.path = run_directory / STACKS / f"rank{rank}.txt"
        with own_folder(self.path.parent) as folder:
            self._file = open_own(folder / self.path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._steps, self._longest_s = 0, 0.0
        self._last_step = 0.0  # 0: something else is done before the next one
        self.armed = (time.monotonic(), math.inf)
        self._others_busy = 0.0  # when another rank last was
        self.doing = ""
        self.tell(STARTING)
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._attend, daemon=True, name="clap.watch").start()

    def tell(self, doing: str, step: int | None = None) -> None:
        """A sign of life: what is done from now on, and the step just made."""
        now = time.monotonic()
        stood_still = now - self.armed[0] > self.armed[1]
        if doing != STEPPING:
            self._last_step = 0.0
        elif step is not None:
            if self._last_step:
                self._longest_s = max(self._longest_s, now - self._last_step)
            self._steps, self._last_step = step, now
        if doing != self.doing:
            self.doing = doing
            self._note(doing)
        self.armed = (now, self._limit_s())
        if doing == ENDING:  # stacks that it has written may say why
            faulthandler.cancel_dump_traceback_later()
            return
        if stood_still:  # it goes on
            os.ftruncate(self._file, FIRST_LINE_BYTES)
        os.lseek(self._file, FIRST_LINE_BYTES, os.SEEK_SET)
        faulthandler.dump_traceback_later(self.armed[1], file=self._file)

    def _limit_s(self) -> float:
        if self.doing != STEPPING:
            return math.inf if self.doing == ENDING else DOING_S
        return max(LEAST_S, PAUSES * self._longest_s) if self._longest_s else UNTIMED_S

    def close(self) -> None:
        """Take the file away where it has no stacks."""
        self.tell(ENDING)
        faulthandler.disable()
        with suppress(ValueError):  # by another thread than the main one
            signal.set_wakeup_fd(self._wakeup_fd)
        with suppress(OSError):
            if os.fstat(self._file).st_size <= FIRST_LINE_BYTES:
                with own_folder(self.path.parent) as folder:
                    (folder / self.path.name).unlink()

    def _note(self, doing: str) -> None:
        """Write the file's first line, always of the same length."""
        content = {"rank": self._rank, "host": self._host, "pid": os.getpid(), "doing": doing, "step": self._steps}
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, f"{json.dumps(content):<{FIRST_LINE_BYTES - 1}}\n".encode(), 0)
            os.fsync(self._file)  # other hosts are to see it

    def _attend(self) -> None:
        while True:
            self._hear(LOOK_S)
            armed = self.armed
            if time.monotonic() > sum(armed) + LOOK_S / 2:
                self._note(STILL)
                self._hear(GRACE_S)
                while self.armed == armed:
                    self._leave_together(*armed)
                    self._hear(LOOK_S)
                self._note(self.doing)  # it goes on

    def _hear(self, for_s: float) -> None:
        """Wait, and leave a word of signals that come meanwhile."""
        until = time.monotonic() + for_s
        while select.select([self._signalled], [], [], max(0.0, until - time.monotonic()))[0]:
            for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                leave_word(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)

    def _leave_together(self, since: float, limit_s: float) -> None:
        """End this rank where the run's end is recorded, or is to be by this rank."""
        files, now = read_stacks(self._run), time.monotonic()
        if any(file.doing not in (STEPPING, STILL) for file in files):
            self._others_busy = now  # who has just done something else has the whole limit to step
        is_lowest = not any(file.doing == STILL and file.rank < self._rank for file in files)
        if is_lowest and (now - max(since, self._others_busy) > limit_s + GRACE_S or now - since > DOING_S + GRACE_S):
            with suppress(Exception):
                within(SPEAK_S, self._speak)
            os._exit(1)
        with suppress(OSError, ValueError):
            if RunDirectory(self._run).summary().get("state") != "running":
                os._exit(1)

    def _speak(self) -> None:
        if not (verdict := judge(self._run, None, ())):
            return
        if verdict.kind == STALL:
            # What is judged now stays: a rank that was stopped may write its stacks when the others have left.
            leave_word(STALL, verdict.message, 1, ranks=verdict.ranks, hosts=verdict.hosts)
        RunDirectory(self._run).finish("failed", verdict.message)
        print(f"error: {printable(verdict.message)}; stacks: {self._run / STACKS}", file=sys.stderr, flush=True)


_watch: Watch | None = None  # a process is one rank


def start(run_directory: Path, rank: int, host: str) -> None:
    """Begin to watch this rank, if the run directory can be seen. Crashes leave no core."""
    global _watch
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        _watch = Watch(run_directory, rank, host)
    except OSError as error:
        print(f"warning: {host}: rank {rank} isn't watched: {error}", file=sys.stderr, flush=True)


def step(number: int) -> None:
    """The `number`th step of the training has been made."""
    if _watch is not None:
        _watch.tell(STEPPING, number)


def alive() -> None:
    """What is being done goes on."""
    if _watch is not None:
        _watch.tell(_watch.doing)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """While the body runs, which may take long, this rank is doing `what`."""
    before = _watch.doing if _watch else ""
    if _watch is not None:
        _watch.tell(what)
    try:
        yield
    finally:
        if _watch is not None and _watch.doing == what:
            _watch.tell(before)


def ending() -> None:
    """What this rank does from here on has no time limit."""
    if _watch is not None:
        _watch.tell(ENDING)


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
