"""The first cause, from files as ranks leave them: who is to blame, and who only suffers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.ranks.failure import ERROR, LOST_PEER, OUT_OF_MEMORY, STALL, STOPPED, UNREACHABLE, USER
from clap_ds.ranks.verdict import STEPPING, STILL, Verdict, judge

HOSTS = ["n1", "n1", "n2", "n2"]
BEGUN = 1_000_000.0
TIMEOUT, SEGFAULT, ABORTED = (
    "Timeout (0:01:00)!\n",
    "Fatal Python error: Segmentation fault\n\n",
    "Fatal Python error: Aborted\n",
)
WORKER = 'Thread 0x01 (most recent call first):\n  File "/a/worker.py", line 1 in work\n\n'


def _thread(*frames: str, title: str = "Thread") -> str:
    """The main thread by `function file:line`, innermost first, below another one."""
    lines = []
    for frame in frames:
        function, _, (place) = frame.partition(" ")
        file, _, line = place.partition(":")
        lines.append(f'  File "{file}", line {line} in {function}')
    return WORKER + "\n".join([f"{title} 0x02 (most recent call first):", *lines, ""])


WAITS = _thread("all_reduce /x/torch/distributed/c10d.py:7", "step /clap/engine.py:3")
READS = _thread("read_batch /clap/loader.py:5", "step /clap/engine.py:3")


class Left:
    """What ranks leave in a run directory and in a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.run, self.job = folder / "run", folder / "job"
        (self.run / "stacks").mkdir(parents=True)

    def stacks(self, rank: int, text: str = "", step: int = 7, at: float = 0.0) -> None:
        path = self.run / "stacks" / f"rank{rank}.txt"
        doing = STILL if text.startswith("Timeout") else STEPPING
        path.write_text(
            json.dumps({"rank": rank, "host": HOSTS[rank], "pid": 9, "doing": doing, "step": step}) + f"  \n{text}"
        )
        os.utime(path, (BEGUN + at, BEGUN + at))

    def word(self, rank: int, kind: str, message: str = "it broke", at: float = 0.0, **more: Any) -> None:
        folder = (self.job if more.pop("before", False) else self.run) / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        extra = {"timestamp": f"{BEGUN + at:.3f}", "rank": rank, "host": HOSTS[rank], "kind": kind, **more}
        content = {"message": {"message": message, "extraInfo": extra}}
        (folder / f"rank{rank}.json").write_text(json.dumps(content))

    def verdict(self, hosts: list[str] | None = None) -> Verdict:
        found = judge(self.run, self.job, HOSTS if hosts is None else hosts)
        assert found is not None
        return found


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_nothing_left_is_no_verdict(left: Left) -> None:
    assert judge(left.run, left.job, HOSTS) is None
    assert judge(None, None, []) is None
    left.stacks(0)  # a run that is under way
    assert judge(left.run, None, []) is None


# --- a run that stands still


HOLDS = "in all_reduce (c10d.py:7)"
LOADS = "in read_batch (loader.py:5)"


@pytest.mark.parametrize(
    ("texts", "steps", "found", "message"),
    [
        (
            [WAITS, None, WAITS, WAITS], [7] * 4, [1],
            f"rank 1 on n1 gives no answer: it is stopped or gone; the other 3 {HOLDS}",
        ),
        ([WAITS, WAITS, READS, WAITS], [7] * 4, [2], f"rank 2 on n2 {LOADS}; the other 3 {HOLDS}"),
        (
            [WAITS, READS, READS, WAITS], [7] * 4, [1, 2],
            f"rank 1 on n1 {LOADS}; rank 2 on n2 {LOADS}; the other 2 {HOLDS}",
        ),
        ([WAITS, WAITS, WAITS, WAITS], [7, 7, 7, 6], [3], f"rank 3 on n2 {HOLDS}; the other 3 {HOLDS}"),
        (
            [WAITS, WAITS, WAITS.replace("all_reduce", "barrier"), WAITS], [7] * 4, [2],
            f"rank 2 on n2 in barrier (c10d.py:7); the other 3 {HOLDS}",
        ),
        ([WAITS, WAITS, WAITS, WAITS], [7] * 4, [], f"all 4 {HOLDS}"),
        ([WAITS, WAITS.replace("all_reduce", "barrier")], [7] * 2, [], f"1 of all 2 {HOLDS}"),  # neither is most
        ([READS], [7], [0], f"rank 0 on n1 {LOADS}"),
    ],
    ids=["stopped", "reads", "two read", "behind", "elsewhere", "alike", "halves", "alone"],
)  # fmt: skip
def test_who_holds_the_others_up(
    left: Left, texts: list[str | None], steps: list[int], found: list[int], message: str
) -> None:
    for rank, (text, step) in enumerate(zip(texts, steps, strict=True)):
        left.stacks(rank, "" if text is None else TIMEOUT + text, step)
    assert left.verdict() == Verdict(
        f"no step for 60 s: {message}", "stall", found, list(dict.fromkeys(HOSTS[rank] for rank in found))
    )


def test_what_follows_from_a_stall_is_not_its_cause_and_what_came_before_is(left: Left) -> None:
    for rank in (0, 1, 3):
        left.stacks(rank, TIMEOUT + WAITS, at=60)
    left.stacks(2, at=10)
    left.word(2, STOPPED, at=61)
    left.word(3, ERROR, "RuntimeError: the others are gone", at=61)
    assert (left.verdict().kind, left.verdict().hosts) == ("stall", ["n2"])
    left.word(2, ERROR, "KeyError: 'caption'", at=1)
    assert left.verdict() == Verdict("rank 2 on n2: KeyError: 'caption'", ERROR, [2], [])
    left.stacks(2, SEGFAULT + _thread("decode /clap/audio.py:9", title="Current thread"), at=0)
    assert left.verdict().message == "rank 2 on n2: Segmentation fault in decode (audio.py:9)"


def test_what_the_ranks_have_judged_stays(left: Left) -> None:
    """Stopped ranks write stacks, too, when they are woken to be ended."""
    for rank in range(4):
        left.stacks(rank, TIMEOUT + WAITS, at=60)
    left.word(0, STALL, "no step for 60 s: rank 2 on own2 …", at=61, ranks=[2], missing=["own2"])
    left.word(1, ERROR, "RuntimeError: NCCL error", at=0)
    assert left.verdict() == Verdict("no step for 60 s: rank 2 on own2 …", STALL, [2], ["n2"])
    assert left.verdict([]).hosts == ["own2"]


# --- ranks that end


def test_the_earliest_error_counts_and_names_a_host_only_where_it_may_be_its_fault(left: Left) -> None:
    left.word(0, LOST_PEER, "connection closed by peer", at=0)
    left.word(1, ERROR, "ValueError: bad caption", at=2)
    left.word(3, ERROR, "OSError: [Errno 5] Input/output error: '/data/1.tar'", at=1)
    assert left.verdict() == Verdict(
        "rank 3 on n2: OSError: [Errno 5] Input/output error: '/data/1.tar'", ERROR, [3], ["n2"]
    )
    left.word(1, ERROR, "ValueError: bad caption", at=0.5)
    assert left.verdict() == Verdict("rank 1 on n1: ValueError: bad caption", ERROR, [1], [])


@pytest.mark.parametrize(
    ("message", "at_fault"),
    [
        ("RuntimeError: NCCL error: unhandled system error", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: CUDA error: invalid configuration argument", False),
        ("RuntimeError: uncorrectable ECC error encountered", True),
        ("OSError: [Errno 116] Stale file handle", True),
        ("a data worker (process 7) was ended by SIGKILL", True),
        ("ConnectionError: Connection reset by peer", False),
        ("KeyError: 'XidNumber'", False),
    ],
)
def test_which_errors_are_a_hosts(left: Left, message: str, at_fault: bool) -> None:
    left.word(2, ERROR, message)
    assert left.verdict().hosts == (["n2"] if at_fault else [])


@pytest.mark.parametrize("kind", [USER, OUT_OF_MEMORY])
def test_mistakes_and_exhausted_memory_are_nobodys_fault(left: Left, kind: str) -> None:
    left.word(1, kind, "CUDA error: launch failure")
    assert (left.verdict().kind, left.verdict().hosts) == (kind, [])


def test_who_did_not_come_is_named_by_rank_0_and_rank_0_by_the_others(left: Left) -> None:
    left.word(1, UNREACHABLE, "n1: rank 1 can't reach a peer", at=0, before=True)
    assert left.verdict() == Verdict("n1: rank 1 can't reach a peer", UNREACHABLE, [1], ["n1"])
    left.word(0, UNREACHABLE, "rank 3 (n2) didn't connect", at=1, missing=["n2"], before=True)
    assert left.verdict() == Verdict("rank 3 (n2) didn't connect", UNREACHABLE, [0], ["n2"])


@pytest.mark.parametrize("kind", [LOST_PEER, STOPPED])
def test_ranks_that_say_nothing_were_killed(left: Left, kind: str) -> None:
    for rank in range(4):
        left.stacks(rank)
    left.word(0, kind)
    left.word(1, STOPPED)
    gone = "ranks 2, 3 on n2 ended without a word: killed, perhaps for memory, or lost"
    assert left.verdict() == Verdict(gone, "killed", [2, 3], ["n2"])
    left.word(3, kind)
    assert left.verdict([]) == Verdict(gone.replace("ranks 2, 3", "rank 2"), "killed", [2], ["n2"])
    left.word(1, ERROR, "RuntimeError: [gloo] broken in a new way", at=1)
    assert left.verdict().ranks == [2], "what tells of a link tells of its other end"
    left.word(1, ERROR, "KeyError: 3", at=1)
    assert left.verdict().ranks == [1]


def test_ranks_that_ended_in_order_were_not_killed(left: Left) -> None:
    left.word(1, LOST_PEER)
    left.word(2, STOPPED)
    left.stacks(3, ABORTED + _thread("backward /torch/autograd.py:5", title="Current thread"))
    assert left.verdict().message == "rank 3 on n2: Aborted in backward (autograd.py:5)"
    assert left.verdict().hosts == ["n2"]
    left.stacks(0, ABORTED, at=-1)
    assert left.verdict() == Verdict("rank 0 on n1: Aborted", "signal", [0], [])


def test_before_there_is_a_run_the_hosts_tell_who_is_missing(left: Left) -> None:
    for rank in (0, 1, 3):
        left.word(rank, STOPPED, before=True)
    assert judge(None, left.job, HOSTS) == Verdict(
        "rank 2 on n2 ended without a word: killed, perhaps for memory, or lost", "killed", [2], ["n2"]
    )


def test_an_abort_of_all_that_lost_one_is_not_the_cause(left: Left) -> None:
    for rank in (0, 1, 3):
        left.stacks(rank, ABORTED + WAITS)
    left.stacks(2)
    assert (left.verdict().kind, left.verdict().ranks) == ("killed", [2])


def test_a_stopped_run_is_nobodys_fault(left: Left) -> None:
    for rank in range(4):
        left.word(rank, STOPPED, "stopped by SIGTERM", at=rank)
    assert left.verdict() == Verdict("rank 0 on n1: stopped by SIGTERM", STOPPED, [0], [])
    left.word(3, LOST_PEER, "closed by peer", at=9)
    assert left.verdict() == Verdict("rank 3 on n2: closed by peer", LOST_PEER, [3], [])


def test_files_that_are_no_words_are_passed_over(left: Left) -> None:
    left.word(1, ERROR)
    (left.run / "errors" / "rank0.json").write_text('{"message"')
    (left.run / "stacks" / "rank0.txt").write_text("half a li")
    assert left.verdict().ranks == [1]


def test_hosts_have_the_names_that_the_job_has_for_them(left: Left) -> None:
    left.word(1, ERROR, "RuntimeError: NCCL error")
    assert left.verdict(["a", "b"]).hosts == ["b"]
    left.stacks(0)
    left.word(1, LOST_PEER)
    assert left.verdict(["a", "b"]).hosts == ["a"]


def test_any_user_asks_by_one_command(left: Left) -> None:
    def said(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "clap_ds.ranks.verdict", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, (done.stdout + done.stderr).strip()

    left.word(1, ERROR, "KeyError: 3")
    assert said(left.run) == (0, "rank 1 on n1: KeyError: 3")
    assert said(left.job) == (2, f"error: expected a run directory, found {left.job}")
    assert "no rank has left anything" in said(left.run.parent)[1]
