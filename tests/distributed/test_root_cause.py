"""The root cause from the files of ranks: those at fault and those only affected.

Collectives that ranks have started and completed, as torch records them.
"""

import json
import os
import pickle
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.distributed.error_file import (
    ALL_RANKS,
    ERROR,
    HOST,
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    OUT_OF_MEMORY,
    SIGNAL,
    STALL,
    STOPPED,
    UNREACHABLE,
    USER,
    RankError,
)
from clap_ds.distributed.root_cause import dumped_progress, find_root_cause, own_progress
from tests.rank_pool import RankPool

HOSTS = ["n1", "n1", "n2", "n2"]
BEGUN = 1_000_000.0
WAITS = 'Timeout (0:01:00)!\nThread 0x01 (most recent call first):\n  File "/a/worker.py", line 1 in work\n'
CANT_REACH = (UNREACHABLE, "can't reach rank 0", 0, [], LINK)
CRASHED = "Fatal Python error: Segmentation fault\n\n"
ABORTED = "Fatal Python error: Aborted\n"
GONE = "doesn't respond"
Counts = dict[str, tuple[int, int]]


class Left:
    """Writes ranks' files to a run directory and a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.job = folder / "job"
        (self.run / "stacks").mkdir(parents=True)

    def stacks(
        self,
        rank: int,
        text: str = "",
        step: int = 7,
        at: float = 0.0,
        host: str = "",
        counts: Counts | None = None,
    ) -> None:
        path = self.run / "stacks" / f"rank{rank}.txt"
        first = {
            "rank": rank,
            "host": host or HOSTS[rank],
            "activity": "data",
            "step": step,
            "limit_s": 60.0,
        }
        hung_at = BEGUN + at if counts is not None else None
        path.write_text(
            f"{json.dumps({**first, 'hung_at': hung_at, 'collectives': counts or {}})}  \n{text}"
        )
        os.utime(path, (BEGUN + at, BEGUN + at))

    def word(
        self, rank: int, kind: str, message: str = "it broke", at: float = 0.0, **more: Any
    ) -> None:
        folder = self.run / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        word = RankError(
            BEGUN + at,
            rank,
            HOSTS[rank],
            kind,
            message,
            1,
            "",
            **{"ranks": [], "hosts": [], **more},
        )
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(word)))

    def cause(self) -> RankError:
        cause = find_root_cause(self.run, self.job)
        assert cause is not None
        return cause


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


# Started and completed collectives of a rank …
WAITING = {"nccl 0": (41, 40), "gloo 1": (9, 9)}
IDLE = {"nccl 0": (40, 40), "gloo 1": (9, 9)}
AHEAD = {"nccl 0": (41, 40), "gloo 1": (10, 10)}  # its host went on to the next step
ON_CPU = {"gloo 0": (41, 40), "gloo 1": (9, 8)}
BEHIND_ON_CPU = {"gloo 0": (40, 40), "gloo 1": (9, 8)}
GATHERS = {"gloo 0": (40, 39)}  # from the others, which went on
# … whose main thread holds Python's lock, such as in a launch on a full GPU queue,
LOCKED: Counts = {}
STOPPED_RANK = None  # … and of one that writes nothing.


@pytest.mark.parametrize(
    ("rank_5", "others", "blamed"),
    [
        (STOPPED_RANK, [WAITING], True),
        (STOPPED_RANK, [ON_CPU], True),
        # Its host hangs, in a data worker or a file: the same with accumulation, where all are in
        # the same step.
        (IDLE, [WAITING], True),
        (IDLE, [WAITING, AHEAD, LOCKED], True),
        (IDLE, [LOCKED], True),
        (BEHIND_ON_CPU, [ON_CPU], True),
        # Its kernel hangs: the hosts are anywhere, but the others' devices wait.
        ({**IDLE, "gloo 1": (10, 9)}, [WAITING, AHEAD], True),
        (LOCKED, [ON_CPU], True),
        # Nothing singles it out.
        (WAITING, [WAITING, AHEAD], False),  # a link
        (AHEAD, [WAITING], False),
        (LOCKED, [WAITING], False),
        (LOCKED, [LOCKED], False),
        (BEHIND_ON_CPU, [ON_CPU, ON_CPU, BEHIND_ON_CPU], False),
        (GATHERS, [ON_CPU, LOCKED], False),  # it waits itself
        (STOPPED_RANK, [WAITING, STOPPED_RANK], False),
    ],
)
def test_who_holds_15_others_on_4_hosts_up(
    left: Left, rank_5: Counts | None, others: list[Counts | None], blamed: bool
) -> None:
    for rank in range(16):
        counts = rank_5 if rank == 5 else others[rank % len(others)]
        left.stacks(
            rank, "" if counts is None else WAITS, 100, host=f"n{rank // 4}", counts=counts or None
        )
    cause = left.cause()
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, [5] * blamed, ["n1"] * blamed)
    assert cause.message.startswith("no step for 60 s: ")


def test_nccls_own_dumps_name_the_rank_whose_kernel_hangs(left: Left) -> None:
    """All hosts hold Python's lock in a launch, so only NCCL's watchdog could write."""
    for rank in range(16):
        left.stacks(rank, WAITS + ABORTED, 100, host=f"n{rank // 4}")
        started = 40 if rank == 5 else 41
        status = {
            "last_enqueued_collective": 44,
            "last_started_collective": started,
            "last_completed_collective": 40,
        }
        (left.run / "stacks" / f"nccl_rank{rank}").write_bytes(
            pickle.dumps({"pg_status": {"0": status}})
        )
    cause = left.cause()
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, [5], ["n1"])


EIO = "OSError: [Errno 5] Input/output error: '/data/1.tar'"
LATE = "rank 3 (n2) didn't connect"
LOST = "exited without reporting an error"
EVERYONE: dict[int, tuple[Any, ...]] = dict.fromkeys(range(4), ())
STALLED: dict[int, tuple[Any, ...]] = {
    0: (WAITS, 7, 60),
    1: (WAITS, 7, 60),
    2: ("", 7, 10),
    3: (WAITS, 7, 60),
}


@pytest.mark.parametrize(
    ("stacks", "words", "expected"),
    [
        # Errors after a stall are consequences; earlier ones are causes.
        (STALLED, {2: (STOPPED, "", 61), 3: (ERROR, "RuntimeError: the others are gone", 61)}, (STALL, [2], ["n2"], GONE)),
        (STALLED, {2: (ERROR, "KeyError: 'caption'", 1)}, (ERROR, [2], [], "KeyError: 'caption'")),
        ({**STALLED, 2: (CRASHED,)}, {2: (ERROR, "x", 1)}, (SIGNAL, [2], ["n2"], "Segmentation fault")),
        # The earliest error counts, and blames a host only if it may be at fault.
        ({}, {0: (LOST_PEER, "", 0), 1: (ERROR, "x", 2), 3: (ERROR, EIO, 1, [], HOST)}, (ERROR, [3], ["n2"], EIO)),
        ({}, {1: (ERROR, "ValueError: x", 0.5), 3: (ERROR, EIO, 1)}, (ERROR, [1], [], "ValueError: x")),
        ({}, {1: (USER, "no GPU")}, (USER, [1], [], "rank 1 on n1: no GPU")),
        ({}, {1: (OUT_OF_MEMORY, "CUDA error: x")}, (OUT_OF_MEMORY, [1], [], "CUDA error: x")),
        # A list of missing ranks outweighs a rank that can't reach rank 0.
        ({}, {1: CANT_REACH}, (UNREACHABLE, [], [], "can't reach rank 0")),
        ({}, {1: CANT_REACH, 0: (UNREACHABLE, LATE, 1, ["n2"])}, (UNREACHABLE, [], ["n2"], LATE)),
        # Silent ranks were killed; a link's error points to its other end.
        (EVERYONE, {0: (LOST_PEER,), 1: (STOPPED,)}, (KILLED, [2, 3], ["n2"], LOST)),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "NCCL error", 0, [], LINK), 3: (STOPPED,)}, (KILLED, [2], ["n2"], LOST)),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "KeyError: 3"), 3: (STOPPED,)}, (ERROR, [1], [], "KeyError: 3")),
        ({0: (ABORTED,), 1: (ABORTED,), 2: (), 3: (ABORTED,)}, {}, (KILLED, [2], ["n2"], LOST)),
        # Ranks that end in order remove their file.
        ({3: (ABORTED,)}, {1: (LOST_PEER,), 2: (STOPPED,)}, (SIGNAL, [3], [], "Aborted")),
        ({}, {rank: (STOPPED, "by SIGTERM", rank) for rank in range(4)}, (STOPPED, [0], [], "by SIGTERM")),
        ({}, {0: (LOST_PEER, "closed", 1), 3: (STOPPED, "", 2)}, (LOST_PEER, [0], [], "closed")),
        ({}, {0: (LOST_PEER, "closed", 9), 3: (STOPPED, "by SIGTERM", 8)}, (STOPPED, [3], [], "by SIGTERM")),
    ],
)  # fmt: skip
def test_the_first_cause(
    left: Left,
    stacks: dict[int, tuple[Any, ...]],
    words: dict[int, tuple[Any, ...]],
    expected: tuple[Any, ...],
) -> None:
    for rank, file in stacks.items():
        left.stacks(rank, *file)
    for rank, (kind, *said) in words.items():
        left.word(rank, kind, *said[:2], **dict(zip(("hosts", "fault"), said[2:], strict=False)))
    found = left.cause()
    assert (found.kind, found.ranks, found.hosts) == expected[:3]
    assert expected[3] in found.message


def test_what_the_ranks_have_judged_stays(left: Left) -> None:
    """Stopped ranks also write stacks when they are woken to be ended."""
    left.stacks(0)
    assert find_root_cause(left.run, left.job) is None  # running
    for rank in range(4):
        left.stacks(rank, WAITS, at=60)
    message = "no step for 60 s: rank 2 on own2 …"
    left.word(0, STALL, message, at=61, ranks=[2], hosts=["own2"])
    left.word(1, ERROR, "RuntimeError: NCCL error", at=0)
    cause = left.cause()
    assert (cause.message, cause.kind, cause.ranks, cause.hosts) == (message, STALL, [2], ["own2"])


SILENT = "exited without reporting an error"
SEGV = RankError(0, 2, "n2", KILLED, "n2: task 2: Segmentation fault", hosts=["n2"], fault=KILLED)
CANCELLED = RankError(0, 0, "n1", STOPPED, "n1: task 0: Terminated", hosts=["n1"])
NO_PYTHON = RankError(
    0, 2, "n2", KILLED, "n2: task 2: Exited with exit code 2", hosts=["n2"], fault=IMPORT
)
NOWHERE = RankError(
    0, 2, "n2", KILLED, "n2: task 2: Exited with exit code 2", hosts=["n2", "n1"], fault=IMPORT
)


@pytest.mark.parametrize(
    ("words", "launcher_error", "hosts", "message"),
    [
        ({0: STOPPED, 1: STOPPED, 3: STOPPED}, None, ["n2"], f"rank 2 on n2 {SILENT}"),
        (
            {0: STOPPED},
            SEGV,
            ["n2"],
            "Segmentation fault",
        ),  # the others were ended before they could write
        ({0: STOPPED}, None, [], "it broke"),  # which of them was first is unknown
        ({}, NO_PYTHON, ["n2"], "Exited with exit code 2"),
        ({}, NOWHERE, [], "Exited with exit code 2"),
        ({0: STOPPED, 1: STOPPED}, CANCELLED, [], "it broke"),
        (
            {0: STOPPED, 1: ERROR, 3: STOPPED},
            SEGV,
            [],
            "rank 1 on n1: it broke",
        ),  # an error of its own
        (dict.fromkeys(range(4), STOPPED), None, [], "rank 0 on n1: it broke"),
    ],
)
def test_rank_without_a_file_is_the_cause_if_others_were_stopped(
    left: Left,
    words: dict[int, str],
    launcher_error: RankError | None,
    hosts: list[str],
    message: str,
) -> None:
    for rank, kind in words.items():
        left.word(rank, kind)
    cause = find_root_cause(None, left.run, HOSTS, launcher_error)
    assert cause is not None
    assert message in cause.message
    assert (cause.hosts if cause.kind != STOPPED else []) == hosts


def test_hosts_may_have_other_names_than_in_slurm(left: Left) -> None:
    left.word(0, STOPPED)
    cause = find_root_cause(left.run, left.job, ["n1.cluster"])
    assert cause is not None
    assert cause.kind == STOPPED


@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "named", "hosts"),
    [
        (ERROR, ALL_RANKS, [3], False, []),  # NaN
        (USER, "", [0, 3], False, []),
        (USER, "", [3], True, []),
        (ERROR, "", range(4), False, []),
        (ERROR, "", [2, 3], True, []),
        (ERROR, HOST, [2, 3], True, ["n2"]),
        (ERROR, HOST, range(4), False, []),
        (ERROR, IMPORT, [2, 3], True, ["n2"]),
        (ERROR, KILLED, [3], True, ["n2"]),
    ],
)
def test_what_all_ranks_say_names_none(
    left: Left, kind: str, fault: str, ranks: list[int], named: bool, hosts: list[str]
) -> None:
    for rank in ranks:
        left.word(rank, kind, fault=fault)
    cause = find_root_cause(left.run, left.job, HOSTS)
    assert cause is not None
    assert ("rank " in cause.message, cause.hosts) == (named, hosts)


def _start_alone() -> tuple[int, int]:
    """Return the default group's counts while only rank 0 has started a collective."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
    time.sleep(0.5)
    found = own_progress()["gloo 0"]
    store.set(f"counted {dist.get_rank()}", "")
    store.get(f"counted {1 - dist.get_rank()}")
    if work is None:
        dist.all_reduce(torch.ones(1))
    else:
        work.wait()
    return found


def test_a_rank_that_waits_has_started_more_than_it_completed(two_ranks: RankPool) -> None:
    waiting, behind = two_ranks.run(_start_alone)
    assert (waiting, behind) == ((waiting[0], waiting[0] - 1), (waiting[0] - 1, waiting[0] - 1))


def _sleep_before_a_collective() -> list[tuple[int, int]]:
    ones = torch.ones(1, device="cuda")
    found = []
    for cycles in (0, 3_000_000_000):
        torch.cuda._sleep(cycles)
        dist.all_reduce(ones)
        if not cycles:
            torch.cuda.synchronize()
        time.sleep(0.5)  # torch's watchdog looks every 0.1 s
        found.append(own_progress()["nccl 0"])
    return found


@pytest.mark.gpu
def test_a_collective_behind_a_slow_kernel_has_not_started(one_gpu: RankPool) -> None:
    ((before, queued),) = one_gpu.run(_sleep_before_a_collective)
    assert before[0] == before[1] > 0
    assert queued == before


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


def test_dumps_are_read_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = {
        "last_enqueued_collective": 44,
        "last_started_collective": -1,
        "last_completed_collective": 40,
    }
    (tmp_path / "nccl_rank3").write_bytes(pickle.dumps({"pg_status": {"0": status}}))
    (tmp_path / "nccl_rank4").write_bytes(pickle.dumps({"pg_status": _Harmful()}))
    assert [dumped_progress(tmp_path, rank) for rank in (3, 4, 5)] == [{"nccl 0": (40, 40)}, {}, {}]
    assert not (tmp_path / "harm").exists()
