"""A rank that hangs, is stopped or crashes is named in the run's record."""

import faulthandler
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.distributed import error_file, watchdog
from clap_ds.distributed.error_file import read_errors
from clap_ds.distributed.root_cause import find_root_cause, read_progress
from tests import processes
from tests.training.training_commands import wait_until

SHORT_TIMEOUTS = {
    "clap_ds.distributed.watchdog.MIN_STEP_TIMEOUT_S": 2.0,
    "clap_ds.distributed.watchdog.POLL_INTERVAL_S": 0.2,
    "clap_ds.distributed.watchdog.STACKS_GRACE_S": 2.0,
}

# Steps whose ranks wait for each other. The command line has what the last rank does in its fifth
# step.
RUN = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from clap_ds.distributed import error_file, watchdog
from clap_ds.distributed.init import Ranks, leave
from clap_ds.distributed.process_group import initialize

def crash():
    ctypes.string_at(0)

def hold_the_lock():
    ctypes.PyDLL(None).usleep(60_000_000)

def compile():
    with watchdog.activity("compiling"):
        time.sleep(6)

def wait_in_a_library():
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

ranks, path = Ranks.from_environment(), Path(sys.argv[1])
if ranks.world_size > 1:
    initialize(ranks)
error_file.set_error_dir(path, ranks.rank, "node")
watchdog.start(path)
for number in range(1, 9):
    if ranks.rank == ranks.world_size - 1 and number == 5:
        eval(sys.argv[2])()
    if ranks.world_size > 1:
        dist.all_reduce(torch.ones(1))
    watchdog.step(number)
watchdog.ending()
leave(0)
"""


def _start(run: Path, action: str, world_size: int = 2) -> list[processes.Command]:
    (run / "summary.json").write_text('{"state": "running"}')
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["-c", RUN, run, action]
    return processes.ranks(arguments, world_size, env=environment, constants=SHORT_TIMEOUTS)


def test_rank_that_blocks_the_others_is_named_and_recorded(tmp_path):
    first, second, last = _start(tmp_path, "hold_the_lock", 3)
    assert [first.wait(), second.wait()] == [1, 1]
    last.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "failed"
    assert "rank 2 on node blocks the others: " in summary["error"]
    assert summary["error"] in first.stderr
    assert "no step" not in second.stderr, "only one rank reports"


def test_crash_is_named_with_its_signal(tmp_path):
    first, second = _start(tmp_path, "crash")
    assert (first.wait(), second.wait()) == (1, -signal.SIGSEGV)
    cause = find_root_cause(tmp_path, None)
    assert cause is not None
    assert "rank 1 on node: Segmentation fault" in cause.message


def test_announced_pause_ends_no_run(tmp_path):
    ranks = _start(tmp_path, "compile")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert list((tmp_path / "stacks").iterdir()) == []


def test_signal_is_recorded_while_the_main_thread_is_in_a_library(tmp_path):
    (rank,) = _start(tmp_path, "wait_in_a_library", 1)
    wait_until(lambda: "ready" in rank.stdout)
    rank.send_signal(signal.SIGTERM)
    wait_until(lambda: bool(read_errors(tmp_path)))
    rank.kill()
    (error,) = read_errors(tmp_path)
    assert (error.kind, error.code) == ("stopped", 143)


# --- when a rank counts as hung


@pytest.fixture
def limits_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Watch this process, and return a list of all limits until the next sign of life."""
    limits_s: list[float] = []
    record = lambda limit_s, file: limits_s.append(limit_s)  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", record)
    monkeypatch.setattr(error_file.this_rank, "folder", None)  # restored after the test
    watchdog.start(tmp_path)
    yield limits_s
    watchdog.stop()


def _set_clock(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [([], 600.0), ([0.5] * 10, 60.0), ([1.0, 50.0, 1.0], 250.0)],
    ids=["untimed", "at least a minute", "five times the longest step"],
)
def test_limit_by_the_longest_step_ignores_other_tasks(limits_s, monkeypatch, step_s, limit_s):
    for now in itertools.accumulate([1.0, *step_s]):
        _set_clock(monkeypatch, now)
        watchdog.step(1)
    assert limits_s[-1] == limit_s
    with watchdog.activity("saving"):
        assert limits_s[-1] == 1800
        _set_clock(monkeypatch, 10_000.0)
    watchdog.step(2)
    assert limits_s[-1] == limit_s


def test_step_counts_once_the_device_has_completed_it(limits_s, monkeypatch):
    is_done = False
    event = SimpleNamespace(record=lambda: None, query=lambda: is_done)
    monkeypatch.setattr(watchdog.watch, "_cuda", SimpleNamespace(Event=lambda: event))
    monkeypatch.setattr("torch.distributed.distributed_c10d._set_pg_timeout", lambda limit: None)

    def poll() -> int:
        watchdog.watch._poll(0)
        watchdog.watch._write_header()
        (file,) = read_progress(watchdog.watch._path.parents[1])
        return file.step

    watchdog.step(7)
    assert poll() == 0
    is_done = True
    assert poll() == 7
