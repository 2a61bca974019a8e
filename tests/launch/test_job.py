"""Whole jobs on this machine, whose `deepspeed` is a script of ours; and what a job decides, without any host."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.attempt import Ending
from clap_ds.launch.job import RunningJob
from clap_ds.launch.launchers import check_launcher
from clap_ds.launch.recovery import Attempts
from clap_ds.ranks.distributed import SECRET, Ranks
from tests.launch.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
HERE = os.uname().nodename
BATCH = {"train_micro_batch_size_per_gpu": 8}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
RUNNER = """
import json, os, re, signal, sys, time
from pathlib import Path
words = sys.argv
folder = Path(words[words.index("--job_folder") + 1])
attempt, run = int(folder.name), folder.parents[1] / f"run{folder.name}"
def begin():
    run.mkdir(); (folder / "run_directory").write_text(f"{run}\\n"); end("running")
def end(state, error=None, **more):
    (run / "summary.json").write_text(json.dumps({"state": state, "error": error, **more}))
def fails(rank, kind, message, code=1):
    (folder / "errors").mkdir(exist_ok=True)
    more = {"at": time.time(), "host": os.uname().nodename, "rank": rank, "kind": kind, "code": code}
    more |= {"message": message, "stack": "", "ranks": [], "hosts": []}
    (folder / "errors" / f"rank{rank}.json").write_text(json.dumps(more))
"""


def test_nothing_here_needs_torch_or_pydantic() -> None:
    """As on a login node, and on hosts whose Python hasn't the package: only PYTHONPATH leads to it."""
    scripts = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))
    program = f"import sys; [__import__('clap_ds.launch.' + name) for name in {scripts}]; print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "numpy", "deepspeed"} & {name.split(".")[0] for name in eval(shown.stdout)}


# --- whole jobs

StartJob = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Starts a job on this host alone, whose `deepspeed.launcher.runner` runs lines of ours."""
    started: list[subprocess.Popen[str]] = []

    def start_job(lines: str, *options: str, slots: int = 1) -> subprocess.Popen[str]:
        package = tmp_path / "stub" / "deepspeed" / "launcher"
        package.mkdir(parents=True)
        for path in (package, package.parent):
            (path / "__init__.py").write_text("")
        (package / "runner.py").write_text(f"{RUNNER}\n{lines}\n")
        (tmp_path / "hostfile").write_text(f"{HERE} slots={slots}\n")
        (tmp_path / "run.json").write_text(json.dumps(BATCH))
        (tmp_path / "stub" / "pdsh").touch(0o755)
        search = f"{tmp_path / 'stub'}{os.pathsep}"
        environment = ENVIRONMENT | {"PATH": f"{search}{ENVIRONMENT['PATH']}", "PYTHONPATH": f"{search}{ROOT}"}
        (tmp_path / "python").symlink_to(sys.executable)
        words = [sys.executable, "-m", "clap_ds.launch.job", "--folder", str(tmp_path), "--launcher", "pdsh"]
        words += ["--python", str(tmp_path / "python"), *options]
        words += ["--", "clap_ds/bench.py", "--deepspeed_config", str(tmp_path / "run.json")]
        pipe = subprocess.PIPE
        # Where there is no deepspeed to be found before ours.
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start_job
    for process in started:
        process.kill()
        process.communicate()


def _recorded(tmp_path: Path, *fields: str) -> tuple[Any, ...]:
    record = json.loads((tmp_path / "job.json").read_text())
    return tuple(record[name] for name in fields)


def _summary(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "run0" / "summary.json").read_text()))


def test_completed_run(start_job: StartJob, tmp_path: Path) -> None:
    process = start_job('begin(); end("completed"); print(*words[1:])', slots=2)
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    expected = ("completed", None, 0, str(tmp_path / "run0"))
    assert _recorded(tmp_path, "state", "error", "exit_code", "run_directory") == expected
    folder = tmp_path / "attempts" / "0"
    assert f"--hostfile {folder}/hostfile --launcher pdsh --force_multi" in stdout
    assert stdout.strip().endswith(f"--hostfile {folder}/hostfile --job_folder {folder}")
    assert (folder / "hostfile").read_text() == f"{HERE} slots=2\n"
    assert (folder / SECRET).stat().st_mode & 0o777 == 0o600
    assert (folder / SECRET).read_text() in Ranks(0, 2, 0, 2, job_folder=folder).run  # under which ranks meet


def test_code_0_is_not_believed_of_a_run_that_never_ended(start_job: StartJob, tmp_path: Path) -> None:
    """DeepSpeed's launcher ends with it where its srun was killed."""
    process = start_job("begin()")
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, *_recorded(tmp_path, "state")) == (1, "failed"), stderr
    assert _summary(tmp_path)["state"] == "failed"


def test_taken_port_is_tried_again_with_another(start_job: StartJob, tmp_path: Path) -> None:
    process = start_job(
        'Path("ports").open("a").write(words[words.index("--master_port") + 1] + "\\n")\n'
        'if attempt == 0: fails(0, "user", "port 17000 of n1 is taken, perhaps by another run", 2); sys.exit(2)\n'
        'begin(); end("completed")'
    )
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert len({*(tmp_path / "ports").read_text().split()}) == 2
    state, attempts = _recorded(tmp_path, "state", "attempts")
    assert (state, [each["state"] for each in attempts]) == ("completed", ["failed", "completed"])
    assert attempts[0]["at_fault"] == []


def test_error_of_a_rank_reaches_the_records(start_job: StartJob, tmp_path: Path) -> None:
    """The cause is in the record, not its consequence, which other ranks told earlier than it was written."""
    process = start_job(
        'begin(); fails(1, "lost_peer", "Connection closed by peer"); fails(0, "error", "KeyError: no such key")\n'
        "sys.exit(143)", slots=2,
    )  # fmt: skip
    _, stderr = process.communicate(timeout=180)
    state, error, code, attempts = _recorded(tmp_path, "state", "error", "exit_code", "attempts")
    assert (process.returncode, state, code) == (1, "failed", 1), "not that of the ranks which srun ended"
    assert error == f"rank 0 on {HERE}: KeyError: no such key"
    assert stderr.endswith(f"error: {error}\n")
    assert [each["error"] for each in attempts] == [error], "the program's own: not tried again"
    assert _summary(tmp_path)["error"] == error


@pytest.mark.parametrize(("number", "state", "code"), [("SIGTERM", "terminated", 143), ("SIGUSR1", "timeout", 0)])
def test_signal_reaches_the_launcher_and_counts(
    start_job: StartJob, tmp_path: Path, number: str, state: str, code: int
) -> None:
    saves = 'signal.signal(signal.SIGTERM, lambda *_: (end("terminated", step=7, checkpoints=[{"saved": True}]), sys.exit(1)))'
    process = start_job(f'begin(); {saves}; (folder / "ready").touch(); time.sleep(100)')
    wait_for((tmp_path / "attempts" / "0" / "ready").exists)
    process.send_signal(getattr(signal, number))
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, *_recorded(tmp_path, "state")) == (code, state), stderr
    assert _summary(tmp_path)["state"] == state


def test_nothing_of_a_launcher_stays_that_dies_before_what_it_started(start_job: StartJob, tmp_path: Path) -> None:
    """As srun does where DeepSpeed's launcher is killed."""
    process = start_job(
        'if os.fork() == 0: time.sleep(2); begin(); end("failed", "late"); os._exit(0)\nos.kill(os.getpid(), signal.SIGKILL)'
    )
    process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "run0").is_dir(), "it was waited for"


def test_wrong_use_is_told(start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_job("", "--spare_nodes", "1")
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (2, "error: --spare_nodes 1: the allocation has 1 hosts\n")
    monkeypatch.setenv("PATH", str(tmp_path / "stub"))
    with pytest.raises(UserError, match=f"launcher slurm: srun isn't installed on {HERE}"):
        check_launcher("slurm", "python")
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    check_launcher("pdsh", "/bin/python3.11")
    for folder, python in ((tmp_path, "/a b/python"), (tmp_path / "a b", "python")):
        monkeypatch.chdir(folder)
        with pytest.raises(UserError, match=r"a b.* to a shell unquoted"):
            check_launcher("pdsh", python)


# --- what a job decides


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., RunningJob]:
    """A job that hasn't begun, on `slots`, of a configuration with these changes."""

    def make_job(slots: dict[str, int], *, wanted: int | None = None, shrink: bool = True, **config: int) -> RunningJob:
        (tmp_path / "run.json").write_text(json.dumps({**BATCH, **config}))
        job = object.__new__(RunningJob)
        command = ["bench.py", "--deepspeed_config", str(tmp_path / "run.json")]
        job.arguments = argparse.Namespace(shrink=shrink, command=command, requeues=1, until_done=False)
        job.folder, job.slots, job.wanted = tmp_path, slots, wanted or len(slots)
        job.attempts, job.stopped = Attempts(0, []), None
        return job

    return make_job


def _hosts(number: int) -> dict[str, int]:
    return {f"n{index}": 4 for index in range(1, number + 1)}


def _lose(job: RunningJob, *names: str) -> Ending:
    ending = Ending("failed", f"lost {names}", 1, [*names], lost=True)
    job.attempts.note(ending, job.slots, [*job.slots], "now")
    return ending


@pytest.mark.parametrize(
    ("slots", "config", "lost", "hosts", "steps"),
    [
        (_hosts(4), {}, "n4", "n1 n2", 2),  # three don't divide the batch of four
        (_hosts(4), {"gradient_accumulation_steps": 3}, "n1", "n2 n3 n4", 4),
        (_hosts(4), {"train_batch_size": 256}, "n4", "n1 n2", 4),
        ({"n1": 4, "n2": 2}, {}, "n2", "", 0),
        ({"n1": 4, "n2": 2}, {}, "n1", "n2", 3),
    ],
)
def test_shrinking_keeps_the_global_batch(
    make_job: Any, tmp_path: Path, slots: dict[str, int], config: dict[str, int], lost: str, hosts: str, steps: int
) -> None:
    job = make_job(slots, **config)
    assert job._words(job._choose_hosts(), tmp_path)[2] == job.arguments.command[2], "all hosts: its own file"
    _lose(job, lost)
    chosen = job._choose_hosts()
    assert [*chosen] == hosts.split()
    if chosen:
        (tmp_path / "a").mkdir()
        words = job._words(chosen, tmp_path / "a")
        assert json.loads(Path(words[2]).read_text()) == {**BATCH, **config, "gradient_accumulation_steps": steps}
        assert (tmp_path / "a" / "hostfile").read_text().split()[::2] == hosts.split()


def test_without_shrinking_or_a_config_all_are_needed(make_job: Any) -> None:
    job = make_job(_hosts(2), shrink=False)
    _lose(job, "n2")
    assert job._choose_hosts() == {}
    job.arguments.shrink, job.arguments.command = True, ["script.py"]
    assert job._choose_hosts() == {}


def test_spare_hosts_take_over(make_job: Any) -> None:
    job = make_job(_hosts(4), wanted=2, shrink=False)
    for hosts, lost in (("n1 n2", "n1"), ("n2 n3", "n2"), ("n3 n4", "n3")):
        assert [*job._choose_hosts()] == hosts.split()
        _lose(job, lost)
    assert job._choose_hosts() == {}, "n1 isn't to be used, though it is there"
    # SLURM may give another start of the job the same hosts again.
    job.attempts.start, job.slots = 1, _hosts(2)
    assert [*job._choose_hosts()] == ["n1", "n2"]


def test_reached_limit_of_requeues_is_said(
    make_job: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = make_job(_hosts(2))
    ending = _lose(job, "n2")
    assert job._asks_for_another_start(ending)
    job.attempts.all[-1]["requeued"] = True
    assert not job._asks_for_another_start(ending)
    assert "was, 1 times of 1 (--requeues)" in capsys.readouterr().err
