"""A job's command lines, its settings copies, and whole jobs on this machine with plain scripts for a launcher."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.launchers import launch_command, master_port
from clap_ds.launch.run_config import main as write_config
from clap_ds.launch.run_config import parse_assignment, with_field

ROOT = Path(__file__).resolve().parents[2]


def _arguments(launcher: str, environment: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        launcher=launcher, python="/py", hostfile=Path("h"), environment=environment, command=["a.py", "--x"]
    )


def test_command_of_each_launcher() -> None:
    slots = {"n1": 4, "n2": 4}
    pdsh = launch_command(_arguments("pdsh"), slots, "7.0")
    assert pdsh[:5] == ["/py", "-m", "deepspeed.launcher.runner", "--hostfile", "h"]
    assert pdsh[pdsh.index("--master_addr") + 1] == "n1"
    assert pdsh[-2:] == ["a.py", "--x"]
    slurm = launch_command(_arguments("slurm", Path("/env")), slots, "7.0")
    assert "--ntasks-per-node=4" in slurm[slurm.index("--launcher_args") + 1]
    # NCCL_ALGO=Tree,Ring would not survive srun --export.
    assert slurm[-4:] == [str(ROOT / "launch" / "with_environment.py"), "/env", "a.py", "--x"]
    srun = launch_command(_arguments("srun"), slots, "7.0")
    assert {"--ntasks=8", "--ntasks-per-node=4", "--nodes=2", "--kill-on-bad-exit=1"} <= set(srun)
    assert srun[-4:] == ["/py", "-u", "a.py", "--x"]


def test_unequal_hosts_need_pdsh() -> None:
    launch_command(_arguments("pdsh"), {"n1": 4, "n2": 2}, "7.0")
    with pytest.raises(ValueError, match="same number of slots"):
        launch_command(_arguments("srun"), {"n1": 4, "n2": 2}, "7.0")


def test_ports_differ_between_jobs_and_starts() -> None:
    ports = {master_port(f"{job}.{start}") for job in range(1000, 1100) for start in range(3)}
    assert len(ports) == 300
    assert all(1024 < port < 32768 for port in ports)


def _job(tmp_path: Path, runner: str, *options: str) -> subprocess.Popen[str]:
    """A job on this host alone, whose `python -m deepspeed.launcher.runner` is a script of ours."""
    (tmp_path / "hostfile").write_text(f"{os.uname().nodename} slots=1\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *deepspeed.launcher.runner*) {runner} ;; *) exec "{sys.executable}" "$@" ;; esac\n'
    )
    python.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [
        sys.executable, "launch/job.py", "--hostfile", str(tmp_path / "hostfile"), "--folder", str(tmp_path),
        "--python", str(python),
        *options, "--", "script.py",
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _told(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "job.json").read_text()))


def _run_folder(tmp_path: Path, state: str, error: str | None = None) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"state": state, "error": error}))
    return run


@pytest.mark.parametrize(
    ("recorded", "code", "state", "exit_code"),
    [
        ("completed", 0, "completed", 0),
        ("out_of_memory", 1, "out_of_memory", 1),
        ("failed", 3, "failed", 3),
        ("running", 0, "failed", 1),  # a launcher that says all is well although the run never said so
        ("running", 247, "failed", 247),
        ("terminated", 137, "failed", 137),  # ended by its launcher, not by us
    ],
)
def test_exit_code_and_state(tmp_path: Path, recorded: str, code: int, state: str, exit_code: int) -> None:
    run = _run_folder(tmp_path, recorded, "why")
    process = _job(tmp_path, f"echo 'node1: run directory: {run}'; exit {code}")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code, stderr
    assert "run directory" in stdout
    assert (_told(tmp_path)["state"], _told(tmp_path)["exit_code"]) == (state, exit_code)
    assert json.loads((run / "summary.json").read_text())["state"] == state


def test_a_damaged_record_of_the_run_leaves_the_jobs_own(tmp_path: Path) -> None:
    run = _run_folder(tmp_path, "running")
    (run / "summary.json").write_text('{"state": "comp')
    process = _job(tmp_path, f"echo 'run directory: {run}'; exit 0")
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, _told(tmp_path)["state"]) == (1, "failed")
    assert f"{run}/summary.json can't be read" in stderr
    assert "Traceback" not in stderr


def test_command_without_a_run_directory_has_only_its_code(tmp_path: Path) -> None:
    process = _job(tmp_path, "exit 0")
    process.communicate(timeout=60)
    assert (process.returncode, _told(tmp_path)["state"]) == (0, "completed")


@pytest.mark.parametrize(("number", "state"), [(signal.SIGUSR1, "timeout"), (signal.SIGTERM, "terminated")])
def test_signal_reaches_ranks_and_state(tmp_path: Path, number: signal.Signals, state: str) -> None:
    run = _run_folder(tmp_path, "running")
    rank = (
        f'"{sys.executable}" -c "import signal, time, sys; signal.signal({int(number)},'
        f" lambda *_: (open('{tmp_path}/heard', 'w'), sys.exit(9)));"
        f" print('run directory: {run}', flush=True); time.sleep(60)\""
    )
    process = _job(tmp_path, f"RANK=0 {rank}; exit 0")
    deadline = time.monotonic() + 60
    assert process.stdout is not None
    assert "run directory" in process.stdout.readline()  # the job's own handler was set long before
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (tmp_path / "heard").exists()
    assert _told(tmp_path)["state"] == json.loads((run / "summary.json").read_text())["state"] == state
    assert time.monotonic() < deadline


def test_fields_of_a_runs_json(tmp_path: Path) -> None:
    assert with_field({"a": {"b": 1, "c": 2}}, "a.b", 3) == {"a": {"b": 3, "c": 2}}
    assert with_field({}, "a.b.c", 3) == {"a": {"b": {"c": 3}}}
    with pytest.raises(ValueError, match="not an object"):
        with_field({"a": 1}, "a.b", 3)
    assert parse_assignment("a.b=1e-4") == ("a.b", 1e-4)
    assert parse_assignment("a=text") == ("a", "text")
    for wrong in ("a", "=1", "a..b=1"):
        with pytest.raises(ValueError, match="expected NAME=VALUE"):
            parse_assignment(wrong)
    source = tmp_path / "tiny.json"
    source.write_text('{"clap": {"output": {"root": "/mine"}}}')
    output = tmp_path / "out.json"
    assert write_config([str(source), "--output", str(output), "--root", "/site", "--set", "x.y=true"]) == 0
    assert json.loads(output.read_text()) == {"clap": {"output": {"root": "/mine", "label": "tiny"}}, "x": {"y": True}}
    assert write_config([str(tmp_path / "missing.json"), "--output", str(output)]) == 2
