"""A rank that stands still, is stopped or crashes is named by what the ranks leave, and the run's record says so."""

import faulthandler
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clap_ds.engine import compiled
from clap_ds.ranks import watch
from clap_ds.ranks.failure import read_words
from clap_ds.ranks.verdict import judge, read_stacks
from tests import processes
from tests.training.training_commands import wait_until

BRIEF = {f"clap_ds.ranks.watch.{name}": value for name, value in (("LEAST_S", 2.0), ("LOOK_S", 0.2), ("GRACE_S", 2.0))}

# Steps of a run whose ranks wait for each other; what is done in the last rank's fifth stands in the command line.
RUN = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from clap_ds.ranks import failure, watch
from clap_ds.ranks.distributed import Ranks, initialize, leave

def crash():
    ctypes.string_at(0)

def hold_the_lock():
    ctypes.PyDLL(None).usleep(60_000_000)

def compile():
    with watch.doing("compiling"):
        time.sleep(6)

def rest():
    print("ready", flush=True)
    time.sleep(1)
    time.sleep(0.5)  # when it is woken amid the first

def receive_signals():
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

ranks, path = Ranks.from_environment(), Path(sys.argv[1])
if ranks.world_size > 1:
    initialize(ranks, compile_cpu_collective=False)
failure.speak_in(path, ranks.rank, "node")
watch.start(path, ranks.rank, "node")
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
    arguments = ["-c", RUN, folder, what]
    return processes.ranks(arguments, world_size, env={**os.environ, "OMP_NUM_THREADS": "1"}, constants=BRIEF)


def _recorded(folder: Path) -> tuple[str, str]:
    summary = json.loads((folder / "summary.json").read_text())
    return summary["state"], summary["error"]


def test_a_rank_that_holds_the_others_up_is_named_and_recorded(tmp_path: Path) -> None:
    first, second, last = _run(tmp_path, "hold_the_lock", 3)
    assert [first.wait(), second.wait()] == [1, 1]
    last.kill()
    message = "no step for 2 s: rank 2 on node in hold_the_lock (<string>:12); the other 2 in all_reduce "
    state, error = _recorded(tmp_path)
    assert (state, error.partition("(distributed_c10d")[0]) == ("failed", message)
    assert f"error: {message}" in first.stderr
    assert "no step" not in second.stderr, "one speaks for all"
    assert "Timeout (0:00:02)!" in (tmp_path / "stacks" / "rank0.txt").read_text()
    verdict = judge(tmp_path, None, ["a", "a", "b"])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("stall", [2], ["b"])


def test_a_crash_is_named_with_its_signal(tmp_path: Path) -> None:
    first, second = _run(tmp_path, "crash")
    assert (first.wait(), second.wait()) == (1, -signal.SIGSEGV)
    verdict = judge(tmp_path, None, ())
    assert verdict is not None
    assert verdict.message.startswith("rank 1 on node: Segmentation fault in string_at (__init__.py:")
    assert (verdict.kind, verdict.hosts) == ("signal", ["node"])


@pytest.mark.parametrize("what", ["compile", "rest"])
def test_a_pause_that_is_announced_or_everybodys_ends_no_run(tmp_path: Path, what: str) -> None:
    ranks = _run(tmp_path, what)
    if what == "rest":
        wait_until(lambda: "ready" in ranks[1].stdout)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                rank.send_signal(number)
            time.sleep(4 if number == signal.SIGSTOP else 0)  # of two until somebody would be missed
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert list((tmp_path / "stacks").iterdir()) == []


def test_a_signal_that_the_main_thread_cannot_take_leaves_a_word(tmp_path: Path) -> None:
    (alone,) = _run(tmp_path, "receive_signals", 1)
    wait_until(lambda: "ready" in alone.stdout)
    alone.send_signal(signal.SIGTERM)
    wait_until(lambda: bool(read_words(tmp_path)))
    alone.kill()
    (word,) = read_words(tmp_path)
    assert (word.kind, word.code, word.host) == ("stopped", 143, "node")


# --- when a rank has stood still for too long


class Armed:
    """A watch of this process, whose limits are noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.limits = folder, [0.0]
        monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda limit_s, file: self.limits.append(limit_s))
        monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: self.limits.append(math.inf))
        watch.start(folder, 3, "n3")

    def told(self) -> tuple[str, int, float]:
        """What the rank does and its step by the file, and its limit."""
        (found,) = read_stacks(self.folder)
        assert (found.rank, found.host, found.pid) == (3, "n3", os.getpid())
        return found.doing, found.step, self.limits[-1]


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Armed]:
    yield Armed(tmp_path, monkeypatch)
    watch.stop()


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [([], 600.0), ([0.5] * 10, 60.0), ([5.0] * 10, 100.0), ([1.0, 50.0, 1.0], 150.0), ([9.0] * 210 + [2.0] * 200, 60.0)],
    ids=["untimed", "a minute", "twenty steps", "three pauses", "the latest steps"],
)  # fmt: skip
def test_limit_by_the_steps_so_far(
    armed: Armed, monkeypatch: pytest.MonkeyPatch, step_s: list[float], limit_s: float
) -> None:
    for now in itertools.accumulate([1.0, *step_s]):
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda now=now: now))
        watch.step(1)
    assert armed.limits[-1] == limit_s
    with watch.doing("saving"):
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now + 10_000))
    watch.step(2)
    assert armed.limits[-1] == limit_s, "what was done in between is no step"


def test_limits_by_what_is_done(armed: Armed) -> None:
    assert armed.told() == ("starting", 0, 1800)
    watch.step(7)
    assert armed.told() == ("stepping", 7, 600)
    watch.step(8)
    with watch.doing("saving"):
        with watch.doing("copying"):
            assert armed.told() == ("copying", 8, 1800)
            watch.alive()
        assert armed.told() == ("saving", 8, 1800)
    assert armed.told() == ("stepping", 8, 60)
    watch.ending()
    with watch.doing("copying"):
        assert armed.told() == ("copying", 8, 1800)
    assert armed.told() == ("ending", 8, math.inf)
    watch.stop()
    assert list((armed.folder / "stacks").iterdir()) == []


def test_stacks_of_a_rank_that_ends_stay(armed: Armed) -> None:
    """As of one that stood still, and ends as its peers have left."""
    with (armed.folder / "stacks" / "rank3.txt").open("a") as file:
        file.write("Timeout")
    watch.stop()
    assert read_stacks(armed.folder)[0].text == "Timeout"


def test_compiling_is_said_whenever_it_is_done(armed: Armed) -> None:
    said = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        said.append(armed.told()[0])
        return graph

    compiled._note_compilations.cache_clear()
    compiled._note_compilations()
    watch.step(7)
    torch.compile(lambda x: 2 * x, backend=backend)(torch.ones(3))
    assert (said, armed.told()[0]) == (["compiling"], "stepping")
    torch._dynamo.reset()


def test_a_forked_process_is_not_watched(armed: Armed) -> None:
    number = os.fork()
    if number == 0:
        os._exit(int(faulthandler.is_enabled() or signal.set_wakeup_fd(-1) != -1 or watch._watch is not None))
    assert os.waitpid(number, 0)[1] == 0
    assert faulthandler.is_enabled()
    assert armed.told()[0] == "starting"


def test_a_directory_that_cannot_be_seen_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch.start(tmp_path / "elsewhere", 3, "n3")
    watch.step(1)
    with watch.doing("evaluating"):
        watch.alive()
    watch.ending()
    watch.stop()
    assert capfd.readouterr().err.startswith("warning: n3: rank 3 isn't watched: [Errno 2] No such file or directory")
