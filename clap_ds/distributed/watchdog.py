"""Hang detection: a rank that completes no step in time writes its stacks and progress, and the run ends.

faulthandler's thread writes stacks even if Python's lock is held. A thread of this module ends the run: the lowest hung
rank records the root cause, then all exit. It also records signals that arrive while the main thread is inside a library.
On a GPU a step counts once the device has completed it.
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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from clap_ds.config.errors import printable
from clap_ds.config.files import open_own, own_folder
from clap_ds.distributed import flight_recorder
from clap_ds.distributed.error_file import STALL, STOPPED, this_rank, write_error_file
from clap_ds.distributed.root_cause import STACKS, find_root_cause, read_progress
from clap_ds.distributed.timeout import within
from clap_ds.run_records.run_dir import RunDirectory  # imports the standard library only

LEAST_S, PAUSES = 60.0, 5.0
"""A rank hangs if it makes no step for `LEAST_S` seconds and `PAUSES` times its longest gap between steps so far."""
UNTIMED_S = 600.0  # limit before a step has been timed
DOING_S = 1800.0  # limit while starting, saving, evaluating, compiling …
LOOK_S = 1.0
PUBLISH_S = 10.0  # between updates of the progress file
GRACE_S = 8.0  # for the other ranks to write their stacks
SPEAK_S = 20.0  # for writing to the record and the terminal
HEADER_BYTES = 800
STARTING, STEPPING, ENDING = "starting", "stepping", "ending"
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`
    SIGNALS += (signal.SIGHUP,)


class Watch:
    """Watches this process's rank once started.

    Attributes:
        armed: the time of its last sign of life, and the limit until the next.
        phase: what its main thread does within a step.
    """

    def __init__(self) -> None:
        self._run: Path | None = None
        self._thread: threading.Thread | None = None
        self.activity = self.phase = ""

    def start(self, run_directory: Path, rank: int, host: str) -> None:
        """Start watching, if the run directory is accessible, and disable core dumps."""
        this_rank.place(run_directory, rank, host)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self._path = run_directory / STACKS / f"rank{rank}.txt"
        try:
            with own_folder(self._path.parent) as folder:
                self._file = open_own(folder / self._path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            print(f"warning: {host}: no hang detection for rank {rank}: {error}", file=sys.stderr, flush=True)
            return
        flight_recorder.dump_to(self._path.parent)
        torch = sys.modules.get("torch")
        self._cuda: Any = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        self._steps, self._longest_s = 0, 0.0
        self._last_step = 0.0  # 0: another task precedes the next step
        self._queued: deque[tuple[int, Any]] = deque()  # steps that the device hasn't completed, and events after them
        self._others_busy = 0.0  # when another rank was last busy
        self.armed = (time.monotonic(), math.inf)
        self.activity, self._run = "", run_directory
        self.begin(STARTING)
        faulthandler.enable(self._file)
        self._signalled, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._attend, daemon=True, name="clap.watch")
        self._thread.start()

    def begin(self, activity: str) -> None:
        """Record a sign of life, and the task that starts now."""
        if self._run is None:
            return
        self._last_step = 0.0
        changed, self.activity, self.phase = activity != self.activity, activity, ""
        self._arm()
        if changed:
            self._note()
            self._limit_collectives()

    def step(self, number: int) -> None:
        """Record that the main thread has made training step `number`. On a GPU the device completes it later."""
        this_rank.started.set()
        if self._run is None:
            return
        if self.activity != STEPPING:
            self.begin(STEPPING)
        if self._cuda is None:
            self._complete(number)
        else:
            event = self._cuda.Event()
            event.record()
            self._queued.append((number, event))

    def _complete(self, number: int) -> None:
        now, self._steps = time.monotonic(), number
        if self.activity == STEPPING:
            if self._last_step:
                self._longest_s = max(self._longest_s, now - self._last_step)
            self._last_step = now
            self._arm()

    def alive(self) -> None:
        """Record that the current task makes progress."""
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
        if self._run is None:
            return
        self.ending()
        self.forget()
        with suppress(OSError):
            if os.fstat(self._file).st_size <= HEADER_BYTES:
                with own_folder(self._path.parent) as folder:
                    (folder / self._path.name).unlink()

    def forget(self) -> None:
        """Stop watching, also in a forked process: its crashes and signals aren't the rank's."""
        if self._run is not None:
            self._run = self._thread = None
            faulthandler.disable()
            with suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._wakeup_fd)

    @property
    def _limit_s(self) -> float:
        if self.activity != STEPPING:
            return math.inf if self.activity == ENDING else DOING_S
        return max(LEAST_S, PAUSES * self._longest_s) if self._longest_s else UNTIMED_S

    def _arm(self) -> None:
        now = time.monotonic()
        stood_still = now - self.armed[0] > self.armed[1]
        self.armed = (now, self._limit_s)
        if self.activity == ENDING:  # keep written stacks: they may show why
            faulthandler.cancel_dump_traceback_later()
            return
        if stood_still:  # it has recovered
            os.ftruncate(self._file, HEADER_BYTES)
        os.lseek(self._file, HEADER_BYTES, os.SEEK_SET)
        faulthandler.dump_traceback_later(self.armed[1], file=self._file)

    def _limit_collectives(self) -> None:
        """Let NCCL end a step's collectives in time even if Python's lock is held: `launch/` finds the cause in its dumps."""
        if self._cuda is not None and self.activity != ENDING:
            from torch.distributed import distributed_c10d as c10d

            c10d._set_pg_timeout(timedelta(seconds=UNTIMED_S if self.activity == STEPPING else DOING_S))

    def _note(self, hung_at: float | None = None) -> None:
        """Write the file's header, of constant length."""
        progress: flight_recorder.Progress = {}
        if hung_at is not None:
            with suppress(Exception):
                progress = flight_recorder.own_progress()
        content = {
            "rank": this_rank.rank,
            "host": this_rank.host,
            "pid": os.getpid(),
            "activity": self.phase or self.activity,
            "step": self._steps,
            "limit_s": min(self._limit_s, DOING_S),
            "hung_at": hung_at,
            "collectives": dict(sorted(progress.items(), reverse=True)[:8]),
        }
        self._noted = time.monotonic()
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, f"{json.dumps(content):<{HEADER_BYTES - 1}}\n".encode(), 0)
            if threading.current_thread() is self._thread:  # for other hosts
                os.fsync(self._file)

    def _attend(self) -> None:
        while self._thread is threading.current_thread():
            self._look(LOOK_S)
            armed = self.armed
            if time.monotonic() > sum(armed) + LOOK_S / 2:
                self._note(time.time())
                self._look(GRACE_S)
                while self.armed == armed:
                    self._leave_together(*armed)
                    self._look(LOOK_S)
                self._note()  # it has recovered
            elif time.monotonic() - self._noted > PUBLISH_S:
                self._note()

    def _look(self, for_s: float) -> None:
        """Wait; record signals that arrive meanwhile, and then steps that the device has completed."""
        until = time.monotonic() + for_s
        while select.select([self._signalled], [], [], max(0.0, until - time.monotonic()))[0]:
            for number in set(os.read(self._signalled, 100)) & set(SIGNALS):
                write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
        with suppress(RuntimeError):  # the device has failed, as the main thread will find
            while self._queued and self._queued[0][1].query():
                self._complete(self._queued.popleft()[0])

    def _leave_together(self, since: float, limit_s: float) -> None:
        """Exit if the run's end is recorded, or if this rank has to record it."""
        assert self._run is not None
        files, now = read_progress(self._run), time.monotonic()
        limit_s += GRACE_S + (limit_s - LEAST_S) / 4  # other ranks' limits may be longer
        if any(not file.responds and file.limit_s >= DOING_S for file in files):
            self._others_busy = now  # a rank that was busy gets the whole limit to step
        is_lowest = not any(file.hung_at is not None and file.rank < this_rank.rank for file in files)
        if is_lowest and (now - max(since, self._others_busy) > limit_s or now - since > DOING_S + GRACE_S):
            with suppress(Exception):
                within(SPEAK_S, self._speak)
            os._exit(1)
        with suppress(OSError, ValueError):
            if RunDirectory(self._run).summary().get("state") != "running":
                os._exit(1)

    def _speak(self) -> None:
        assert self._run is not None
        if not (cause := find_root_cause(self._run, None, ())):
            return
        if cause.kind == STALL:
            # Keep this verdict: a stopped rank may write its stacks after the others have exited.
            write_error_file(STALL, cause.message, 1, ranks=cause.ranks, hosts=cause.hosts)
        RunDirectory(self._run).finish("failed", cause.message)
        print(f"error: {printable(cause.message)}; stacks: {self._run / STACKS}", file=sys.stderr, flush=True)


watch = Watch()  # a process is one rank
start, step, alive, activity, ending, stop = watch.start, watch.step, watch.alive, watch.during, watch.ending, watch.stop
os.register_at_fork(after_in_child=watch.forget)
