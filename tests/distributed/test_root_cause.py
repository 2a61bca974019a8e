"""The root cause from the files of ranks, those at fault and those only affected, and from the
collectives that torch records."""

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import (
    ALL_RANKS,
    ERROR,
    HOST,
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    SIGNAL,
    STALL,
    STOPPED,
    UNREACHABLE,
    USER,
    RankError,
)
from clap_ds.distributed.root_cause import (
    find_root_cause,
    read_dumped_progress,
)

HOSTS = ["n1", "n1", "n2", "n2"]  # of each rank
STARTED_AT = 1_000_000.0
TIMEOUT = 'Timeout (0:01:00)!\nThread 0x01 (most recent call first):\n  File "/a/worker.py", line 1 in work\n'
CRASHED = "Fatal Python error: Segmentation fault\n\n"
ABORTED = "Fatal Python error: Aborted\n"
KILLED_TEXT = "exited without reporting an error"
Counts = dict[str, tuple[int, int]]


class RankFiles:
    """Writes ranks' files to a run directory, as ranks on `HOSTS` would."""

    def __init__(self, folder: Path) -> None:
        self.run = folder
        (folder / "stacks").mkdir()
        (folder / "errors").mkdir()

    def write_progress(
        self,
        rank: int,
        stacks: str = "",
        at: float = 0.0,
        host: str = "",
        counts: Counts | None = None,
    ) -> None:
        path = self.run / "stacks" / f"rank{rank}.txt"
        header = {
            "rank": rank,
            "host": host or HOSTS[rank],
            "activity": "data",
            "step": 7,
            "limit_s": 60.0,
            "hung_at": None if counts is None else STARTED_AT + at,
            "collectives": counts or {},
        }
        path.write_text(f"{json.dumps(header)}  \n{stacks}")
        os.utime(path, (STARTED_AT + at, STARTED_AT + at))

    def write_error(
        self, rank: int, kind: str, message: str = "it broke", at: float = 0.0, **fields: Any
    ) -> None:
        error = RankError(STARTED_AT + at, rank, HOSTS[rank], kind, message, **fields)
        (self.run / "errors" / f"rank{rank}.json").write_text(json.dumps(asdict(error)))

    def cause(self, hosts: list[str] | None = None, launcher: RankError | None = None) -> RankError:
        cause = find_root_cause(self.run, None, hosts or [], launcher)
        assert cause is not None
        return cause


@pytest.fixture
def files(tmp_path: Path) -> RankFiles:
    return RankFiles(tmp_path)


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
    ("rank_5", "peers", "is_blamed"),
    [
        (STOPPED_RANK, [WAITING], True),
        # Its host hangs, in a data worker or a file: the same with accumulation, where all are in
        # the same step.
        (IDLE, [WAITING, AHEAD, LOCKED], True),
        (IDLE, [LOCKED], True),
        (BEHIND_ON_CPU, [ON_CPU], True),
        (LOCKED, [ON_CPU], True),
        # Nothing singles it out.
        (AHEAD, [WAITING], False),
        (LOCKED, [WAITING], False),
        (GATHERS, [ON_CPU, LOCKED], False),  # it waits itself
        (STOPPED_RANK, [WAITING, STOPPED_RANK], False),
    ],
)
def test_rank_that_blocks_15_on_4_hosts_is_named(files, rank_5, peers, is_blamed):
    for rank in range(16):
        counts = rank_5 if rank == 5 else peers[rank % len(peers)]
        stacks = "" if counts is None else TIMEOUT
        files.write_progress(rank, stacks, 100, f"n{rank // 4}", counts or None)
    cause = files.cause()
    assert cause.message.startswith("no step for 60 s: ")
    assert (cause.kind, cause.ranks) == (STALL, [5] if is_blamed else [])
    assert cause.hosts == (["n1"] if is_blamed else [])


def test_rank_that_no_longer_updates_its_file_is_named(files):
    """On a slow network, ranks wait in different collectives, and one took its last step too late to
    count as hung."""
    files.write_progress(0, TIMEOUT, 60, "n0", {"gloo 0": (131, 131), "gloo 1": (40, 39)})
    files.write_progress(1, TIMEOUT, 60, "n0", {"gloo 0": (132, 131), "gloo 1": (40, 40)})
    files.write_progress(2, "", 58, "n1", None)
    files.write_progress(3, "", -2, "n1", None)
    cause = files.cause()
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, [3], ["n1"])


def test_rank_whose_kernel_hangs_is_named_by_nccls_own_dumps(files):
    """All hosts hold Python's lock in a launch, so only NCCL's watchdog could write."""
    for rank in range(16):
        files.write_progress(rank, TIMEOUT + ABORTED, 100, f"n{rank // 4}")
        _write_dump(files.run / "stacks", rank, started=40 if rank == 5 else 41)
    cause = files.cause()
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, [5], ["n1"])


def _write_dump(folder: Path, rank: int, started: int) -> None:
    status = {
        "last_enqueued_collective": 44,
        "last_started_collective": started,
        "last_completed_collective": 40,
    }
    (folder / f"nccl_rank{rank}").write_bytes(pickle.dumps({"pg_status": {"0": status}}))


EIO = "OSError: [Errno 5] Input/output error: '/data/1.tar'"
CANT_REACH = (UNREACHABLE, "can't reach rank 0", 0, [], LINK)
LATE = "rank 3 (n2) didn't connect"
EVERY_RANK: dict[int, tuple[Any, ...]] = dict.fromkeys(range(4), ())
STALLED: dict[int, tuple[Any, ...]] = {**dict.fromkeys(range(4), (TIMEOUT, 60)), 2: ("", 10)}


@pytest.mark.parametrize(
    ("progress", "errors", "expected"),
    [
        # Errors after a stall are consequences; earlier ones are causes.
        (STALLED, {2: (STOPPED, "", 61), 3: (ERROR, "RuntimeError: peers", 61)}, (STALL, [2], ["n2"], "doesn't respond")),
        (STALLED, {2: (ERROR, "KeyError: 'caption'", 1)}, (ERROR, [2], [], "KeyError: 'caption'")),
        ({**STALLED, 2: (CRASHED,)}, {2: (ERROR, "x", 1)}, (SIGNAL, [2], ["n2"], "Segmentation fault")),
        # The earliest error counts, and blames a host only if it may be at fault.
        ({}, {0: (LOST_PEER, "", 0), 1: (ERROR, "x", 2), 3: (ERROR, EIO, 1, [], HOST)}, (ERROR, [3], ["n2"], EIO)),
        # A list of missing ranks outweighs a rank that can't reach rank 0.
        ({}, {1: CANT_REACH, 0: (UNREACHABLE, LATE, 1, ["n2"])}, (UNREACHABLE, [], ["n2"], LATE)),
        # Silent ranks were killed; a link's error points to its other end.
        (EVERY_RANK, {0: (LOST_PEER,), 1: (STOPPED,)}, (KILLED, [2, 3], ["n2"], KILLED_TEXT)),
        (EVERY_RANK, {1: (ERROR, "NCCL error", 0, [], LINK), 0: (STOPPED,), 3: (STOPPED,)}, (KILLED, [2], ["n2"], KILLED_TEXT)),
        # Ranks that end in order remove their file.
        ({3: (ABORTED,)}, {1: (LOST_PEER,), 2: (STOPPED,)}, (SIGNAL, [3], [], "Aborted")),
    ],
)  # fmt: skip
def test_first_cause_is_not_a_consequence(files, progress, errors, expected):
    for rank, arguments in progress.items():
        files.write_progress(rank, *arguments)
    for rank, (kind, *arguments) in errors.items():
        blamed = dict(zip(("hosts", "fault"), arguments[2:], strict=False))
        files.write_error(rank, kind, *arguments[:2], **blamed)
    cause = files.cause()
    *fields, text = expected
    assert [cause.kind, cause.ranks, cause.hosts] == fields
    assert text in cause.message


def test_verdict_of_the_ranks_stays(files):
    """Stopped ranks also write stacks when they are woken to be ended."""
    for rank in range(4):
        files.write_progress(rank, TIMEOUT, at=60)
    files.write_error(0, STALL, at=61, ranks=[2], hosts=["own2"])
    files.write_error(1, ERROR, "RuntimeError: NCCL error", at=0)
    cause = files.cause()
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, [2], ["own2"])


def _launcher_error(kind: str, end: str, fault: str, *hosts: str) -> RankError:
    return RankError(0, 2, hosts[0], kind, f"{hosts[0]}: {end}", hosts=[*hosts], fault=fault)


SEGV = _launcher_error(KILLED, "Segmentation fault", KILLED, "n2")
CANCELLED = _launcher_error(STOPPED, "Terminated", "", "n1")
NO_PYTHON_ANYWHERE = _launcher_error(KILLED, "Exited with exit code 2", IMPORT, "n2", "n1")


@pytest.mark.parametrize(
    ("errors", "launcher", "hosts", "message"),
    [
        ({0: STOPPED, 1: STOPPED, 3: STOPPED}, None, ["n2"], f"rank 2 on n2 {KILLED_TEXT}"),
        # The others were ended before they could write.
        ({0: STOPPED}, SEGV, ["n2"], "Segmentation fault"),
        ({0: STOPPED}, None, [], "it broke"),
        ({}, NO_PYTHON_ANYWHERE, [], "Exited with exit code 2"),
        ({0: STOPPED, 1: STOPPED}, CANCELLED, [], "it broke"),
        ({0: STOPPED, 1: ERROR, 3: STOPPED}, SEGV, [], "rank 1 on n1: it broke"),
    ],
)
def test_rank_without_a_file_is_the_cause_if_others_were_stopped(
    files, errors, launcher, hosts, message
):
    for rank, kind in errors.items():
        files.write_error(rank, kind)
    cause = files.cause(HOSTS, launcher)
    assert message in cause.message
    assert (cause.hosts if cause.kind != STOPPED else []) == hosts


@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "is_named", "hosts"),
    [
        (ERROR, ALL_RANKS, [3], False, []),  # NaN
        (USER, "", [0, 3], False, []),
        (USER, "", [3], True, []),
        (ERROR, HOST, [2, 3], True, ["n2"]),
        (ERROR, HOST, range(4), False, []),
    ],
)
def test_error_of_all_ranks_names_none(files, kind, fault, ranks, is_named, hosts):
    for rank in ranks:
        files.write_error(rank, kind, fault=fault)
    cause = files.cause(HOSTS)
    assert ("rank " in cause.message, cause.hosts) == (is_named, hosts)


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


def test_dump_is_read_without_running_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write_dump(tmp_path, 3, started=-1)
    (tmp_path / "nccl_rank4").write_bytes(pickle.dumps({"pg_status": _Harmful()}))
    assert read_dumped_progress(tmp_path, 3) == {"nccl 0": (40, 40)}
    assert read_dumped_progress(tmp_path, 4) == {}
    assert not (tmp_path / "harm").exists()
