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

BRIEF = {
    f"clap_ds.distributed.watchdog.{name}": value
    for name, value in (("LEAST_S", 2.0), ("LOOK_S", 0.2), ("GRACE_S", 2.0))
}

# Steps whose ranks wait for each other; the command line has the code of the last rank's fifth
# step.
RUN = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from clap_ds.distributed import error_file, watchdog
from clap_ds.distributed.init import Ranks, initialize, leave

def crash():
    ctypes.string_at(0)

def hold_the_lock():
    ctypes.PyDLL(None).usleep(60_000_000)

def compile():
    with watchdog.activity("compiling"):
        time.sleep(6)

def receive_signals():
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


def _run(folder: Path, what: str, world_size: int = 2) -> list[processes.Command]:
    (folder / "summary.json").write_text('{"state": "running"}')
    arguments = ["-c", RUN, folder, what]
    return processes.ranks(
        arguments, world_size, env={**os.environ, "OMP_NUM_THREADS": "1"}, constants=BRIEF
    )


def test_a_rank_that_holds_the_others_up_is_named_and_recorded(tmp_path: Path) -> None:
    first, second, last = _run(tmp_path, "hold_the_lock", 3)
    assert [first.wait(), second.wait()] == [1, 1]
    last.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "failed"
    assert "rank 2 on node blocks the others: " in summary["error"]
    assert summary["error"] in first.stderr
    assert "no step" not in second.stderr, "only one rank reports"
    cause = find_root_cause(tmp_path, None)
    assert cause is not None
    assert (cause.kind, cause.ranks, cause.hosts) == ("stall", [2], ["node"])


def test_a_crash_is_named_with_its_signal(tmp_path: Path) -> None:
    first, second = _run(tmp_path, "crash")
    assert (first.wait(), second.wait()) == (1, -signal.SIGSEGV)
    cause = find_root_cause(tmp_path, None)
    assert cause is not None
    assert "rank 1 on node: Segmentation fault" in cause.message
    assert (cause.kind, cause.hosts) == ("signal", ["node"])


def test_a_pause_that_is_announced_ends_no_run(tmp_path: Path) -> None:
    ranks = _run(tmp_path, "compile")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert list((tmp_path / "stacks").iterdir()) == []


def test_a_signal_is_recorded_while_the_main_thread_is_in_a_library(tmp_path: Path) -> None:
    (alone,) = _run(tmp_path, "receive_signals", 1)
    wait_until(lambda: "ready" in alone.stdout)
    alone.send_signal(signal.SIGTERM)
    wait_until(lambda: bool(read_errors(tmp_path)))
    alone.kill()
    (word,) = read_errors(tmp_path)
    assert (word.kind, word.code, word.host) == ("stopped", 143, "node")


# --- when a rank counts as hung


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Watch this process."""
    limits: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda limit_s, file: limits.append(limit_s)
    )
    monkeypatch.setattr(error_file.this_rank, "folder", None)  # restored after the test
    watchdog.start(tmp_path)
    yield limits
    watchdog.stop()


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [([], 600.0), ([0.5] * 10, 60.0), ([1.0, 50.0, 1.0], 250.0)],
    ids=["untimed", "a minute", "five pauses"],
)
def test_limit_by_the_steps_so_far(
    limits: list[float], monkeypatch: pytest.MonkeyPatch, step_s: list[float], limit_s: float
) -> None:
    for now in itertools.accumulate([1.0, *step_s]):
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda now=now: now))
        watchdog.step(1)
    assert limits[-1] == limit_s
    with watchdog.activity("saving"):
        assert limits[-1] == 1800
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now + 10_000))
    watchdog.step(2)
    assert limits[-1] == limit_s, "the task in between is no step"


def test_a_step_counts_once_the_device_has_completed_it(
    limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []
    event = SimpleNamespace(record=lambda: None, query=lambda: bool(done))
    monkeypatch.setattr(watchdog.watch, "_cuda", SimpleNamespace(Event=lambda: event))
    monkeypatch.setattr("torch.distributed.distributed_c10d._set_pg_timeout", lambda limit: None)
    steps = lambda: [file.step for file in read_progress(watchdog.watch._path.parents[1])]  # noqa: E731
    watchdog.step(7)
    watchdog.watch._look(0)
    watchdog.watch._note()
    assert steps() == [0]
    done.append(True)
    watchdog.watch._look(0)
    watchdog.watch._note()
    assert steps() == [7]
