"""A job's command lines, and whole jobs on this machine with plain scripts for a launcher."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.launchers import launch_command, script_command

ROOT = Path(__file__).resolve().parents[2]


def _command(launcher: str, slots: dict[str, int]) -> list[str]:
    files = {"hostfile": Path("h"), "environment": Path("/env")}
    arguments = argparse.Namespace(launcher=launcher, python="/py", **files, command=["a.py", "--x"])
    return launch_command(arguments, slots, "7.0")


def test_command_of_each_launcher() -> None:
    slots = {"n1": 4, "n2": 4}
    pdsh = _command("pdsh", slots)
    assert pdsh[:5] == ["/py", "-m", "deepspeed.launcher.runner", "--hostfile", "h"]
    assert (pdsh[pdsh.index("--master_addr") + 1], *pdsh[-2:]) == ("n1", "a.py", "--x")
    slurm = _command("slurm", slots)
    assert "--ntasks-per-node=4" in slurm[slurm.index("--launcher_args") + 1]
    # NCCL_ALGO=Tree,Ring would not survive srun --export.
    assert slurm[-4:] == [str(ROOT / "launch" / "with_environment.py"), "/env", "a.py", "--x"]
    srun = _command("srun", slots)
    assert {"--ntasks=8", "--ntasks-per-node=4", "--nodes=2", "--kill-on-bad-exit=1"} <= set(srun)
    assert srun[-4:] == ["/py", "-u", "a.py", "--x"]
    assert _command("pdsh", {"n1": 4, "n2": 2})
    with pytest.raises(ValueError, match="same number of slots"):
        _command("srun", {"n1": 4, "n2": 2})


def test_nothing_here_needs_torch_or_pydantic() -> None:
    """As on a login node, and on hosts whose Python hasn't the package: only PYTHONPATH leads to it."""
    scripts = sorted(path.stem for path in (ROOT / "launch").glob("*.py") if path.stem != "with_environment")
    program = f"import sys; [__import__('clap_ds.launch.' + name) for name in {scripts}]; print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "numpy", "deepspeed"} & {name.split(".")[0] for name in eval(shown.stdout)}
    host = script_command(f"{sys.executable} -S", "preflight_host.py", "/tmp", "1")
    assert subprocess.run(" ".join(host), shell=True, env={}, capture_output=True).returncode == 0


def _job(tmp_path: Path, runner: str) -> subprocess.Popen[str]:
    """A job on this host alone, whose `python -m deepspeed.launcher.runner` is a script of ours."""
    (tmp_path / "hostfile").write_text(f"{os.uname().nodename} slots=1\n")
    python = tmp_path / "python"
    cases = f'*deepspeed.launcher.runner*) {runner} ;; *) exec "{sys.executable}" "$@" ;;'
    python.write_text(f'#!/bin/bash\ncase "$*" in {cases} esac\n')
    python.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    options = ["--hostfile", str(tmp_path / "hostfile"), "--folder", str(tmp_path), "--python", str(python)]
    command = [sys.executable, "launch/job.py", *options, "--", "script.py"]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _recorded(tmp_path: Path, *fields: str) -> tuple[Any, ...]:
    record = json.loads((tmp_path / "job.json").read_text())
    return tuple(record[name] for name in fields)


def _run_folder(tmp_path: Path, summary: str) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(summary)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("recorded", "code", "state", "exit_code"),
    [
        ('{"state": "completed"}', 0, "completed", 0),
        ('{"state": "out_of_memory"}', 1, "out_of_memory", 1),
        ('{"state": "failed", "error": "why"}', 3, "failed", 3),
        ('{"state": "running"}', 0, "failed", 1),  # a launcher that says all is well although the run never said so
        ('{"state": "running"}', 247, "failed", 247),
        ('{"state": "terminated"}', 137, "failed", 137),  # ended by its launcher, not by us
        ('{"state": "comp', 0, "failed", 1),
        (None, 0, "completed", 0),  # a command without a run directory has only its code
        (None, 3, "failed", 3),
    ],
)
def test_exit_code_and_state(tmp_path: Path, recorded: str | None, code: int, state: str, exit_code: int) -> None:
    run = _run_folder(tmp_path, recorded or "")
    process = _job(tmp_path, f"echo 'node1: {'' if recorded is None else 'run directory:'} {run}'; exit {code}")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code, stderr
    assert str(run) in stdout
    assert "Traceback" not in stderr
    assert _recorded(tmp_path, "state", "exit_code") == (state, exit_code)
    if recorded and recorded.endswith("}"):
        assert json.loads((run / "summary.json").read_text())["state"] == state
    assert ("summary.json can't be read" in stderr) == bool(recorded and not recorded.endswith("}"))


@pytest.mark.parametrize(("number", "state"), [(signal.SIGUSR1, "timeout"), (signal.SIGTERM, "terminated")])
def test_signal_reaches_ranks_and_state(tmp_path: Path, number: signal.Signals, state: str) -> None:
    run = _run_folder(tmp_path, '{"state": "running"}')
    rank = (
        f'"{sys.executable}" -c "import signal, time, sys; signal.signal({int(number)},'
        f" lambda *_: (open('{tmp_path}/heard', 'w'), sys.exit(9)));"
        f" print('run directory: {run}', flush=True); time.sleep(60)\""
    )
    process = _job(tmp_path, f"RANK=0 {rank}; exit 0")
    assert process.stdout is not None
    assert "run directory" in process.stdout.readline()  # the job's own handler was set long before
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (tmp_path / "heard").exists()
    assert (json.loads((run / "summary.json").read_text())["state"],) == _recorded(tmp_path, "state") == (state,)
