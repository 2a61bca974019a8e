"""Whole jobs on this machine, whose launcher is a script of ours; and what a job decides, without any host."""

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

from clap_ds.launch.agents import Host
from clap_ds.launch.host_processes import processes_of
from clap_ds.launch.job import Job, port_of
from clap_ds.launch.launchers import script_command
from clap_ds.launch.recovery import Attempts, Ending
from tests.launch.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
HERE = os.uname().nodename
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "PYTHONPATH": str(ROOT),
}


def test_nothing_here_needs_torch_or_pydantic() -> None:
    """As on a login node, and on hosts whose Python hasn't the package: only PYTHONPATH leads to it."""
    scripts = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))
    program = f"import sys; [__import__('clap_ds.launch.' + name) for name in {scripts}]; print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "numpy", "deepspeed"} & {name.split(".")[0] for name in eval(shown.stdout)}
    host = script_command(sys.executable, "preflight_host.py", "/tmp", "1", options=["-S"])
    assert subprocess.run(host, env={}, capture_output=True).returncode == 0


# --- whole jobs


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a job on this host alone, whose `python -m deepspeed.launcher.launch` is a script of ours."""
    started: list[subprocess.Popen[str]] = []

    def start_job(launcher: str, *options: str, command: tuple[str, ...] = ("script.py",)) -> subprocess.Popen[str]:
        (tmp_path / "hosts").write_text(f"{HERE} slots=1\n")
        (tmp_path / "site.json").write_text(json.dumps({"python": str(tmp_path / "python")}))
        (tmp_path / "python").write_text(f"#!/bin/bash\n{launcher}\n")
        (tmp_path / "python").chmod(0o755)
        words = ["--site", f"{tmp_path}/site.json", "--hostfile", f"{tmp_path}/hosts", "--folder", str(tmp_path)]
        words = [sys.executable, "-S", "launch/job.py", *words, "--launcher", "ssh", *options, "--", *command]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start_job
    for process in started:
        process.kill()
        process.communicate()


def _recorded(tmp_path: Path, *fields: str) -> tuple[Any, ...]:
    record = json.loads((tmp_path / "job.json").read_text())
    return tuple(record[name] for name in fields)


def test_taken_port_is_tried_again_with_another(start_job: Any, tmp_path: Path) -> None:
    fails = "echo 'error: port is taken, perhaps by another run' >&2; exit 2"
    process = start_job(
        f'for word in "$@"; do case $word in --master_port=*) echo $word >> {tmp_path}/ports ;; esac; done;'
        f" [ $(wc -l < {tmp_path}/ports) = 2 ] || {{ {fails}; }}"
    )
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    ports = (tmp_path / "ports").read_text().split()
    assert len(set(ports)) == 2
    state, attempts = _recorded(tmp_path, "state", "attempts")
    assert (state, [each["state"] for each in attempts]) == ("completed", ["failed", "completed"])
    assert attempts[0]["excluded"] == []


def test_error_of_a_rank_reaches_the_record(start_job: Any, tmp_path: Path) -> None:
    process = start_job("echo 'KeyError: no such key' >&2; echo 'more words' >&2; exit 4")
    _, stderr = process.communicate(timeout=180)
    error = f"{HERE}: its ranks ended with code 4: more words; KeyError: no such key"
    assert (process.returncode, *_recorded(tmp_path, "state", "error", "exit_code")) == (4, "failed", error, 4)
    assert stderr.endswith(f"error: {error}\n")
    assert [each["error"] for each in _recorded(tmp_path, "attempts")[0]] == [error], (
        "the program's own: not tried again"
    )


def test_killed_job_leaves_no_rank_and_a_record(start_job: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text('{"state": "running"}')
    process = start_job(f"echo 'run directory: {run}'; echo $CLAP_JOB; exec sleep 60")
    process.stdout.readline()
    name = process.stdout.readline().strip()
    assert processes_of(name)
    # The agent knows of the run: it watches it.
    wait_for(lambda: not subprocess.run(["pgrep", "-f", f"watch {run}"], capture_output=True).returncode)
    process.kill()
    wait_for(lambda: _recorded(tmp_path, "state") == ("failed",))
    assert "launch/job.py was ended before it could say why" in _recorded(tmp_path, "error")[0]
    wait_for(lambda: json.loads((run / "summary.json").read_text())["state"] == "failed")
    wait_for(lambda: not processes_of(name))


def test_killed_agent_is_replaced_and_its_ranks_are_ended(start_job: Any, tmp_path: Path) -> None:
    process = start_job(
        "echo $CLAP_JOB; [ ${CLAP_JOB##*.} = 1 ] || exec sleep 60; ps -e -o args= | grep -c '^sleep 60$' || :"
    )
    first = process.stdout.readline().strip()
    wait_for(lambda: len(processes_of(first)) == 1)
    (launcher,) = processes_of(first)
    agent = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert processes_of(first) == {}
    attempts = _recorded(tmp_path, "attempts")[0]
    assert f"lost {HERE}: its connection ended" in attempts[0]["error"]
    assert [(each["state"], each["excluded"]) for each in attempts] == [("failed", []), ("completed", [])]


def test_words_that_are_no_files(start_job: Any, tmp_path: Path) -> None:
    process = start_job('words="$*"; [ ${#words} -gt 300 ]', command=("script.py", "x" * 300, "-"))
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr


def test_wrong_use_is_told(start_job: Any, tmp_path: Path) -> None:
    process = start_job("exit 0", "--spare_nodes", "1")
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (2, "error: --spare_nodes 1: the allocation has 1 hosts\n")


# --- what a job decides

BATCH = {"train_micro_batch_size_per_gpu": 8}


class _Agents:
    def __init__(self, *names: str) -> None:
        self.hosts = {name: Host(name, heard=0.0) for name in names}


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """A job that hasn't begun, on `slots`."""

    def make_job(slots: dict[str, int], *, steps: int = 1, wanted: int | None = None, shrink: bool = True) -> Job:
        (tmp_path / "run.json").write_text(json.dumps({**BATCH, "gradient_accumulation_steps": steps}))
        job = object.__new__(Job)
        command = ["bench.py", "--deepspeed_config", str(tmp_path / "run.json")]
        job.arguments = argparse.Namespace(shrink=shrink, command=command)
        job.folder, job.slots, job.wanted = tmp_path, slots, wanted or len(slots)
        job.agents, job.attempts = _Agents(*slots), Attempts(0, [])  # type: ignore[assignment]
        return job

    return make_job


def _hosts(number: int, slots: int = 4) -> dict[str, int]:
    return {f"n{index}": slots for index in range(1, number + 1)}


@pytest.mark.parametrize(
    ("slots", "steps", "lost", "expected"),
    [
        (_hosts(4), 1, ["n4"], {"hosts": ["n1", "n2"], "steps": 2}),  # three don't divide the batch of four
        (_hosts(4), 3, ["n1"], {"hosts": ["n2", "n3", "n4"], "steps": 4}),
        (_hosts(2), 2, ["n1"], {"hosts": ["n2"], "steps": 4}),
        ({"n1": 4, "n2": 2}, 1, ["n2"], {"hosts": [], "steps": None}),
        ({"n1": 4, "n2": 2}, 1, ["n1"], {"hosts": ["n2"], "steps": 3}),
    ],
)
def test_shrinking_keeps_the_global_batch(
    make_job: Any, slots: Any, steps: int, lost: list[str], expected: Any
) -> None:
    job = make_job(slots, steps=steps)
    for name in lost:
        job.agents.hosts[name].lost = "silent"
    hosts = job._choose_hosts()
    assert [*hosts] == expected["hosts"]
    if hosts:
        command = job._command(hosts)
        config = json.loads(Path(command[2]).read_text())
        assert config == {**BATCH, "gradient_accumulation_steps": expected["steps"]}
        assert sum(slots.values()) * steps == sum(hosts.values()) * expected["steps"]
        assert command[-2:] == ["--hostfile", str(job.folder / "hostfile")]
        assert (job.folder / "hostfile").read_text().split()[::2] == expected["hosts"]


def test_shrinking_knows_the_steps_of_a_batch_that_is_given_as_a_whole(make_job: Any) -> None:
    job = make_job(_hosts(4))
    config = {"train_batch_size": 256, **BATCH}
    Path(job.arguments.command[2]).write_text(json.dumps(config))
    job.agents.hosts["n4"].lost = "silent"
    hosts = job._choose_hosts()
    assert [*hosts] == ["n1", "n2"]
    assert json.loads(Path(job._command(hosts)[2]).read_text()) == {**config, "gradient_accumulation_steps": 4}


def test_without_shrinking_or_a_config_all_are_needed(make_job: Any) -> None:
    job = make_job(_hosts(2), shrink=False)
    assert job._command(job._choose_hosts())[2] == job.arguments.command[2], "its own file"
    job.agents.hosts["n2"].lost = "silent"
    assert job._choose_hosts() == {}
    job.arguments.shrink, job.arguments.command = True, ["script.py"]
    assert job._choose_hosts() == {}


def test_spare_hosts_take_over(make_job: Any) -> None:
    job = make_job(_hosts(4), wanted=2, shrink=False)
    assert [*job._choose_hosts()] == ["n1", "n2"]
    job.agents.hosts["n1"].heard = None
    assert [*job._choose_hosts()] == ["n2", "n3"]
    ending = Ending("failed", "lost n2", 1, ["n2"], lost=True)
    job.attempts.note(ending, ["n2", "n3"], job.slots, "now", ["n2"])
    assert [*job._choose_hosts()] == ["n3", "n4"]
    job.agents.hosts["n3"].lost = "silent"
    assert job._choose_hosts() == {}, "n2 isn't to be used, though it is there"
    # SLURM may give another start of the job the same hosts again.
    job.attempts.start, job.agents = 1, _Agents("n1", "n2")
    job.slots = _hosts(2)
    assert [*job._choose_hosts()] == ["n1", "n2"]


def test_each_attempt_has_a_port_of_its_own() -> None:
    ports = [port_of(f"123.abcdef01.{number}") for number in range(50)]
    assert len(set(ports)) > 45
    assert all(16000 <= port < 32000 for port in ports)
