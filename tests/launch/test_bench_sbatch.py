"""The script to copy, up to deepspeed's command line, which a stand-in shows; and its other way, over ssh, with the trap."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "launch" / "bench.sbatch").read_text(encoding="utf-8")


def _job(folder: Path, deepspeed: str) -> dict[str, str]:
    """Variables of a job on two nodes, with what the script needs of a checkout in the folder."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "deepspeed").write_text(f"#!/bin/bash\n{deepspeed}\n")
    (folder / "deepspeed").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    job = {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "8"}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, **{f"SLURM_{name}": value for name, value in job.items()}, "PATH": path}


def test_it_starts_deepspeed_by_slurm(tmp_path: Path) -> None:
    job = _job(tmp_path, 'printf "%s\\n" "$OMP_NUM_THREADS" "$@"\nexit 5')
    done = subprocess.run(["bash", "-c", TEXT], cwd=tmp_path, env=job, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert done.stdout.splitlines() == [
        "8", "--hostfile", "clap-bench-7.hosts", "--force_multi", "--no_ssh_check", "--master_addr", "n1", "--launcher",
        "slurm", "--launcher_args=--kill-on-bad-exit=1 --ntasks-per-node=4 --cpus-per-task=8", "clap_ds/bench.py",
        "--deepspeed_config", "ds_configs/htsat_tiny.json",
    ]  # fmt: skip
    assert (tmp_path / "clap-bench-7.hosts").read_text() == "n1 slots=4\nn2 slots=4\n"


@pytest.mark.parametrize("number", [None, signal.SIGUSR1])
def test_over_ssh_signals_end_the_ranks_and_the_exit_code_is_theirs(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    text = re.sub(r"^#   (?=\S)", "", re.sub(r"^exec .*\n", "", TEXT, flags=re.MULTILINE), flags=re.MULTILINE)
    waits = "trap 'echo told; exit 9' TERM\ntouch started\nwhile :; do sleep 0.05; done"
    job = _job(tmp_path, waits if number else '[ "$8" = pdsh ]\nexit $((4 + $?))')
    process = subprocess.Popen(["bash", "-c", text], cwd=tmp_path, env=job, stdout=subprocess.PIPE, text=True)
    if number:
        wait_for((tmp_path / "started").exists)
        process.send_signal(number)
    out, _ = process.communicate(timeout=180)
    assert (process.returncode, out) == ((9, "told\n") if number else (4, ""))
