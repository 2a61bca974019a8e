"""Hosts and causes in the output of srun and slurmstepd."""

import tracemalloc

import pytest

from clap_ds.launch.launcher_errors import LauncherErrors

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
