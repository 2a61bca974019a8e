"""Hang detection: a rank that completes no step in time writes its stacks and progress, and the run
ends.

faulthandler's thread writes stacks even if Python's lock is held. A thread of this module ends the
run: the lowest hung rank records the root cause, then all exit. It also records signals that arrive
while the main thread is inside a library. On a GPU a step counts once the device has completed it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from clap_ds.distributed import root_cause
from clap_ds.distributed.error_file import STALL, STOPPED, this_rank, write_error_file
from clap_ds.distributed.root_cause import STACKS, find_root_cause, read_progress
from clap_ds.run_records.run_dir import RunDirectory  # imports the standard library only
from clap_ds.utils.errors import printable
from clap_ds.utils.files import open_own, own_folder

LEAST_S = 60.0
PAUSES = 5.0
"""A rank hangs if it makes no step for `LEAST_S` seconds and `PAUSES` times its longest gap between
steps so far."""
UNTIMED_S = 600.0  # limit before a step has been timed
DOING_S = 1800.0  # limit while starting, saving, evaluating, compiling …
# between checks, and updates of the progress file
LOOK_S = 1.0
PUBLISH_S = 10.0
GRACE_S = 8.0  # for the other ranks to write their stacks
SPEAK_S = 20.0  # for recording the cause
HEADER_BYTES = 800
STARTING = "starting"
STEPPING = "stepping"
ENDING = "ending"
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`
    SIGNALS += (signal.SIGHUP,)


class Watch:
    """Watches this process's rank once started; until then its methods do nothing.

    Attributes:
        armed: time of the last sign of life, and the limit until the next.
        phase: what the main thread does within a step.
    """

    def __init__(self) -> None:
        self._run: Path | None = None
        self.activity = self.phase = ""

    def start(self, run_directory: Path) -> None:
        """Start watching, if the run directory is accessible."""
        self._path = run_directory / STACKS / f"rank{this_rank.rank}.txt"
        try:
            with own_folder(self._path.parent) as folder:
                self._file = open_own(folder / self._path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            print(
                f"warning: no hang detection for rank {this_rank.rank}: {error}",
                file=sys.stderr,
                flush=True,
            )
            return
        import torch

        self._cuda: Any = torch.cuda if torch.cuda.is_initialized() else None
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(self._path.with_name(root_cause.DUMP))
        self._steps = 0
        self._longest_s = 0.0
        self._last_step = 0.0  # 0: another task precedes the next step
        self._queued: deque[tuple[int, Any]] = (
            deque()
        )  # steps that the device hasn't completed, and events after them
        self._others_busy = 0.0  # when another rank was last busy
        self.armed = (time.monotonic(), math.inf)
        self._run = run_directory
        self.begin(STARTING)
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(
            target=self._attend, args=[run_directory], daemon=True, name="clap.watch"
        ).start()

    def begin(self, activity: str) -> None:
        """Record a sign of life, and the task that starts now."""
        if self._run is None:
            return
        changed = activity != self.activity
        self.activity = activity
        self.phase = ""
        self._last_step = 0.0
        self._arm()
        if changed:
            self._note()
        if changed and self._cuda is not None and activity != ENDING:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            # If all hosts hold Python's lock in launches, NCCL's own watchdog ends the run and
            # dumps its progress.
            _set_pg_timeout(timedelta(seconds=UNTIMED_S if activity == STEPPING else DOING_S))

    def step(self, number: int) -> None:
        """Record that the main thread has made training step `number`. On a GPU the device
        completes it later."""
        this_rank.started.set()
        if self._run is None:
            return
        self.phase = ""
        if self.activity != STEPPING:
            self.begin(STEPPING)
        if self._cuda is None:
            self._complete(number)
        else:
            event = self._cuda.Event()
            event.record()
            self._queued.append((number, event))

    def _complete(self, number: int) -> None:
        self._steps = number
        if self.activity == STEPPING:
            now = time.monotonic()
            before = self._last_step
            self._longest_s = max(self._longest_s, now - (before or now))
            self._last_step = now
            self._arm()

    def alive(self) -> None:
        """Record that the current task, not a step, makes progress."""
        if self.activity != STEPPING:
            self.begin(self.activity)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Mark this rank as doing `activity`, which may take long, while the body runs."""
        before = self.activity
        self.begin(activity)
        try:
            yield
        finally:
            if self.activity == activity:
                self.begin(before)

    def ending(self) -> None:
        """Lift the time limit from here on."""
        self.begin(ENDING)

    def stop(self) -> None:
        """Stop watching after an orderly end, and remove the file unless it has stacks."""
        self.ending()
        if self._run is not None and os.fstat(self._file).st_size <= HEADER_BYTES:
            with suppress(OSError), own_folder(self._path.parent) as folder:
                (folder / self._path.name).unlink()
        self.forget()

    def forget(self) -> None:
        """Stop watching, also in a forked process: its crashes and signals aren't the rank's."""
        if self._run is not None:
            self._run = None
            faulthandler.disable()
            with suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._wakeup_fd)

    def _arm(self) -> None:
        now = time.monotonic()
        limit = DOING_S
        if self.activity == ENDING:  # keep written stacks: they may show why
            self.armed = now, math.inf
            return faulthandler.cancel_dump_traceback_later()
        if self.activity == STEPPING:
            limit = max(LEAST_S, PAUSES * self._longest_s) if self._longest_s else UNTIMED_S
        if now > sum(self.armed):  # it has recovered
            os.ftruncate(self._file, HEADER_BYTES)
        self.armed = now, limit
        os.lseek(self._file, HEADER_BYTES, os.SEEK_SET)
        faulthandler.dump_traceback_later(limit, file=self._file)

    def _note(self, hung_at: float | None = None) -> None:
        """Write the file's header, of constant length."""
        progress: root_cause.Progress = {}
        with suppress(Exception):
            progress = root_cause.own_progress() if hung_at else {}
        text = json.dumps({
            "rank": this_rank.rank, "host": this_rank.host, "activity": self.phase or self.activity, "step": self._steps,
            "limit_s": min(self.armed[1], DOING_S), "hung_at": hung_at,
            "collectives": dict(sorted(progress.items(), reverse=True)[:8]),
        })  # fmt: skip
        self._noted = time.monotonic()
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, f"{text:<{HEADER_BYTES - 1}}\n".encode(), 0)
            os.fsync(self._file)  # for other hosts

    def _attend(self, run: Path) -> None:
        while self._run == run:
            self._look(LOOK_S)
            armed = self.armed
            if time.monotonic() > sum(armed) + LOOK_S / 2:
                self._note(time.time())
                self._look(GRACE_S)
                while self.armed == armed:
                    self._leave_together(RunDirectory(run), *armed)
                    self._look(LOOK_S)
                self._note()  # it has recovered
            elif time.monotonic() - self._noted > PUBLISH_S:
                self._note()

    def _look(self, for_s: float) -> None:
        """Wait; record signals that arrive meanwhile, and then steps that the device has
        completed."""
        until = time.monotonic() + for_s
        while select.select([self._signalled], [], [], max(0.0, until - time.monotonic()))[0]:
            for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
        with suppress(RuntimeError):  # the device has failed, as the main thread will find
            while self._queued and self._queued[0][1].query():
                self._complete(self._queued.popleft()[0])

    def _leave_together(self, run: RunDirectory, since: float, limit_s: float) -> None:
        """Exit if the run's end is recorded, or if this rank has to record it."""
        files = read_progress(run.path)
        now = time.monotonic()
        if any(not file.responds and file.limit_s >= DOING_S for file in files):
            self._others_busy = now  # a rank that was busy gets the whole limit to step
        is_lowest = not any(file.hung_at and file.rank < this_rank.rank for file in files)
        limit_s += GRACE_S + (limit_s - LEAST_S) / 4  # other ranks' limits may be longer
        if is_lowest and (
            now - max(since, self._others_busy) > limit_s or now - since > DOING_S + GRACE_S
        ):
            threading.Timer(SPEAK_S, os._exit, [1]).start()  # the file system may not answer
            with suppress(Exception):
                _record_cause(run)
            os._exit(1)
        with suppress(OSError, ValueError):
            if run.summary().get("state") != "running":
                os._exit(1)


def _record_cause(run: RunDirectory) -> None:
    if cause := find_root_cause(run.path, None):
        if cause.kind == STALL:
            # Keep this verdict: a stopped rank may write its stacks after the others have exited.
            write_error_file(STALL, cause.message, 1, ranks=cause.ranks, hosts=cause.hosts)
        run.finish("failed", cause.message)
        print(
            f"error: {printable(cause.message)}; stacks: {run.path / STACKS}",
            file=sys.stderr,
            flush=True,
        )


watch = Watch()  # a process is one rank
start = watch.start
step = watch.step
alive = watch.alive
activity = watch.during
ending = watch.ending
stop = watch.stop
os.register_at_fork(after_in_child=watch.forget)
