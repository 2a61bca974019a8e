"""Jobs on a real SLURM with every launcher. test_walkthrough.py covers sweeps and preflight."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ENDLESS, PROGRAMS, STEPS, TRAINING, Submit, write_profile
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import ROOT, micro_run

pytestmark = pytest.mark.end_to_end
SECRET = "not-for-others"
TRICKY = """a "quoted" $HOME, `b` % \\n"""


def test_jobs_share_nodes_hide_secrets_and_leave_nothing(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Two jobs at once on the same nodes have separate GPUs and consistent environments."""
    hosts = ("node1", "node2")
    variables = {"HF_TOKEN": SECRET, "TRICKY": TRICKY, "PYTORCH_CUDA_ALLOC_CONF": "a:1,b:2"}
    sbatch = ("--nodelist=node[1-2]", "--cpus-per-task=2")
    options: dict[str, Any] = {"variables": variables, "clap": ENDLESS, "sbatch": sbatch}
    jobs = [submit(2, launcher, **options) for launcher in ("slurm", "torchrun")]
    for job in jobs:
        job.wait_for_steps()
    for host in hosts:
        gpus = []
        for job in jobs:
            ranks = [*job.ranks(host).values()]
            assert len(ranks) == 2
            for rank in ranks:
                assert {name: rank.get(name) for name in variables} == variables
                assert rank["CLAP_TEST_LIST"] == "a,b"  # of the profile
            # All of the job's, of which each rank takes one by its local rank.
            assert ranks[0]["CUDA_VISIBLE_DEVICES"] == ranks[1]["CUDA_VISIBLE_DEVICES"]
            gpus += ranks[0]["CUDA_VISIBLE_DEVICES"].split(",")
        assert sorted(gpus) == ["0", "1", "2", "3"]
    assert cluster.processes(SECRET) == {}
    cluster.run("ctl", "scancel", *(job.number for job in jobs))
    for job in jobs:
        assert job.wait() == "CANCELLED"
        assert job.record["state"] == "terminated"
        assert [summary["state"] for summary in job.summaries] == ["terminated"]
    assert cluster.left_behind(PROGRAMS) == {}
    # SLURM stores a job's environment; this project must not.
    grep = ["grep", "-rl", SECRET, str(tmp_path)]
    assert subprocess.run(grep, capture_output=True, text=True).stdout == ""


def test_training_saves_at_its_time_and_is_queued_until_done(
    submit: Submit, cluster: SlurmCluster
) -> None:
    job = submit(2, request={"train": True, "auto_requeue": True}, clap=TRAINING)
    job.wait_for_steps()
    # Only to the ranks' step, as SLURM does before the limit.
    cluster.run("ctl", "scancel", "--signal=USR1", job.number)
    job.check_end("COMPLETED", 0)
    stopped, last = job.summaries
    assert (stopped["state"], last["state"]) == ("timeout", "completed")
    assert stopped["checkpoints"][-1]["saved"]
    assert (last["resumed_at_step"], last["step"]) == (stopped["step"], STEPS)
    assert [attempt["requeued"] for attempt in job.record["attempts"]] == [True, False]


def test_array_of_a_sweep_that_was_killed_is_found_and_completes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(micro_run()))
    # An sbatch that kills the sweep once it has submitted.
    (tmp_path / "bin").mkdir()
    kill_sweep = '[ "$1" = --test-only ] || kill -9 $PPID'
    sbatch = f'#!/bin/sh\n/usr/bin/env PATH="${{PATH#*:}}" sbatch "$@"\n{kill_sweep}\n'
    (tmp_path / "bin" / "sbatch").write_text(sbatch)
    (tmp_path / "bin" / "sbatch").chmod(0o755)

    def sweep(*words: str, path: str = os.environ["PATH"]) -> str:
        program = ["env", f"PATH={path}", sys.executable, str(ROOT / "launch" / "sweep.py")]
        return cluster.run("ctl", *program, *words, folder=tmp_path, check=False).stdout

    run = ["--cluster", write_profile(tmp_path), "--config", "tiny.json", "--folder", "lr"]
    options = ["--array", "--vary", "optimizer.params.lr=1e-3,2e-3"]
    sweep(*run, *options, path=f"{tmp_path}/bin:{os.environ['PATH']}")
    status = sweep("status", "lr")
    assert "n001-lr_0.001: recorded job " in status
    assert "n001-lr_0.002: recorded job " in status
    cluster.wait_until(lambda: "2 completed" in sweep("status", "lr"), 240, "both jobs' ends")
    assert "resubmitting 0 of 2 jobs" in sweep("resume", "lr")
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("lr/runs/*/config.json")]
    names = sorted(config["clap"]["output"]["run_name"] for config in configs)
    assert names == ["n001-lr_0.001", "n001-lr_0.002"]


def test_lock_of_another_host_is_stale_once_slurm_tells_so(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = (
        f"from clap_ds.run_records.lock import *; FolderLock(Path({str(tmp_path)!r})).acquire()"
    )
    acquire = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", program]
    sbatch = ["sbatch", "--parsable", "--array=3", "--nodelist=node1", "--output=/dev/null"]
    number = cluster.run("ctl", *sbatch, f"--wrap={shlex.join(acquire)}; sleep 600").stdout.strip()
    cluster.wait_until((tmp_path / "writer.json").exists, 60, "the lock")
    on_node2 = ["srun", "--nodelist=node2", *acquire]
    done = cluster.run("ctl", *on_node2, check=False)
    assert done.returncode != 0
    assert f"SLURM job {number}_3, " in done.stderr
    cluster.run("ctl", "scancel", number)
    cluster.wait_until_idle()
    assert "had a stale lock of host node1, " in cluster.run("ctl", *on_node2).stderr


@pytest.mark.parametrize(
    ("launcher", "nodes", "hostfile_edit", "hosts"),
    [("pdsh", 2, "", ["node1", "node2"]), ("slurm", 3, "1d", ["node2", "node3"])],
)
def test_deepspeeds_own_line_runs_on_the_hostfiles_hosts(
    cluster: SlurmCluster,
    tmp_path: Path,
    launcher: str,
    nodes: int,
    hostfile_edit: str,
    hosts: list[str],
) -> None:
    """Run the page's commands with a smaller model in salloc's shell on the login node. Hosts may be
    fewer than the allocation's. `hostfile_edit` is a `sed` expression."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("## DeepSpeed's own line")[2].partition("\n## ")[0]
    (write_hostfile,) = re.findall(r"^\$ (clap-ds hostfile.*)", section, re.MULTILINE)
    lines = re.findall(r"^\$ (deepspeed.*)", section, re.MULTILINE)
    is_slurm = launcher == "slurm"
    (start,) = (line for line in lines if ("--launcher slurm" in line) == is_slurm)
    cluster.wait_until_idle()
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "htsat_tiny.json").write_text(json.dumps(micro_run()))
    (tmp_path / "clap_ds").symlink_to(ROOT / "clap_ds")
    script = f"{write_hostfile} && sed -i '{hostfile_edit}' H\n{start}\n"
    (tmp_path / "start.sh").write_text(script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = [
        "env",
        f"PATH={path}",
        f"PYTHONPATH={ROOT}",
        "DS_ACCELERATOR=cpu",
        "OMP_NUM_THREADS=1",
    ]
    allocation = [f"--nodes={nodes}", "--ntasks-per-node=2", "--gpus-per-node=2"]
    command = [*environment, "salloc", "--quiet", *allocation, "bash", "start.sh"]
    cluster.run("ctl", *command, folder=tmp_path, timeout=240)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["state"] == "completed"
    assert json.loads((summary.parent / "environment.json").read_text())["hosts"] == hosts


def test_options_of_sbatch_reach_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(micro_run()))
    profile = write_profile(tmp_path, sbatch=["--begin=now+1hour"])
    run = ["--cluster", profile, "--config", str(tmp_path / "tiny.json")]

    def call(script: str, *options: str) -> str:
        command = [sys.executable, f"launch/{script}.py", *run, *options]
        return cluster.run("ctl", *command, folder=ROOT).stdout.strip()

    first = call("submit", "-p", "short", "-t", "5", "--parsable")
    array = ["--array", "--vary", "clap.seed=1,2", "--folder", str(tmp_path / "sweep")]
    call("sweep", *array, f"--dependency=afterok:{first}")
    queue = cluster.run("ctl", "squeue", "-hro", "%P %l %E").stdout.splitlines()
    cluster.run("ctl", "scancel", "--user=root")
    task = f"gpu 15:00 afterok:{first}(unfulfilled)"
    assert sorted(queue) == [task, task, "short 5:00 (null)"]
