"""Outcomes of attempts on two hosts with two ranks each, from error files, SLURM's answers, and the
output of srun and slurmstepd."""

import json
import signal
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import IMPORT, RankError
from clap_ds.launch.attempt import AttemptOutcome, LauncherErrors, determine_outcome

HOSTS = ["n1", "n1", "n2", "n2"]  # of each rank
LOST_PEER = ("lost_peer", "closed by peer")
STOPPED = ("stopped", "stopped by SIGTERM")
NO_PACKAGE = ("error", "ModuleNotFoundError: No module named 'soundfile'", IMPORT)
SAVED = {"checkpoints": [{"saved": True}], "step": 9}


Outcome = Callable[..., AttemptOutcome]


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    """Call `determine_outcome` for a run with this summary (None: no run) and errors by rank, in
    order of time."""

    def outcome(
        code: int,
        summary: dict[str, Any] | None,
        errors: dict[int, tuple[str, ...]] | None = None,
        stopped: signal.Signals | None = None,
        down: dict[str, str] | None = None,
        launcher_output: bytes = b"",
    ) -> AttemptOutcome:
        if summary is not None:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
            (tmp_path / "run_directory").write_text(f"{tmp_path / 'run'}\n")
        (tmp_path / "errors").mkdir()
        for at, (rank, (kind, message, *fault)) in enumerate((errors or {}).items()):
            error = RankError(at, rank, HOSTS[rank], kind, message, 1, "", [], [], *fault)
            (tmp_path / "errors" / f"rank{rank}.json").write_text(json.dumps(asdict(error)))
        launcher = LauncherErrors(HOSTS)
        launcher.read(launcher_output)
        return determine_outcome(code, tmp_path, HOSTS, stopped, down or {}, launcher)

    return outcome


@pytest.mark.parametrize(
    ("code", "summary", "stopped", "state", "exit_code"),
    [
        (0, {"state": "completed"}, None, "completed", 0),
        (1, {"state": "completed"}, None, "failed", 1),
        (1, {"state": "timeout", **SAVED}, None, "timeout", 0),
        (138, {"state": "running"}, None, "timeout", 138),  # signaled during start-up
        (143, {"state": "terminated"}, signal.SIGTERM, "terminated", 143),
        (1, {"state": "terminated", **SAVED}, signal.SIGUSR1, "timeout", 0),  # it was requested
        (137, {"state": "running"}, None, "failed", 137),
    ],
)
def test_state_and_exit_code_of_an_attempt_without_errors(
    outcome: Outcome,
    code: int,
    summary: dict[str, Any],
    stopped: signal.Signals | None,
    state: str,
    exit_code: int,
) -> None:
    result = outcome(code, summary, stopped=stopped)
    assert (result.state, result.exit_code, result.at_fault) == (state, exit_code, [])
    assert bool(result.error) == (state != "completed")


@pytest.mark.parametrize("code", [0, 137])
def test_lost_host_outweighs_errors_of_ranks(outcome: Outcome, code: int) -> None:
    errors = {0: LOST_PEER}
    result = outcome(code, {"state": "running"}, errors, signal.SIGTERM, down={"n2": "down*"})
    assert (result.error, result.at_fault) == ("lost n2: down*", ["n2"])


@pytest.mark.parametrize(
    ("code", "errors", "state", "exit_code", "hosts", "is_unclear"),
    [
        (1, {}, "failed", 1, [], True),
        (1, dict.fromkeys(range(4), LOST_PEER), "failed", 1, [], True),
        # Not the code of ranks that srun ended.
        (143, {0: ("error", "KeyError: 'x'")}, "failed", 1, [], False),
        (143, {0: ("user", "clap.bench.windws: no such field")}, "failed", 2, [], False),
        (1, {1: ("out_of_memory", "at micro-batch 4")}, "out_of_memory", 1, [], False),
        (1, {2: NO_PACKAGE, 0: STOPPED, 1: STOPPED, 3: NO_PACKAGE}, "failed", 1, ["n2"], False),
        # No host has it.
        (1, {2: NO_PACKAGE, 0: NO_PACKAGE, 1: STOPPED, 3: STOPPED}, "failed", 1, [], False),
    ],
)
def test_outcome_by_the_first_cause(
    outcome: Outcome,
    code: int,
    errors: dict[int, tuple[str, ...]],
    state: str,
    exit_code: int,
    hosts: list[str],
    is_unclear: bool,
) -> None:
    """SLURM is asked about hosts only if no rank reported a cause."""
    result = outcome(code, {"state": "failed"}, errors)
    assert (result.state, result.exit_code) == (state, exit_code)
    assert (result.at_fault, result.is_unclear) == (hosts, is_unclear)


def test_run_out_of_memory_by_its_summary_keeps_the_code_of_a_user_error(outcome: Outcome) -> None:
    result = outcome(2, {"state": "out_of_memory"}, {0: ("user", "needs 9 GB")})
    assert (result.state, result.exit_code) == ("out_of_memory", 2)


def test_launchers_first_error_outweighs_ranks_that_were_stopped(outcome: Outcome) -> None:
    output = b"slurmstepd: error: execve(): no python\nsrun: error: n2: task 2: Exited with exit code 2\n"
    result = outcome(143, None, {0: STOPPED}, launcher_output=output)
    assert (result.state, result.at_fault) == ("failed", ["n2"])
    assert result.error == "n2: task 2: Exited with exit code 2 (execve(): no python)"


def test_stopped_rank_is_named_and_slurm_is_asked_for_hosts(outcome: Outcome) -> None:
    """The host may be going down, so that SLURM is asked."""
    summary = {"state": "terminated", "error": "stopped by SIGTERM"}
    result = outcome(143, summary, {2: STOPPED, 0: LOST_PEER})
    assert (result.state, result.exit_code, result.is_unclear) == ("terminated", 143, True)
    assert "rank 2 on n2" in result.error


# --- the launcher's output


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
    # However the output is split.
    for size in (1, 7, len(output)):
        errors = LauncherErrors(["cn1", "cn2"])
        for start in range(0, len(output), size):
            errors.read(output[start : start + size].encode())
        error = errors.first
        if not kind:
            assert error is None
            continue
        assert error is not None
        assert (error.kind if kind == "stopped" else error.fault, error.hosts) == (kind, hosts)
        assert message in error.message


def test_remark_tells_why_no_task_started() -> None:
    errors = LauncherErrors(["cn1"])
    errors.read((CANCELLED + NO_PYTHON + "srun: error: a later one\n").encode())
    assert errors.remark == "execve(): /x/.venv/bin/python: No such file or directory"


def test_endless_output_takes_no_memory() -> None:
    errors = LauncherErrors(["cn1"])
    tracemalloc.start()
    for _ in range(1000):
        errors.read(b"x" * 10**5)
        errors.read(b"\nsrun: error: cn1: task 0: Exited with exit code 2\n")
    assert tracemalloc.get_traced_memory()[0] < 10**5
    tracemalloc.stop()
