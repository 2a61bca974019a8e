"""The script to copy, up to deepspeed's command line, which a stand-in shows."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_starts_deepspeed_by_slurm(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "deepspeed").write_text('#!/bin/bash\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\nexit 5\n')
    (tmp_path / "deepspeed").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    job = {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "8"}
    kept |= {"PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])}
    kept |= {f"SLURM_{name}": value for name, value in job.items()}
    command = ["bash", ROOT / "launch" / "bench.sbatch"]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    expected = {"--force_multi", "--launcher_args=--kill-on-bad-exit=1 --ntasks-per-node=4 --cpus-per-task=8"}
    assert {"8", "clap-bench-7.hosts", "n1", "clap_ds/bench.py", *expected} <= {*done.stdout.splitlines()}
    assert (tmp_path / "clap-bench-7.hosts").read_text() == "n1 slots=4\nn2 slots=4\n"
