"""Outcomes of attempts on two hosts with two ranks each, from error files, SLURM's answers, and the
output of srun and slurmstepd."""

import json
import signal
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


def decide(
    folder: Path,
    code: int,
    state: str,
    errors: dict[int, tuple[str, ...]] | None = None,
    launcher_output: bytes = b"",
    stopped: signal.Signals | None = None,
    down: dict[str, str] | None = None,
) -> AttemptOutcome:
    """Call `determine_outcome` for a run in this state, which has saved at step 9 if it was stopped
    in time. `errors`: kind, message and fault by rank, in order of time."""
    summary: dict[str, Any] = {"state": state}
    if state == "timeout":
        summary |= {"checkpoints": [{"saved": True}], "step": 9}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "run_directory").write_text(f"{folder}\n")
    (folder / "errors").mkdir()
    for at, (rank, (kind, message, *fault)) in enumerate((errors or {}).items()):
        error = RankError(at, rank, HOSTS[rank], kind, message, 1, "", [], [], *fault)
        (folder / "errors" / f"rank{rank}.json").write_text(json.dumps(asdict(error)))
    launcher = LauncherErrors(HOSTS)
    launcher.read(launcher_output)
    return determine_outcome(code, folder, HOSTS, stopped, down or {}, launcher)


@pytest.mark.parametrize(
    ("code", "recorded", "stopped", "state", "exit_code"),
    [
        (0, "completed", None, "completed", 0),
        (1, "timeout", None, "timeout", 0),
        (138, "running", None, "timeout", 138),  # signaled during start-up
        (143, "terminated", signal.SIGTERM, "terminated", 143),
    ],
)
def test_state_and_exit_code_of_an_attempt_without_errors(
    tmp_path, code, recorded, stopped, state, exit_code
):
    result = decide(tmp_path, code, recorded, stopped=stopped)
    assert (result.state, result.exit_code, result.at_fault) == (state, exit_code, [])


def test_lost_host_outweighs_errors_of_ranks(tmp_path):
    result = decide(tmp_path, 137, "running", {0: LOST_PEER}, down={"n2": "down*"})
    assert (result.error, result.at_fault) == ("lost n2: down*", ["n2"])


@pytest.mark.parametrize(
    ("code", "errors", "state", "exit_code", "hosts", "is_unclear"),
    [
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
def test_outcome_by_the_first_cause(tmp_path, code, errors, state, exit_code, hosts, is_unclear):
    """SLURM is asked about hosts only if no rank reported a cause."""
    result = decide(tmp_path, code, "failed", errors)
    assert (result.state, result.exit_code) == (state, exit_code)
    assert (result.at_fault, result.is_unclear) == (hosts, is_unclear)


def test_launchers_first_error_outweighs_ranks_that_were_stopped(tmp_path):
    output = b"slurmstepd: error: execve(): no python\nsrun: error: n2: task 2: Exited with exit code 2\n"
    result = decide(tmp_path, 143, "running", {0: STOPPED}, output)
    assert (result.state, result.at_fault) == ("failed", ["n2"])
    assert result.error == "n2: task 2: Exited with exit code 2 (execve(): no python)"


def test_stopped_rank_is_named_and_slurm_is_asked_for_hosts(tmp_path):
    result = decide(tmp_path, 143, "terminated", {2: STOPPED, 0: LOST_PEER})
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
        ("3: srun: error: cn2: task 2: Exited with exit code 137\r\n", "killed", ["cn2"], "137"),
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
    ],
)  # fmt: skip
def test_first_error_names_its_host(output, kind, hosts, message):
    # However the output is split.
    for size in (1, len(output)):
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
