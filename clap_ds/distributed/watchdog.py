"""Hang detection: a rank that completes no step in time writes its stacks, and the run ends with the ranks at fault.

faulthandler's thread writes stacks even if the GIL is held. A thread of this module ends the run: the lowest hung rank
records the root cause, then all exit. It also records signals that arrive while the main thread is inside a library.
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
from clap_ds.distributed.error_file import STALL, STOPPED, write_error_file
from clap_ds.distributed.root_cause import HUNG, STACKS, STEPPING, find_root_cause, read_stacks
from clap_ds.distributed.timeout import within
from clap_ds.run_records.run_dir import RunDirectory  # imports the standard library only

LEAST_S, PAUSES = 60.0, 5.0
"""A rank hangs if it makes no step for `LEAST_S` seconds and `PAUSES` times its longest gap between steps so far."""
UNTIMED_S = 600.0  # limit before a step has been timed
DOING_S = 1800.0  # limit while starting, saving, evaluating, compiling …
LOOK_S = 1.0
GRACE_S = 8.0  # for the other ranks to write their stacks
SPEAK_S = 20.0  # for writing to the record and the terminal
FIRST_LINE_BYTES = 400
STARTING, ENDING = "starting", "ending"
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`
    SIGNALS += (signal.SIGHUP,)


class Watch:
    """Watches one rank; `armed` holds the time of its last sign of life and the limit until the next."""

    def __init__(self, run_directory: Path, rank: int, host: str) -> None:
        self._run, self._rank, self._host = run_directory, rank, host
        self.path = run_directory / STACKS / f"rank{rank}.txt"
        with own_folder(self.path.parent) as folder:
            self._file = open_own(folder / self.path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._steps, self._longest_s = 0, 0.0
        self._last_step = 0.0  # 0: another task precedes the next step
        self.armed = (time.monotonic(), math.inf)
        self._others_busy = 0.0  # when another rank was last busy
        self.activity = ""
        self.tell(STARTING)
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._attend, daemon=True, name="clap.watch").start()

    def tell(self, activity: str, step: int | None = None) -> None:
        """Record a sign of life: the task that starts now, and the step just made."""
        now = time.monotonic()
        stood_still = now - self.armed[0] > self.armed[1]
        if activity != STEPPING:
            self._last_step = 0.0
        elif step is not None:
            if self._last_step:
                self._longest_s = max(self._longest_s, now - self._last_step)
            self._steps, self._last_step = step, now
        if activity != self.activity:
            self.activity = activity
            self._note(activity)
        self.armed = (now, self._limit_s())
        if activity == ENDING:  # keep written stacks: they may show why
            faulthandler.cancel_dump_traceback_later()
            return
        if stood_still:  # it has recovered
            os.ftruncate(self._file, FIRST_LINE_BYTES)
        os.lseek(self._file, FIRST_LINE_BYTES, os.SEEK_SET)
        faulthandler.dump_traceback_later(self.armed[1], file=self._file)

    def _limit_s(self) -> float:
        if self.activity != STEPPING:
            return math.inf if self.activity == ENDING else DOING_S
        return max(LEAST_S, PAUSES * self._longest_s) if self._longest_s else UNTIMED_S

    def close(self) -> None:
        """Remove the file unless it has stacks."""
        self.tell(ENDING)
        faulthandler.disable()
        with suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(self._wakeup_fd)
        with suppress(OSError):
            if os.fstat(self._file).st_size <= FIRST_LINE_BYTES:
                with own_folder(self.path.parent) as folder:
                    (folder / self.path.name).unlink()

    def _note(self, activity: str) -> None:
        """Write the file's header, of constant length."""
        content = {
            "rank": self._rank,
            "host": self._host,
            "pid": os.getpid(),
            "activity": activity,
            "step": self._steps,
        }
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, f"{json.dumps(content):<{FIRST_LINE_BYTES - 1}}\n".encode(), 0)
            os.fsync(self._file)  # for other hosts

    def _attend(self) -> None:
        while True:
            self._hear(LOOK_S)
            armed = self.armed
            if time.monotonic() > sum(armed) + LOOK_S / 2:
                self._note(HUNG)
                self._hear(GRACE_S)
                while self.armed == armed:
                    self._leave_together(*armed)
                    self._hear(LOOK_S)
                self._note(self.activity)  # it has recovered

    def _hear(self, for_s: float) -> None:
        """Wait, and record signals that arrive meanwhile."""
        until = time.monotonic() + for_s
        while select.select([self._signalled], [], [], max(0.0, until - time.monotonic()))[0]:
            for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)

    def _leave_together(self, since: float, limit_s: float) -> None:
        """Exit if the run's end is recorded, or if this rank has to record it."""
        files, now = read_stacks(self._run), time.monotonic()
        if any(file.activity not in (STEPPING, HUNG) for file in files):
            self._others_busy = now  # a rank that was busy gets the whole limit to step
        is_lowest = not any(file.activity == HUNG and file.rank < self._rank for file in files)
        if is_lowest and (now - max(since, self._others_busy) > limit_s + GRACE_S or now - since > DOING_S + GRACE_S):
            with suppress(Exception):
                within(SPEAK_S, self._speak)
            os._exit(1)
        with suppress(OSError, ValueError):
            if RunDirectory(self._run).summary().get("state") != "running":
                os._exit(1)

    def _speak(self) -> None:
        if not (cause := find_root_cause(self._run, None, ())):
            return
        if cause.kind == STALL:
            # Keep this verdict: a stopped rank may write its stacks after the others have exited.
            write_error_file(STALL, cause.message, 1, ranks=cause.ranks, hosts=cause.hosts)
        RunDirectory(self._run).finish("failed", cause.message)
        print(f"error: {printable(cause.message)}; stacks: {self._run / STACKS}", file=sys.stderr, flush=True)


_watch: Watch | None = None  # a process is one rank


def start(run_directory: Path, rank: int, host: str) -> None:
    """Start watching this rank, if the run directory is accessible, and disable core dumps."""
    global _watch
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        _watch = Watch(run_directory, rank, host)
    except OSError as error:
        print(f"warning: {host}: no hang detection for rank {rank}: {error}", file=sys.stderr, flush=True)


def step(number: int) -> None:
    """Record that training step `number` is complete."""
    if _watch is not None:
        _watch.tell(STEPPING, number)


def alive() -> None:
    """Record that the current task makes progress."""
    if _watch is not None:
        _watch.tell(_watch.activity)


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Mark this rank as doing `what`, which may take long, while the body runs."""
    before = _watch.activity if _watch else ""
    if _watch is not None:
        _watch.tell(what)
    try:
        yield
    finally:
        if _watch is not None and _watch.activity == what:
            _watch.tell(before)


def ending() -> None:
    """Lift the time limit from here on."""
    if _watch is not None:
        _watch.tell(ENDING)


def stop() -> None:
    """Stop watching after an orderly end."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close()


def _forget() -> None:
    """Stop watching in a forked process: its crashes and signals aren't the rank's."""
    global _watch
    if _watch is not None:
        _watch = None
        faulthandler.disable()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
