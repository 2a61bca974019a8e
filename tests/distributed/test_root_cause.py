"""The root cause from the files of ranks: those at fault and those only affected."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import ERROR, LOST_PEER, OUT_OF_MEMORY, STALL, STOPPED, UNREACHABLE, USER, RankError
from clap_ds.distributed.root_cause import HUNG, KILLED, SIGNAL, STEPPING, RootCause, find_root_cause

HOSTS = ["n1", "n1", "n2", "n2"]
BEGUN = 1_000_000.0
TIMEOUT, FATAL = "Timeout (0:01:00)!\n", "Fatal Python error: "


def _thread(*frames: str, title: str = "Thread") -> str:
    """Format the main thread's frames (`function file`, innermost first) below another thread's."""
    lines = ['Thread 0x01 (most recent call first):\n  File "/a/worker.py", line 1 in work\n']
    lines += [f"{title} 0x02 (most recent call first):"]
    lines += ['  File "{1}", line 7 in {0}'.format(*frame.split()) for frame in frames]
    return "\n".join([*lines, ""])


WAITS = TIMEOUT + _thread("all_reduce /x/torch/distributed/c10d.py", "step /clap/engine.py")
DECODES = f"{FATAL}Segmentation fault\n\n" + _thread("decode /clap/audio.py", title="Current thread")
GOES_BACK = f"{FATAL}Aborted\n" + _thread("backward /torch/autograd.py", title="Current thread")
GONE = "doesn't respond"


class Left:
    """Writes ranks' files to a run directory and a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.run, self.job = folder / "run", folder / "job"
        (self.run / "stacks").mkdir(parents=True)

    def stacks(self, rank: int, text: str = "", step: int = 7, at: float = 0.0, host: str = "") -> None:
        path, activity = self.run / "stacks" / f"rank{rank}.txt", HUNG if text.startswith("Timeout") else STEPPING
        first = {"rank": rank, "host": host or HOSTS[rank], "pid": 1, "activity": activity, "step": step}
        path.write_text(f"{json.dumps(first)}  \n{text}")
        os.utime(path, (BEGUN + at, BEGUN + at))

    def word(self, rank: int, kind: str, message: str = "it broke", at: float = 0.0, **more: Any) -> None:
        folder = self.run / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        word = RankError(BEGUN + at, rank, HOSTS[rank], kind, message, 1, "", **{"ranks": [], "hosts": [], **more})
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(word)))

    def cause(self, hosts: list[str] | None = None) -> RootCause | None:
        return find_root_cause(self.run, self.job, HOSTS if hosts is None else hosts)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


# Main threads, innermost frame first, of a rank …
GLOO = ("all_reduce /x/torch/distributed/c10d.py", "step /clap/engine.py")
ASKS = ("wait /x/clap_ds/training/signal_handler.py", "step /clap/engine.py")
# … on a GPU whose queue is full behind a hung collective,
FORWARD = ("call /runs/.inductor-0/ab/cabc.py", "__call__ /x/torch/_inductor/output_code.py")
BACKWARD = ("_engine_run_backward /x/torch/autograd/graph.py", "backward /x/torch/_tensor.py")
LAUNCH = ("__call__ /x/triton/backends/nvidia/driver.py", "run /x/triton/runtime/jit.py", "mlp /x/clap_ds/mlp.py")
AT_AN_END = ("synchronize /x/torch/cuda/__init__.py", "synchronize /x/clap_ds/run_records/timers.py")
# … and of one that blocks the others.
WORKER = ("select /py/selectors.py", "wait /py/multiprocessing/connection.py", "get /py/multiprocessing/queues.py")
READS = ("read /x/clap_ds/data/tar_samples.py", "_receive /x/clap_ds/data/webdataset.py")


@pytest.mark.parametrize(
    ("hung", "step", "others", "blamed"),
    [
        ((), 100, [GLOO], [5]),  # stopped: it writes nothing
        (READS, 101, [GLOO], [5]),
        (READS, 101, [GLOO, GLOO, ASKS], [5]),
        (GLOO, 101, [GLOO], []),
        (WORKER, 100, [FORWARD], [5]),
        (WORKER, 100, [AT_AN_END], [5]),
        (READS, 100, [AT_AN_END, FORWARD, FORWARD], [5]),
        # With accumulation, all are in the same step.
        (WORKER, 101, [FORWARD, BACKWARD], [5]),
        (READS, 101, [AT_AN_END, FORWARD, LAUNCH], [5]),
        # A hung kernel looks the same on all.
        (FORWARD, 101, [FORWARD, BACKWARD], []),
    ],
)
def test_who_holds_15_others_on_4_hosts_up(
    left: Left, hung: tuple[str, ...], step: int, others: list[tuple[str, ...]], blamed: list[int]
) -> None:
    for rank in range(16):
        frames = hung if rank == 5 else others[rank % len(others)]
        left.stacks(
            rank, TIMEOUT + _thread(*frames) if frames else "", step if rank == 5 else 101, host=f"n{rank // 4}"
        )
    cause = left.cause([])
    assert cause is not None
    assert (cause.kind, cause.ranks, cause.hosts) == (STALL, blamed, ["n1"] * len(blamed))
    assert cause.message.startswith("no step for 60 s: ")


EIO = "OSError: [Errno 5] Input/output error: '/data/1.tar'"
LATE = "rank 3 (n2) didn't connect"
LOST = "exited without reporting an error"
EVERYONE: dict[int, tuple[Any, ...]] = dict.fromkeys(range(4), ())
STALLED: dict[int, tuple[Any, ...]] = {0: (WAITS, 7, 60), 1: (WAITS, 7, 60), 2: ("", 7, 10), 3: (WAITS, 7, 60)}


@pytest.mark.parametrize(
    ("stacks", "words", "expected"),
    [
        ({0: ()}, {}, None),  # running
        # Errors after a stall are consequences; earlier ones are causes.
        (STALLED, {2: (STOPPED, "", 61), 3: (ERROR, "RuntimeError: the others are gone", 61)}, (STALL, [2], ["n2"], GONE)),
        (STALLED, {2: (ERROR, "KeyError: 'caption'", 1)}, (ERROR, [2], [], "KeyError: 'caption'")),
        ({**STALLED, 2: (DECODES,)}, {2: (ERROR, "x", 1)}, (SIGNAL, [2], ["n2"], "Segmentation fault in decode")),
        # The earliest error counts, and blames a host only if it may be at fault.
        ({}, {0: (LOST_PEER, "closed", 0), 1: (ERROR, "x", 2), 3: (ERROR, EIO, 1)}, (ERROR, [3], ["n2"], EIO)),
        ({}, {1: (ERROR, "ValueError: x", 0.5), 3: (ERROR, EIO, 1)}, (ERROR, [1], [], "ValueError: x")),
        ({}, {1: (USER, "CUDA error: launch failure")}, (USER, [1], [], "CUDA error: launch failure")),
        ({}, {1: (OUT_OF_MEMORY, "CUDA error: x")}, (OUT_OF_MEMORY, [1], [], "CUDA error: x")),
        # A list of missing ranks outweighs a rank that can't reach rank 0.
        ({}, {1: (UNREACHABLE, "can't reach a peer")}, (UNREACHABLE, [1], ["n1"], "can't reach a peer")),
        ({}, {1: (UNREACHABLE, "x", 0), 0: (UNREACHABLE, LATE, 1, ["n2"])}, (UNREACHABLE, [0], ["n2"], LATE)),
        # Silent ranks were killed; a link's error points to its other end.
        (EVERYONE, {0: (LOST_PEER,), 1: (STOPPED,)}, (KILLED, [2, 3], ["n2"], LOST)),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "[gloo] broken in a new way"), 3: (STOPPED,)}, (KILLED, [2], ["n2"], LOST)),
        (EVERYONE, {0: (LOST_PEER,), 1: (ERROR, "KeyError: 3"), 3: (STOPPED,)}, (ERROR, [1], [], "KeyError: 3")),
        ({0: (GOES_BACK,), 1: (GOES_BACK,), 2: (), 3: (GOES_BACK,)}, {}, (KILLED, [2], ["n2"], LOST)),
        # Ranks that end in order remove their file.
        ({3: (GOES_BACK,)}, {1: (LOST_PEER,), 2: (STOPPED,)}, (SIGNAL, [3], [], "Aborted in backward")),
        ({}, {rank: (STOPPED, "by SIGTERM", rank) for rank in range(4)}, (STOPPED, [0], [], "by SIGTERM")),
        ({}, {0: (STOPPED,), 3: (LOST_PEER, "closed", 9)}, (LOST_PEER, [3], [], "closed")),
    ],
)  # fmt: skip
def test_the_first_cause(
    left: Left, stacks: dict[int, tuple[Any, ...]], words: dict[int, tuple[Any, ...]], expected: tuple[Any, ...] | None
) -> None:
    for rank, file in stacks.items():
        left.stacks(rank, *file)
    for rank, (kind, *said) in words.items():
        left.word(rank, kind, *said[:2], **({"hosts": said[2]} if len(said) > 2 else {}))
    found = left.cause()
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.ranks, found.hosts) == expected[:3]
    assert expected[3] in found.message


def test_what_the_ranks_have_judged_stays(left: Left) -> None:
    """Stopped ranks also write stacks when they are woken to be ended."""
    for rank in range(4):
        left.stacks(rank, WAITS, at=60)
    message = "no step for 60 s: rank 2 on own2 …"
    left.word(0, STALL, message, at=61, ranks=[2], hosts=["own2"])
    left.word(1, ERROR, "RuntimeError: NCCL error", at=0)
    assert left.cause() == RootCause(message, STALL, [2], ["own2"])


@pytest.mark.parametrize(
    ("message", "at_fault"),
    [
        ("RuntimeError: NCCL error: unhandled system error", True),
        ("RuntimeError: CUDA error: unspecified launch failure", True),
        ("OSError: [Errno 116] Stale file handle", True),
        ("a data worker (process 7) was ended by SIGKILL", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("KeyError: 'XidNumber'", False),
    ],
)
def test_which_errors_are_a_hosts(left: Left, message: str, at_fault: bool) -> None:
    left.word(2, ERROR, message)
    assert left.cause() == RootCause(f"rank 2 on n2: {message}", ERROR, [2], ["n2"] * at_fault)
