"""How an attempt ended, by what ranks and SLURM left: two hosts of two ranks."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.attempt import Ending, ending_of

RANKS = ["n1", "n1", "n2", "n2"]
SAVED = {"checkpoints": [{"saved": True}], "step": 9}


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., Ending]:
    """`ending_of` an attempt with a run of this summary (None: no run) and errors by rank, in the order they came."""

    def ended(
        code: int, summary: dict[str, Any] | None, errors: dict[int, tuple[str, str]] | None = None, **more: Any
    ) -> Ending:
        folder = tmp_path / "attempt"
        (folder / "errors").mkdir(parents=True)
        if summary is not None:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
            (folder / "run_directory").write_text(f"{tmp_path / 'run'}\n")
        for order, (rank, (kind, text)) in enumerate((errors or {}).items()):
            info = {
                "timestamp": str(1e9 + order),
                "host": RANKS[rank],
                "rank": rank,
                "kind": kind,
                "code": 1,
                "py_callstack": "",
            }
            file = folder / "errors" / f"rank{rank}.json"
            file.write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))
        given = {"stopped": None, "lost": {}, "step": None, **more}
        return ending_of(code, folder, RANKS, given["stopped"], given["lost"], given["step"])

    return ended


@pytest.mark.parametrize(
    ("code", "summary", "more", "state", "exit_code"),
    [
        (0, {"state": "completed"}, {}, "completed", 0),
        (0, None, {}, "completed", 0),  # a command without a run directory has only its code
        (0, {"state": "running"}, {}, "failed", 1),
        (1, {"state": "completed"}, {}, "failed", 1),
        (1, {"state": "timeout", **SAVED}, {}, "timeout", 0),
        (138, {"state": "timeout"}, {}, "timeout", 138),
        (138, {"state": "running"}, {}, "timeout", 138),  # signalled while it was starting
        (143, {"state": "terminated"}, {"stopped": signal.SIGTERM}, "terminated", 143),
        (1, {"state": "terminated", **SAVED}, {"stopped": signal.SIGUSR1}, "timeout", 0),  # pdsh's ranks get SIGTERM
        (137, {"state": "running"}, {"step": "OUT_OF_MEMORY"}, "failed", 137),
        (143, {"state": "running"}, {"step": "CANCELLED"}, "terminated", 143),
        (1, {"state": "out_of_memory", "error": "x"}, {}, "out_of_memory", 1),
    ],
)
def test_state_and_code(ended: Any, code: int, summary: Any, more: Any, state: str, exit_code: int) -> None:
    ending = ended(code, summary, **more)
    assert (ending.state, ending.code, ending.hosts) == (state, exit_code, [])
    assert bool(ending.message) == (state != "completed")
    if more.get("step") == "OUT_OF_MEMORY":
        assert ending.message == "a host's memory, not the GPU's, was exhausted, says SLURM"


def test_lost_host_comes_before_what_the_others_say(ended: Any) -> None:
    ending = ended(137, {"state": "running"}, {0: ("lost_peer", "closed by peer")}, lost={"n2": "down*"})
    assert (ending.message, ending.hosts, ending.lost) == ("lost n2: down*", ["n2"], True)


def test_first_cause_counts(ended: Any) -> None:
    errors = {
        0: ("lost_peer", "closed by peer"),
        2: ("stopped", "stopped by SIGTERM"),
        3: ("error", "NCCL error: unhandled"),
        1: ("error", "KeyError: 'x'"),
    }
    ending = ended(1, {"state": "failed", "error": "rank 0: closed by peer"}, errors)
    assert (ending.state, ending.hosts) == ("failed", ["n2"])
    assert "NCCL error" in ending.message


@pytest.mark.parametrize(
    ("errors", "is_unclear"),
    [
        ({}, True),
        (dict.fromkeys(range(4), ("lost_peer", "closed by peer")), True),
        ({0: ("error", "KeyError: 'x'")}, False),
        ({0: ("user", "no such field")}, False),
        ({0: ("unreachable", "rank 3 didn't connect")}, True),
    ],
)
def test_hosts_are_asked_after_where_no_rank_knows_the_cause(ended: Any, errors: Any, is_unclear: bool) -> None:
    assert ended(1, {"state": "failed"}, errors).is_unclear == is_unclear


def test_mistake_of_the_users_is_nobodys_host(ended: Any) -> None:
    ending = ended(2, None, {0: ("user", "clap.bench.windws: no such field")})
    assert (ending.state, ending.code, ending.hosts) == ("failed", 2, [])
    assert "windws" in ending.message
