"""Batch scripts for several kinds of sites, executed by bash."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from clap_ds.launch.cluster_profile import ClusterProfile
from clap_ds.launch.sbatch import GUARD, Request, script

ROOT = Path(__file__).resolve().parents[2]
SPARE_NODES = "$((SLURM_JOB_NUM_NODES - 2))"
TRICKY = 'a "b" $HOME `c` %h!\nd'


def _commands(tmp_path: Path, text: str, **variables: str) -> list[list[str]]:
    """Return OMP_NUM_THREADS, A and the script's commands as bash runs them with a fake Python."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$OMP_NUM_THREADS" "${A-}" "$@" END\n')
    python.chmod(0o755)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMP"))
    }
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env={**kept, **variables}
    )
    return [each.strip("\0").split("\0") for each in done.stdout.split("END\0")[:-1]]


def test_the_script_is_read_at_a_glance() -> None:
    site = ClusterProfile(
        setup=["module load CUDA"], environment={"NCCL_ALGO": "Tree,Ring"}, cpus_per_task=8, account="mine",
        partition="gpu", python="/opt/python", srun=["--cpu-bind=cores"], requeues=1, sbatch=["--qos=big"],
    )  # fmt: skip
    request = Request(
        site,
        4,
        "gpu:4",
        train=True,
        time="1-00:00:00",
        options={"exclude": "n[1-2]"},
        spare_nodes=1,
        auto_requeue=True,
    )
    assert (
        script(request, 2, "name", "/jobs/one/slurm-%j.out", [Path("/jobs/one")])
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
    ("host", "state", "restarts", "requeued"),
    [
        ("down*", "RUNNING", 1, "7"),
        ("idle", "RUNNING", 1, ""),
        ("down*", "CANCELLED", 1, ""),
        ("down*", "RUNNING", 2, ""),
    ],
)
@pytest.mark.parametrize(
    "array", [{}, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}], ids=["job", "array"]
)
def test_a_lost_first_host_requeues_this_start_of_the_job(
    tmp_path: Path, array: dict[str, str], host: str, state: str, restarts: int, requeued: str
) -> None:
    """A guard that SLURM left on a host that was cut off must not start a job again that has ended
    or has other hosts, nor the other tasks of an array."""
    programs = {
        "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
        "sleep": f"mkdir {shlex.quote(str(tmp_path / 'slept'))}",  # fails the second time
        "sinfo": f"echo '{host}'",
        "scontrol": f'''[ "$1" = -o ] || {{ echo "$@"; [ "$1" = requeue ]; exit; }}
            echo "A=1 JobState={state} B=2 Restarts={restarts} C=3"''',
        "sbatch": 'shift $(($# - 1)); echo "$1"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", "SLURM_RESTART_COUNT": "1", **array}
    job["without_spares"] = "NumNodes=1 NumCPUs=1"
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", GUARD + " wait"],
        capture_output=True,
        text=True,
        env={**os.environ, **job, **paths},
    )
    number = f"{requeued}_2" if array else requeued
    update = f"update JobId={number} NumNodes=1 NumCPUs=1"
    # by another job
    refused = f"--wrap=while scontrol {update} 2>&1 | grep -q DB.index; do sleep 3; done"
    assert done.stdout == (f"requeue {number}\n{update}\n{refused}\n" if requeued else ""), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("shown", "goes_on"),
    [
        ("Id=7 JobState=RUNNING A=1 Restarts=0 B=2", True),
        ("Id=7 JobState=SUSPENDED A=1 Restarts=0 B=2", True),
        ("slurm_load_jobs error: Unable to contact slurm controller", True),
        ("Id=7 JobState=COMPLETING A=1 Restarts=0 B=2", False),
        ("Id=7 JobState=RUNNING A=1 Restarts=1 B=2", False),
        ("slurm_load_jobs error: Invalid job id specified", False),
    ],
)
def test_the_guard_ends_with_its_start_of_the_job(
    tmp_path: Path, shown: str, goes_on: bool
) -> None:
    rounds = shlex.quote(str(tmp_path / "rounds"))
    programs = {
        "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
        "sleep": f"echo >> {rounds}; [ $(wc -l < {rounds}) -lt 4 ]",
        "sinfo": "echo idle",
        "scontrol": f"echo '{shown}' >&2",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n1",
    }
    subprocess.run(
        ["bash", "-c", f"without_spares=; {GUARD} wait"],
        check=True,
        env={**os.environ, **variables},
    )
    assert (tmp_path / "rounds").read_text().count("\n") == (4 if goes_on else 1)


def test_words_reach_the_commands_whole(tmp_path: Path) -> None:
    """Use a path with spaces, quotes and percent signs, and a tricky value."""
    folder = tmp_path / "it's 50%"
    site = ClusterProfile(
        environment={"A": TRICKY}, python=str(tmp_path / "python"), launcher="torchrun"
    )
    text = script(Request(site, 4, None), 1, "name", f"{tmp_path}/it's 50%%/%j.out", [folder])
    assert f'#SBATCH --output="{tmp_path}/it\'s 50%%/%j.out"' in text
    (run,) = _commands(tmp_path, text, SLURM_CPUS_PER_TASK="6")
    assert run[:2] == ["6", TRICKY]
    job = ["--folder", str(folder), "--slots=4"]
    command = ["--", "clap_ds/bench.py", "--deepspeed_config", f"{folder}/run.json"]
    assert run[2:] == ["-m", "clap_ds.launch.supervisor", *job, *command]


@pytest.mark.parametrize(
    ("train", "limit", "seconds"),
    [
        (False, "00:15:00", 60),
        (False, "1:30", 60),
        (False, "00:01:00", 30),
        (True, "10", 300),
        (True, "00:09:00", 270),
    ],
)
def test_warning_is_never_more_than_half_the_limit(
    tmp_path: Path, train: bool, limit: str, seconds: int
) -> None:
    request = Request(ClusterProfile(), 4, None, train=train, time=limit)
    assert f"#SBATCH --signal=USR1@{seconds}\n" in script(request, 1, "name", "log", [tmp_path])
