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
from typing import Any, NamedTuple

from clap_ds.distributed.error_file import STALL, this_rank, write_error_file, write_stopped
from clap_ds.distributed.root_cause import (
    DUMP,
    STACKS,
    Progress,
    find_root_cause,
    read_own_progress,
    read_progress,
)
from clap_ds.run_records.run_dir import RunDirectory  # imports the standard library only
from clap_ds.utils.errors import printable, warn
from clap_ds.utils.files import hold_folder, open_without_following

# A rank hangs if it makes no step for this many seconds, and for this many times its longest gap
# between steps so far.
MIN_STEP_TIMEOUT_S = 60.0
STEP_TIMEOUT_FACTOR = 5.0
FIRST_STEP_TIMEOUT_S = 600.0  # before a step has been timed
ACTIVITY_TIMEOUT_S = 1800.0  # while starting, saving, evaluating, compiling …
POLL_INTERVAL_S = 1.0
HEARTBEAT_INTERVAL_S = 10.0  # between updates of the progress file
STACKS_GRACE_S = 8.0  # for the other ranks to write their stacks
RECORD_LIMIT_S = 20.0  # for recording the cause
HEADER_BYTES = 800
MAX_GROUPS = 8  # process groups in the header
STARTING = "starting"
STEPPING = "stepping"
ENDING = "ending"
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`
    SIGNALS += (signal.SIGHUP,)


class Deadline(NamedTuple):
    """The last sign of life, by the monotonic clock, and the limit until the next."""

    since: float
    limit_s: float

    @property
    def at(self) -> float:
        return self.since + self.limit_s


class Watchdog:
    """Watches this process's rank once started; until then its methods do nothing.

    Attributes:
        deadline: when the rank counts as hung. A thread reads it while the main thread replaces it.
        activity: the task of the main thread.
        phase: what the main thread does within a step.
    """

    def __init__(self) -> None:
        self._run: Path | None = None
        self.activity = ""
        self.phase = ""

    def start(self, run_directory: Path, cuda: Any = None) -> None:
        """Start watching, if the run directory is accessible. `cuda`: `torch.cuda` if the run is on
        a GPU."""
        self._path = run_directory / STACKS / f"rank{this_rank.rank}.txt"
        try:
            with hold_folder(self._path.parent) as folder:
                self._file = open_without_following(
                    folder / self._path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC
                )
        except OSError as error:
            warn(f"no hang detection for rank {this_rank.rank}: {error}")
            return
        self._cuda = cuda
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(self._path.with_name(DUMP))
        self._num_steps = 0
        self._longest_step_s = 0.0
        # 0: another task precedes the next step.
        self._last_step_at = 0.0
        # Steps that the device hasn't completed, and events after them.
        self._queued: deque[tuple[int, Any]] = deque()
        self._last_busy_peer_at = 0.0
        self.deadline = Deadline(time.monotonic(), math.inf)
        self._run = run_directory
        self.begin(STARTING)
        faulthandler.enable(self._file)
        # Python writes each signal's number to the pipe, even if the main thread is in a library.
        self._signal_pipe, sender = os.pipe()
        os.set_blocking(sender, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(
            target=self._monitor, args=[run_directory], daemon=True, name="clap.watchdog"
        ).start()

    def begin(self, activity: str) -> None:
        """Record a sign of life, and the task that starts now."""
        if self._run is None:
            return
        has_changed = activity != self.activity
        self.activity = activity
        self.phase = ""
        self._last_step_at = 0.0
        self._extend_deadline()
        if not has_changed:
            return
        self._write_header()
        if self._cuda is not None and activity != ENDING:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            # If all hosts hold Python's lock in launches, NCCL's own watchdog ends the run and
            # dumps its progress.
            limit_s = FIRST_STEP_TIMEOUT_S if activity == STEPPING else ACTIVITY_TIMEOUT_S
            _set_pg_timeout(timedelta(seconds=limit_s))

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
        self._num_steps = number
        if self.activity != STEPPING:
            return
        now = time.monotonic()
        if self._last_step_at:
            self._longest_step_s = max(self._longest_step_s, now - self._last_step_at)
        self._last_step_at = now
        self._extend_deadline()

    def alive(self) -> None:
        """Record that the current task, not a step, makes progress."""
        if self.activity != STEPPING:
            self.begin(self.activity)

    @contextmanager
    def section(self, activity: str) -> Iterator[None]:
        """Mark this rank as doing `activity`, which may take long, while the body runs."""
        outer_activity = self.activity
        self.begin(activity)
        try:
            yield
        finally:
            if self.activity == activity:
                self.begin(outer_activity)

    def ending(self) -> None:
        """Lift the time limit from here on."""
        self.begin(ENDING)

    def stop(self) -> None:
        """Stop watching after an orderly end, and remove the file unless it has stacks."""
        self.ending()
        if self._run is not None and os.fstat(self._file).st_size <= HEADER_BYTES:
            with suppress(OSError), hold_folder(self._path.parent) as folder:
                (folder / self._path.name).unlink()
        self.disable()

    def disable(self) -> None:
        """Stop watching, also in a forked process: its crashes and signals aren't the rank's."""
        if self._run is not None:
            self._run = None
            faulthandler.disable()
            with suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._previous_wakeup_fd)

    def _extend_deadline(self) -> None:
        now = time.monotonic()
        if self.activity == ENDING:
            # Stacks that were written stay: they may show why the run ends.
            self.deadline = Deadline(now, math.inf)
            faulthandler.cancel_dump_traceback_later()
            return
        limit_s = ACTIVITY_TIMEOUT_S
        if self.activity == STEPPING:
            limit_s = FIRST_STEP_TIMEOUT_S
            if self._longest_step_s:
                limit_s = max(MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR * self._longest_step_s)
        if now > self.deadline.at:
            os.ftruncate(self._file, HEADER_BYTES)  # it has recovered
        self.deadline = Deadline(now, limit_s)
        os.lseek(self._file, HEADER_BYTES, os.SEEK_SET)
        faulthandler.dump_traceback_later(limit_s, file=self._file)

    def _write_header(self, hung_at: float | None = None) -> None:
        """Write the file's header, of constant length: `root_cause.ProgressFile` has its fields."""
        progress: Progress = {}
        if hung_at is not None:
            with suppress(Exception):
                progress = read_own_progress()
        # NCCL's groups sort after gloo's, and tell more.
        groups = sorted(progress, reverse=True)[:MAX_GROUPS]
        header = {
            "rank": this_rank.rank,
            "host": this_rank.host,
            "activity": self.phase or self.activity,
            "step": self._num_steps,
            "limit_s": min(self.deadline.limit_s, ACTIVITY_TIMEOUT_S),
            "hung_at": hung_at,
            "collectives": {group: progress[group] for group in groups},
        }
        self._header_written_at = time.monotonic()
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, f"{json.dumps(header):<{HEADER_BYTES - 1}}\n".encode(), 0)
            os.fsync(self._file)  # for other hosts

    def _monitor(self, run: Path) -> None:
        """Report progress, and end the run once this rank hangs. The thread's main function."""
        while self._run == run:
            self._poll(POLL_INTERVAL_S)
            deadline = self.deadline
            # Later than faulthandler, whose stacks come first.
            if time.monotonic() > deadline.at + POLL_INTERVAL_S / 2:
                self._write_header(hung_at=time.time())
                self._poll(STACKS_GRACE_S)
                while self.deadline == deadline:
                    self._abort_all(RunDirectory(run), deadline)
                    self._poll(POLL_INTERVAL_S)
                self._write_header()  # it has recovered
            elif time.monotonic() - self._header_written_at > HEARTBEAT_INTERVAL_S:
                self._write_header()

    def _poll(self, duration_s: float) -> None:
        """Wait; record signals that arrive meanwhile, and then steps that the device has
        completed."""
        end = time.monotonic() + duration_s
        while select.select([self._signal_pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            for number in set(os.read(self._signal_pipe, 100)) & set(SIGNALS):
                write_stopped(number)
        with suppress(RuntimeError):  # the device has failed, as the main thread will find
            while self._queued and self._queued[0][1].query():
                number, _ = self._queued.popleft()
                self._complete(number)

    def _abort_all(self, run: RunDirectory, deadline: Deadline) -> None:
        """Exit if the run's end is recorded, or if this rank has to record it."""
        files = read_progress(run.path)
        now = time.monotonic()
        # A rank that was busy gets the whole limit to step.
        if any(not file.responds and file.limit_s >= ACTIVITY_TIMEOUT_S for file in files):
            self._last_busy_peer_at = now
        is_lowest = not any(file.hung_at and file.rank < this_rank.rank for file in files)
        # Other ranks' limits may be longer.
        margin_s = (deadline.limit_s - MIN_STEP_TIMEOUT_S) / 4
        limit_s = deadline.limit_s + STACKS_GRACE_S + margin_s
        waited_s = now - max(deadline.since, self._last_busy_peer_at)
        is_over = waited_s > limit_s or now - deadline.since > ACTIVITY_TIMEOUT_S + STACKS_GRACE_S
        if is_lowest and is_over:
            # The file system may not answer.
            threading.Timer(RECORD_LIMIT_S, os._exit, [1]).start()
            with suppress(Exception):
                _record_cause(run)
            os._exit(1)
        with suppress(OSError, ValueError):
            if run.summary().get("state") != "running":
                os._exit(1)


def _record_cause(run: RunDirectory) -> None:
    cause = find_root_cause(run.path, None)
    if cause is None:
        return
    if cause.kind == STALL:
        # Keep this verdict: a stopped rank may write its stacks after the others have exited.
        write_error_file(STALL, cause.message, 1, ranks=cause.ranks, hosts=cause.hosts)
    run.finish("failed", cause.message)
    message = f"error: {printable(cause.message)}; stacks: {run.path / STACKS}"
    print(message, file=sys.stderr, flush=True)


watch = Watchdog()  # a process is one rank
start = watch.start
step = watch.step
alive = watch.alive
activity = watch.section
ending = watch.ending
stop = watch.stop
os.register_at_fork(after_in_child=watch.disable)
