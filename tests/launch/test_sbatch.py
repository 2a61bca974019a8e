"""Batch scripts for several kinds of clusters, executed by bash."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from clap_ds.launch.cluster_profile import ClusterProfile
from clap_ds.launch.sbatch import GUARD, Request, format_script
from tests.conftest import ROOT

SPARE_NODES = "$((SLURM_JOB_NUM_NODES - 2))"
TRICKY = 'a "b" $HOME `c` %h!\nd'


def test_script_is_read_at_a_glance():
    profile = ClusterProfile(
        setup=["module load CUDA"], environment={"NCCL_ALGO": "Tree,Ring"}, cpus_per_task=8, account="mine",
        partition="gpu", python="/opt/python", sbatch=["--qos=big"],
    )  # fmt: skip
    request = Request(
        profile, 4, "gpu:4", train=True, time="1-00:00:00", options={"exclude": "n[1-2]"}, spare_nodes=1, auto_requeue=True,
    )  # fmt: skip
    text = format_script(request, 2, "name", "/jobs/one/slurm-%j.out", [Path("/jobs/one")])
    assert (
        text
        == f"""\
#!/bin/bash
#SBATCH --qos=big
#SBATCH --wait-all-nodes=1
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --job-name=name
#SBATCH --output=/jobs/one/slurm-%j.out
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=1-00:00:00
#SBATCH --account=mine
#SBATCH --partition=gpu
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --exclude=n[1-2]

set -euo pipefail
cd {shlex.quote(str(ROOT))}
module load CUDA
export NCCL_ALGO=Tree,Ring
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-8}}
export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}
folders=(/jobs/one)
folder=${{folders[${{SLURM_ARRAY_TASK_ID:-0}}]}}

without_spares='NumNodes=2 NumTasks=8 NumCPUs=1'
{GUARD}
exec /opt/python -m clap_ds.launch.supervisor --folder "$folder" \\
    --slots=4 --spare_nodes={SPARE_NODES} --auto_requeue -- clap_ds/train.py --deepspeed_config "$folder/run.json"
"""
    )


@pytest.mark.parametrize(
    ("host", "state", "restarts", "task", "requeued"),
    [
        ("down*", "RUNNING", 1, "", "7"),
        ("down*", "RUNNING", 1, "2", "7_2"),
        ("idle", "RUNNING", 1, "", ""),
        ("down*", "CANCELLED", 1, "", ""),
        ("down*", "RUNNING", 2, "", ""),
    ],
)
def test_lost_first_host_requeues_this_start_of_the_job(
    tmp_path, host, state, restarts, task, requeued
):
    """A guard that SLURM left on a host that was cut off must not start a job again that has ended
    or has other hosts, nor the other tasks of an array."""
    programs = {
        "sleep": f"mkdir {shlex.quote(str(tmp_path / 'slept'))}",  # fails the second time
        "sinfo": f"echo '{host}'",
        "scontrol": f'''[ "$1" = -o ] || {{ echo "$@"; [ "$1" = requeue ]; exit; }}
            echo "A=1 JobState={state} B=2 Restarts={restarts} C=3"''',
        "sbatch": 'shift $(($# - 1)); echo "$1"',
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    if task:
        job |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
    output = _run_guard(tmp_path, programs, without_spares="NumNodes=1 NumCPUs=1", **job)
    update = f"update JobId={requeued} NumNodes=1 NumCPUs=1"
    # The update that this process could not make, by another job.
    wrapped = f"--wrap=while scontrol {update} 2>&1 | grep -q DB.index; do sleep 3; done"
    assert output == (f"requeue {requeued}\n{update}\n{wrapped}\n" if requeued else "")


def _run_guard(folder: Path, programs: dict[str, str], **variables: str) -> str:
    """Run the guard with these commands instead of SLURM's, and return its output."""
    srun = 'while [ "$1" != bash ]; do shift; done; exec "$@"'
    for name, text in {"srun": srun, **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    env = {**os.environ, "SLURMD_NODENAME": "node1", **variables, "PATH": path}
    command = ["bash", "-c", f"{GUARD} wait"]
    return subprocess.run(command, capture_output=True, text=True, env=env).stdout


def test_words_reach_the_supervisor_whole(tmp_path):
    """Use a path with spaces, quotes and percent signs, and a tricky value."""
    folder = tmp_path / "it's 50%"
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$OMP_NUM_THREADS" "$A" "$@"\n')
    python.chmod(0o755)
    profile = ClusterProfile(environment={"A": TRICKY}, python=str(python))
    log = f"{tmp_path}/it's 50%%/%j.out"
    text = format_script(Request(profile, 4, None), 1, "name", log, [folder])
    assert f'#SBATCH --output="{log}"' in text
    env = {name: os.environ[name] for name in os.environ if not name.startswith("OMP")}
    env["SLURM_CPUS_PER_TASK"] = "6"
    output = subprocess.check_output(["bash", "-c", text], text=True, env=env)
    threads, value, *words = output.removesuffix("\0").split("\0")
    assert (threads, value) == ("6", TRICKY)
    assert words[2:4] == ["--folder", str(folder)]
    assert words[-1] == f"{folder}/run.json"
