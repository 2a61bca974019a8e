"""Outcomes of attempts on two hosts with two ranks each, from error files and SLURM's answers.

Hosts and causes in the output of srun and slurmstepd.
"""

import json
import os
import signal
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import HOST, IMPORT, RankError
from clap_ds.launch.attempt import AttemptOutcome, LauncherErrors, outcome_of
from clap_ds.launch.supervisor import copy

RANKS = ["n1", "n1", "n2", "n2"]
GONE = ("lost_peer", "closed by peer")
STOPPED = ("stopped", "stopped by SIGTERM")
LACKS = ("error", "ModuleNotFoundError: No module named 'soundfile'", IMPORT)
SAVED = {"checkpoints": [{"saved": True}], "step": 9}


Ended = Callable[..., AttemptOutcome]


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    """Call `outcome_of` for a run with this summary (None: no run) and errors by rank, in order of
    time."""

    def ended(
        code: int, summary: dict[str, Any] | None, errors: dict[int, tuple[str, ...]] | None = None, *,
        stopped: signal.Signals | None = None, lost: dict[str, str] | None = None,
    ) -> AttemptOutcome:  # fmt: skip
        if summary is not None:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
            (tmp_path / "run_directory").write_text(f"{tmp_path / 'run'}\n")
        (tmp_path / "errors").mkdir()
        for at, (rank, (kind, text, *fault)) in enumerate((errors or {}).items()):
            error = RankError(at, rank, RANKS[rank], kind, text, 1, "", [], [], *fault)
            (tmp_path / "errors" / f"rank{rank}.json").write_text(json.dumps(asdict(error)))
        return outcome_of(code, tmp_path, RANKS, stopped, lost or {}, LauncherErrors(RANKS))

    return ended


@pytest.mark.parametrize(
    ("code", "summary", "more", "state", "exit_code"),
    [
        (0, {"state": "completed"}, {}, "completed", 0),
        (1, {"state": "completed"}, {}, "failed", 1),
        (1, {"state": "timeout", **SAVED}, {}, "timeout", 0),
        (138, {"state": "running"}, {}, "timeout", 138),  # signaled during start-up
        (143, {"state": "terminated"}, {"stopped": signal.SIGTERM}, "terminated", 143),
        (
            1,
            {"state": "terminated", **SAVED},
            {"stopped": signal.SIGUSR1},
            "timeout",
            0,
        ),  # it was requested
        (137, {"state": "running"}, {}, "failed", 137),
        (
            2,
            {"state": "out_of_memory"},
            {"errors": {0: ("user", "needs 9 GB")}},
            "out_of_memory",
            2,
        ),
    ],
)
def test_state_and_code(
    ended: Ended, code: int, summary: Any, more: Any, state: str, exit_code: int
) -> None:
    outcome = ended(code, summary, **more)
    assert (outcome.state, outcome.exit_code, outcome.at_fault) == (state, exit_code, [])
    assert bool(outcome.error) == (state != "completed")


@pytest.mark.parametrize("code", [0, 137])
def test_lost_host_comes_before_what_the_others_say(ended: Ended, code: int) -> None:
    outcome = ended(
        code, {"state": "running"}, {0: GONE}, stopped=signal.SIGTERM, lost={"n2": "down*"}
    )
    assert (outcome.error, outcome.at_fault) == ("lost n2: down*", ["n2"])


@pytest.mark.parametrize(
    ("code", "errors", "state", "exit_code", "hosts", "is_unclear"),
    [
        (1, {}, "failed", 1, [], True),
        (1, dict.fromkeys(range(4), GONE), "failed", 1, [], True),
        (
            143,
            {0: ("error", "KeyError: 'x'")},
            "failed",
            1,
            [],
            False,
        ),  # not that of ranks that srun ended
        (143, {0: ("user", "clap.bench.windws: no such field")}, "failed", 2, [], False),
        (
            1,
            {1: ("out_of_memory", "out of memory at micro-batch 4")},
            "out_of_memory",
            1,
            [],
            False,
        ),
        (1, {2: LACKS, 0: STOPPED, 1: STOPPED, 3: LACKS}, "failed", 1, ["n2"], False),
        (1, {2: LACKS, 0: LACKS, 1: STOPPED, 3: STOPPED}, "failed", 1, [], False),  # no host has it
        (
            1,
            {0: GONE, 2: STOPPED, 3: ("error", "CUDA error", HOST), 1: ("error", "KeyError")},
            "failed",
            1,
            ["n2"],
            False,
        ),
    ],
)
def test_what_ranks_said(
    ended: Ended,
    code: int,
    errors: Any,
    state: str,
    exit_code: int,
    hosts: list[str],
    is_unclear: bool,
) -> None:
    """The first cause counts; SLURM is asked about hosts only if no rank reported a cause."""
    outcome = ended(code, {"state": "failed", "error": "a consequence" if errors else None}, errors)
    assert (outcome.state, outcome.exit_code, outcome.at_fault, outcome.is_unclear) == (
        state,
        exit_code,
        hosts,
        is_unclear,
    )


def test_what_the_launcher_said_first_while_ranks_were_stopped(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    stopped = RankError(0, 0, "n1", *STOPPED)
    (tmp_path / "errors" / "rank0.json").write_text(json.dumps(asdict(stopped)))
    launcher = LauncherErrors(RANKS)
    launcher.read(
        b"slurmstepd: error: execve(): no python\nsrun: error: n2: task 2: Exited with exit code 2\n"
    )
    outcome = outcome_of(143, tmp_path, RANKS, None, {}, launcher)
    assert (outcome.state, outcome.at_fault) == ("failed", ["n2"])
    assert outcome.error == "n2: task 2: Exited with exit code 2 (execve(): no python)"


def test_rank_that_was_stopped_is_named_and_not_one_that_lost_it(ended: Ended) -> None:
    """Its host may be going down, so that SLURM is asked."""
    outcome = ended(
        143, {"state": "terminated", "error": "stopped by SIGTERM"}, {2: STOPPED, 0: GONE}
    )
    assert (outcome.state, outcome.exit_code, outcome.is_unclear) == ("terminated", 143, True)
    assert "rank 2 on n2" in outcome.error


def test_log_goes_on_after_the_disk_was_full(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(b"lost" * 2**14 + b"kept")
    number = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    with (tmp_path / "output").open("rb") as file:
        copy(file, full, LauncherErrors([]))
        assert file.read() == b""  # nothing blocks the ranks
        file.seek(2**16)
        copy(file, number, LauncherErrors([]))
    assert (tmp_path / "log").read_bytes() == b"kept"


CANCELLED = """slurmstepd: error: *** STEP 7.0 ON cn1 CANCELLED AT 2026-11-28T15:12:14 ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: cn1: tasks 0-1: Terminated
"""
NO_PYTHON = "slurmstepd-cn2: error: execve(): /x/.venv/bin/python: No such file or directory\n"


@pytest.mark.parametrize(
    ("output", "kind", "hosts", "message"),
    [
        ("srun: error: cn2: task 2: Killed\n" + CANCELLED, "killed", ["cn2"], "cn2: task 2: Killed"),
        ("3: srun: error: cn2: task 2: Bus error\r\n", "killed", ["cn2"], "Bus error"),
        ("srun: error: cn2: task 2: Exited with exit code 137\n", "killed", ["cn2"], "137"),
        (NO_PYTHON + "srun: error: cn2: task 2: Exited with exit code 2\n" + CANCELLED, "import", ["cn2"], "code 2"),
        ("srun: error: cn2: task 2: Exited with exit code 2\nsrun: error: cn1: task 0: Exited with exit code 2\n",
         "import", ["cn2", "cn1"], "cn2: task 2: Exited with exit code 2"),
        # torchrun's agents end with 1 if another one fails.
        ("srun: error: cn2: task 1: Exited with exit code 1\nsrun: error: cn1: task 0: Exited with exit code 1\n",
         "import", ["cn2"], "Exited with exit code 1"),
        ("srun: error: Node failure on cn2\n" + CANCELLED, "host", ["cn2"], "lost cn2: Node failure on cn2"),
        ("srun: error: Task launch for StepId=7.0 failed on node cn2: Communication connection failure\n",
         "host", ["cn2"], "Communication connection failure"),
        (CANCELLED, "stopped", ["cn1"], "Terminated"),
        ("srun: error: cn[1-2]: tasks 0-3: Killed\n", "killed", ["cn1", "cn2"], "Killed"),
        ("srun: error: cn10: task 2: Killed\nerror: cn1: task 0: Killed\nsrun: error: cn[1: task 2: Killed\n", "", [], ""),
        ("srun: error: Unable to create step for job 79: More processors requested than permitted\n", "", [], ""),
    ],
)  # fmt: skip
def test_first_error_names_its_host(output: str, kind: str, hosts: list[str], message: str) -> None:
    for size in (1, 7, len(output)):  # however the output is split
        errors = LauncherErrors(["cn1", "cn2"])
        for start in range(0, len(output), size):
            errors.read(output[start : start + size].encode())
        first = errors.first
        assert first is None if not kind else first is not None
        if first is not None:
            assert (first.kind if kind == "stopped" else first.fault, first.hosts) == (kind, hosts)
            assert message in first.message


def test_remark_says_why_no_task_started() -> None:
    errors = LauncherErrors(["cn1"])
    errors.read((CANCELLED + NO_PYTHON + "srun: error: a later one\n").encode())
    assert errors.remark == "execve(): /x/.venv/bin/python: No such file or directory"


def test_endless_output_takes_no_memory() -> None:
    errors = LauncherErrors(["cn1"])
    tracemalloc.start()
    for _ in range(1000):
        errors.read(b"x" * 10**5)
    for _ in range(1000):
        errors.read(b"srun: error: cn1: task 0: Exited with exit code 2\n" * 10)
    assert tracemalloc.get_traced_memory()[0] < 10**5
    tracemalloc.stop()
