"""A rank that stands still, is stopped or crashes is named by what the ranks leave, and the run's record says so."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from clap_ds.dist.verdict import judge
from tests import processes

BRIEF = {"clap_ds.dist.watch.LEAST_S": 2.0, "clap_ds.dist.watch.LOOK_S": 0.2, "clap_ds.dist.standstill.GRACE_S": 1.0}

# Steps of a run whose ranks wait for each other; what is done in rank 1's fifth stands in the command line.
RUN = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from clap_ds.dist import failure, watch
from clap_ds.dist.distributed import Ranks, initialize, leave
from clap_ds.dist.standstill import Place
from clap_ds.record.directory import RunDirectory

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def crash():
    ctypes.string_at(0)

def hold_the_lock():
    ctypes.PyDLL(None).usleep(60_000_000)

def compile():
    with watch.doing("compiling"):
        time.sleep(4)

def wait_for_nobody():
    threading.Event().wait()

def receive_signals():
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

ranks = Ranks.from_environment()
if ranks.world_size > 1:
    initialize(ranks, compile_cpu_collective=False)
path = Path(sys.argv[1])
record = RunDirectory(path)
failure.speak_in(path, ranks.rank, "node")
watch.start(Place(path, ranks.rank, "node", range(ranks.world_size)))
for number in range(1, 9):
    if ranks.rank == ranks.world_size - 1 and number == 5:
        eval(sys.argv[2])()
    if ranks.world_size > 1:
        dist.all_reduce(torch.ones(1))
    watch.step(number)
watch.ending()
leave(0)
"""


def _run(folder: Path, what: str, world_size: int = 2) -> list[processes.Command]:
    (folder / "summary.json").write_text('{"state": "running"}')
    return processes.ranks(
        ["-c", RUN, folder, what], world_size, env={**os.environ, "OMP_NUM_THREADS": "1"}, constants=BRIEF
    )


def _recorded(folder: Path) -> tuple[str, str]:
    summary = json.loads((folder / "summary.json").read_text())
    return summary["state"], summary["error"]


@pytest.mark.parametrize(("what", "where"), [
    ("stop", "gives no answer: it is stopped or gone"), ("hold_the_lock", "in hold_the_lock (<string>:17)"),
])  # fmt: skip
def test_a_rank_that_holds_the_others_up_is_named_and_recorded(tmp_path: Path, what: str, where: str) -> None:
    first, second = _run(tmp_path, what)
    assert first.wait() == 1
    message = f"no step for 2 s: rank 1 on node {where}; the other 1 in all_reduce "
    state, error = _recorded(tmp_path)
    assert (state, error.partition("(distributed_c10d")[0]) == ("failed", message)
    assert f"error: {message}" in first.stderr
    verdict = judge(tmp_path, None, ["a", "b"])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("stall", [1], ["b"])
    if what == "hold_the_lock":
        second.kill()
    assert second.wait() == -signal.SIGKILL  # one that is stopped by rank 0, for a launcher would wait for it


def test_a_crash_is_named_with_its_signal(tmp_path: Path) -> None:
    first, second = _run(tmp_path, "crash")
    assert (first.wait(), second.wait()) == (1, -signal.SIGSEGV)
    verdict = judge(tmp_path, None, ())
    assert verdict is not None
    assert verdict.message.startswith("rank 1 on node: Segmentation fault in string_at (__init__.py:")
    assert (verdict.kind, verdict.hosts) == ("signal", ["node"])


def test_what_takes_long_and_says_so_is_waited_for_by_all(tmp_path: Path) -> None:
    ranks = _run(tmp_path, "compile")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert list((tmp_path / "stacks").iterdir()) == []


def test_one_rank_alone_says_where_it_stands(tmp_path: Path) -> None:
    (alone,) = _run(tmp_path, "wait_for_nobody", 1)
    assert alone.wait() == 1
    state, error = _recorded(tmp_path)
    assert (state, error.partition(" (")[0]) == ("failed", "no step for 2 s: rank 0 on node in wait")


def test_a_signal_that_the_main_thread_cannot_take_leaves_a_word(tmp_path: Path) -> None:
    (alone,) = _run(tmp_path, "receive_signals", 1)
    while "ready" not in alone.stdout:
        time.sleep(0.1)
    alone.send_signal(signal.SIGTERM)
    path = tmp_path / "errors" / "rank0.json"
    while not path.exists():
        time.sleep(0.1)
    alone.kill()
    extra = json.loads(path.read_text())["message"]["extraInfo"]
    assert (extra["kind"], extra["code"], extra["host"]) == ("stopped", 143, "node")
