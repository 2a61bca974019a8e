"""The first cause, from files as ranks leave them: who is to blame, and who only suffers."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.ranks.failure import ERROR, LOST_PEER, OUT_OF_MEMORY, STALL, STOPPED, UNREACHABLE, USER, Word
from clap_ds.ranks.verdict import KILLED, SIGNAL, STEPPING, STILL, Verdict, judge

HOSTS = ["n1", "n1", "n2", "n2"]
BEGUN = 1_000_000.0
TIMEOUT, FATAL = "Timeout (0:01:00)!\n", "Fatal Python error: "


def _thread(*frames: str, title: str = "Thread") -> str:
    """The main thread by `function file:line`, innermost first, below another one."""
    lines = ['Thread 0x01 (most recent call first):\n  File "/a/worker.py", line 1 in work\n']
    lines += [f"{title} 0x02 (most recent call first):"]
    for frame in frames:
        function, _, place = frame.partition(" ")
        file, _, line = place.partition(":")
        lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join([*lines, ""])


WAITS = TIMEOUT + _thread("all_reduce /x/torch/distributed/c10d.py:7", "step /clap/engine.py:3")
BARRIER = WAITS.replace("all_reduce", "barrier")
READS = TIMEOUT + _thread("read_batch /clap/loader.py:5", "step /clap/engine.py:3")
DECODES = f"{FATAL}Segmentation fault\n\n" + _thread("decode /clap/audio.py:9", title="Current thread")
GOES_BACK = f"{FATAL}Aborted\n" + _thread("backward /torch/autograd.py:5", title="Current thread")
HOLDS, LOADS = "in all_reduce (c10d.py:7)", "in read_batch (loader.py:5)"
GONE = "gives no answer: it is stopped or gone"


class Left:
    """What ranks leave in a run directory and in a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.run, self.job = folder / "run", folder / "job"
        (self.run / "stacks").mkdir(parents=True)

    def stacks(self, rank: int, text: str = "", step: int = 7, at: float = 0.0) -> None:
        path, doing = self.run / "stacks" / f"rank{rank}.txt", STILL if text.startswith("Timeout") else STEPPING
        first = {"rank": rank, "host": HOSTS[rank], "pid": 9, "doing": doing, "step": step}
        path.write_text(f"{json.dumps(first)}  \n{text}")
        os.utime(path, (BEGUN + at, BEGUN + at))

    def word(self, rank: int, kind: str, message: str = "it broke", at: float = 0.0, **more: Any) -> None:
        folder = (self.job if more.pop("before", False) else self.run) / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        more = {"ranks": [], "hosts": [], **more}
        word = Word(BEGUN + at, rank, HOSTS[rank], kind, message, 1, "", **more)
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(word)))

    def verdict(self, hosts: list[str] | None = None) -> Verdict | None:
        return judge(self.run, self.job, HOSTS if hosts is None else hosts)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


@pytest.mark.parametrize(
    ("texts", "steps", "found", "message"),
    [
        ([WAITS, "", WAITS, WAITS], [7] * 4, [1], f"rank 1 on n1 {GONE}; the other 3 {HOLDS}"),
        ([WAITS, WAITS, READS, WAITS], [7] * 4, [2], f"rank 2 on n2 {LOADS}; the other 3 {HOLDS}"),
        ([WAITS, READS, READS, WAITS], [7] * 4, [1, 2], f"rank 1 on n1 {LOADS}; rank 2 on n2 {LOADS}; the other 2 {HOLDS}"),
        ([WAITS, WAITS, WAITS, WAITS], [7, 7, 7, 6], [3], f"rank 3 on n2 {HOLDS}; the other 3 {HOLDS}"),
        ([WAITS, WAITS, BARRIER, WAITS], [7] * 4, [2], f"rank 2 on n2 in barrier (c10d.py:7); the other 3 {HOLDS}"),
        ([WAITS, WAITS, WAITS, WAITS], [7] * 4, [], f"all 4 {HOLDS}"),
        ([WAITS, BARRIER], [7] * 2, [], f"1 of all 2 {HOLDS}"),  # neither is most
        ([READS], [7], [0], f"rank 0 on n1 {LOADS}"),
    ],
    ids=["stopped", "reads", "two read", "behind", "elsewhere", "alike", "halves", "alone"],
)  # fmt: skip
def test_who_holds_the_others_up(
    left: Left, texts: list[str], steps: list[int], found: list[int], message: str
) -> None:
    for rank, (text, step) in enumerate(zip(texts, steps, strict=True)):
        left.stacks(rank, text, step)
    hosts = list(dict.fromkeys(HOSTS[rank] for rank in found))
    assert left.verdict() == Verdict(f"no step for 60 s: {message}", STALL, found, hosts)


EIO = "OSError: [Errno 5] Input/output error: '/data/1.tar'"
LATE = "rank 3 (n2) didn't connect"
LOST = "ended without a word: killed, perhaps for memory, or lost"
EVERYONE: dict[int, tuple[Any, ...]] = dict.fromkeys(range(4), ())
STALLED: dict[int, tuple[Any, ...]] = {0: (WAITS, 7, 60), 1: (WAITS, 7, 60), 2: ("", 7, 10), 3: (WAITS, 7, 60)}


@pytest.mark.parametrize(
    ("stacks", "words", "expected"),
    [
        ({}, {}, None),
        ({0: ()}, {}, None),  # under way
        # What follows from a stall isn't its cause, and what came before is.
        (STALLED, {2: (STOPPED, "", 61), 3: (ERROR, "RuntimeError: the others are gone", 61)}, (STALL, [2], ["n2"], GONE)),
        (STALLED, {2: (ERROR, "KeyError: 'caption'", 1)}, (ERROR, [2], [], "rank 2 on n2: KeyError: 'caption'")),
        ({**STALLED, 2: (DECODES,)}, {2: (ERROR, "x", 1)}, (SIGNAL, [2], ["n2"], "Segmentation fault in decode (audio.py:9)")),
        # The earliest error counts, and names a host only where it may be its fault.
        ({}, {0: (LOST_PEER, "closed", 0), 1: (ERROR, "x", 2), 3: (ERROR, EIO, 1)}, (ERROR, [3], ["n2"], EIO)),
        ({}, {1: (ERROR, "ValueError: x", 0.5), 3: (ERROR, EIO, 1)}, (ERROR, [1], [], "rank 1 on n1: ValueError: x")),
        ({}, {1: (USER, "CUDA error: launch failure")}, (USER, [1], [], "rank 1 on n1: CUDA error: launch failure")),
        ({}, {1: (OUT_OF_MEMORY, "CUDA error: x")}, (OUT_OF_MEMORY, [1], [], "rank 1 on n1: CUDA error: x")),
        # Who knows who didn't come, knows more than who misses rank 0.
        ({}, {1: (UNREACHABLE, "can't reach a peer")}, (UNREACHABLE, [1], ["n1"], "can't reach a peer")),
        ({}, {1: (UNREACHABLE, "x", 0), 0: (UNREACHABLE, LATE, 1, ["n2"])}, (UNREACHABLE, [0], ["n2"], LATE)),
        # Ranks that say nothing were killed; what tells of a link tells of its other end.
        (EVERYONE, {0: (LOST_PEER,), 1: (STOPPED,)}, (KILLED, [2, 3], ["n2"], f"ranks 2, 3 on n2 {LOST}")),
        (EVERYONE, {0: (STOPPED,), 1: (STOPPED,), 3: (STOPPED,)}, (KILLED, [2], ["n2"], f"rank 2 on n2 {LOST}")),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "[gloo] broken in a new way"), 3: (STOPPED,)}, (KILLED, [2], ["n2"], LOST)),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "KeyError: 3"), 3: (STOPPED,)}, (ERROR, [1], [], "KeyError: 3")),
        ({0: (GOES_BACK,), 1: (GOES_BACK,), 2: (), 3: (GOES_BACK,)}, {}, (KILLED, [2], ["n2"], LOST)),
        # Those that ended in order have taken their file away.
        ({3: (GOES_BACK,)}, {1: (LOST_PEER,), 2: (STOPPED,)}, (SIGNAL, [3], [], "Aborted in backward (autograd.py:5)")),
        ({}, {rank: (STOPPED, "by SIGTERM", rank) for rank in range(4)}, (STOPPED, [0], [], "rank 0 on n1: by SIGTERM")),
        ({}, {0: (STOPPED,), 3: (LOST_PEER, "closed", 9)}, (LOST_PEER, [3], [], "rank 3 on n2: closed")),
    ],
)  # fmt: skip
def test_the_first_cause(
    left: Left, stacks: dict[int, tuple[Any, ...]], words: dict[int, tuple[Any, ...]], expected: tuple[Any, ...] | None
) -> None:
    for rank, file in stacks.items():
        left.stacks(rank, *file)
    for rank, (kind, *said) in words.items():
        left.word(rank, kind, *said[:2], **({"hosts": said[2]} if len(said) > 2 else {}))
    found = left.verdict()
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.ranks, found.hosts) == expected[:3]
    assert expected[3] in found.message


def test_what_the_ranks_have_judged_stays(left: Left) -> None:
    """Stopped ranks write stacks, too, when they are woken to be ended."""
    for rank in range(4):
        left.stacks(rank, WAITS, at=60)
    message = "no step for 60 s: rank 2 on own2 …"
    left.word(0, STALL, message, at=61, ranks=[2], hosts=["own2"])
    left.word(1, ERROR, "RuntimeError: NCCL error", at=0)
    assert left.verdict() == Verdict(message, STALL, [2], ["n2"])
    assert left.verdict([]) == Verdict(message, STALL, [2], ["own2"])


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
def test_which_errors_are_a_hosts_which_has_the_name_that_the_job_has_for_it(
    left: Left, message: str, at_fault: bool
) -> None:
    left.word(2, ERROR, message)
    for hosts in (HOSTS, ["a", "a", "b", "b"]):
        assert left.verdict(hosts) == Verdict(f"rank 2 on {hosts[2]}: {message}", ERROR, [2], [hosts[2]] * at_fault)


def test_before_there_is_a_run_the_hosts_tell_who_is_missing(left: Left) -> None:
    for rank in (0, 1, 3):
        left.word(rank, STOPPED, before=True)
    assert judge(None, left.job, HOSTS) == Verdict(f"rank 2 on n2 {LOST}", KILLED, [2], ["n2"])


def test_any_user_asks_by_one_command_whatever_files_there_are(left: Left) -> None:
    def said(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "clap_ds.ranks.verdict", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, (done.stdout + done.stderr).strip()

    left.word(1, ERROR, "KeyError: 3")
    (left.run / "stacks" / "rank0.txt").write_text("half a li")
    assert said(left.run) == (0, "rank 1 on n1: KeyError: 3")
    assert said(left.job) == (2, f"error: expected a run directory, found {left.job}")
    assert "no rank has left anything" in said(left.run.parent)[1]
