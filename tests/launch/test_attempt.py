"""Outcomes of attempts on two hosts with two ranks each, from error files and SLURM's answers."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed import error_file
from clap_ds.launch.attempt import AttemptOutcome, outcome_of

RANKS = ["n1", "n1", "n2", "n2"]
GONE, STOPPED = ("lost_peer", "closed by peer"), ("stopped", "stopped by SIGTERM")
SAVED = {"checkpoints": [{"saved": True}], "step": 9}


Ended = Callable[..., AttemptOutcome]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Call `outcome_of` for a run with this summary (None: no run) and errors by rank, in order of time."""

    def ended(
        code: int, summary: dict[str, Any] | None, errors: dict[int, tuple[str, str]] | None = None, *,
        stopped: signal.Signals | None = None, lost: dict[str, str] | None = None,
    ) -> AttemptOutcome:  # fmt: skip
        if summary is not None:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
            (tmp_path / "run_directory").write_text(f"{tmp_path / 'run'}\n")
        monkeypatch.setattr(error_file.this_rank, "folder", None)
        for rank, (kind, text) in (errors or {}).items():
            error_file.set_error_dir(tmp_path, rank, RANKS[rank])
            error_file.write_error_file(kind, text, 1)
            time.sleep(0.002)
        return outcome_of(code, tmp_path, RANKS, stopped, lost or {})

    return ended


@pytest.mark.parametrize(
    ("code", "summary", "more", "state", "exit_code"),
    [
        (0, {"state": "completed"}, {}, "completed", 0),
        (1, {"state": "completed"}, {}, "failed", 1),
        (1, {"state": "timeout", **SAVED}, {}, "timeout", 0),
        (138, {"state": "running"}, {}, "timeout", 138),  # signaled during start-up
        (143, {"state": "terminated"}, {"stopped": signal.SIGTERM}, "terminated", 143),
        (1, {"state": "terminated", **SAVED}, {"stopped": signal.SIGUSR1}, "timeout", 0),  # it was requested
        (137, {"state": "running"}, {}, "failed", 137),
    ],
)
def test_state_and_code(ended: Ended, code: int, summary: Any, more: Any, state: str, exit_code: int) -> None:
    outcome = ended(code, summary, **more)
    assert (outcome.state, outcome.code, outcome.hosts) == (state, exit_code, [])
    assert bool(outcome.message) == (state != "completed")


def test_lost_host_comes_before_what_the_others_say(ended: Ended) -> None:
    outcome = ended(137, {"state": "running"}, {0: GONE}, lost={"n2": "down*"})
    assert (outcome.message, outcome.hosts) == ("lost n2: down*", ["n2"])


@pytest.mark.parametrize(
    ("code", "errors", "state", "exit_code", "hosts", "is_unclear"),
    [
        (1, {}, "failed", 1, [], True),
        (1, dict.fromkeys(range(4), GONE), "failed", 1, [], True),
        (143, {0: ("error", "KeyError: 'x'")}, "failed", 1, [], False),  # not that of ranks that srun ended
        (143, {0: ("user", "clap.bench.windws: no such field")}, "failed", 2, [], False),
        (1, {1: ("out_of_memory", "out of memory at micro-batch 4")}, "out_of_memory", 1, [], False),
        (137, dict.fromkeys(range(3), GONE), "failed", 137, ["n2"], False),  # rank 3 was killed
        (1, {0: GONE, 2: STOPPED, 3: ("error", "NCCL error"), 1: ("error", "KeyError")}, "failed", 1, ["n2"], False),
    ],
)
def test_what_ranks_said(
    ended: Ended, code: int, errors: Any, state: str, exit_code: int, hosts: list[str], is_unclear: bool
) -> None:
    """The first cause counts; SLURM is asked about hosts only if no rank reported a cause."""
    outcome = ended(code, {"state": "failed", "error": "a consequence" if errors else None}, errors)
    assert (outcome.state, outcome.code, outcome.hosts, outcome.is_unclear) == (state, exit_code, hosts, is_unclear)
