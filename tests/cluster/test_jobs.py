"""Jobs on a real SLURM with every launcher. test_walkthrough.py covers sweeps and preflight."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, ROOT, STEPS, TRAINING, Submit, site_file
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

pytestmark = pytest.mark.end_to_end
SECRET = "not-for-others"
TRICKY = """a "quoted" $HOME, `b` % \\n"""


def test_jobs_share_nodes_keep_their_secrets_and_leave_nothing(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Two jobs at once on the same nodes have separate GPUs and consistent environments."""
    variables = {"HF_TOKEN": SECRET, "TRICKY": TRICKY, "PYTORCH_CUDA_ALLOC_CONF": "a:1,b:2"}
    more: dict[str, Any] = {"variables": variables, "clap": ENDLESS}
    more["sbatch"] = ("--nodelist=node[1-2]", "--cpus-per-task=2")
    jobs = [submit(2, launcher, **more) for launcher in ("slurm", "torchrun")]
    for job in jobs:
        job.wait_for_steps()
    are_there = lambda: all(len(job.ranks(host)) == 2 for job in jobs for host in cluster.nodes[:2])  # noqa: E731
    cluster.wait_until(are_there, 60, "ranks")
    for host in cluster.nodes[:2]:
        ranks = [ranks for job in jobs for ranks in job.ranks(host).values()]
        taken = [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks]
        assert taken[0] == taken[1] != taken[2] == taken[3]  # a rank selects its GPU by local rank
        assert sorted(",".join({*taken}).split(",")) == ["0", "1", "2", "3"]
        for rank in ranks:
            assert {name: rank[name] for name in variables if name in rank} == variables
            assert rank["CLAP_TEST_LIST"] == "Tree,Ring"  # all of the site's variables
    assert cluster.processes(SECRET) == {}
    cluster.run("ctl", "scancel", *(job.number for job in jobs))
    for job in jobs:
        assert job.wait()["JobState"] == "CANCELLED"
        assert (
            [summary["state"] for summary in job.summaries]
            == [job.record["state"]]
            == ["terminated"]
        )
    assert cluster.left_behind(RANKS) == {}
    # SLURM stores a job's environment; this project must not.
    assert (
        subprocess.run(
            ["grep", "-rl", SECRET, str(tmp_path)], capture_output=True, text=True
        ).stdout
        == ""
    )


def test_training_saves_at_its_time_and_is_queued_until_done(
    submit: Submit, cluster: SlurmCluster
) -> None:
    """The job requeues itself first, then SLURM requeues it, as after a preemption."""
    job = submit(2, asks={"train": True, "auto_requeue": True}, clap=TRAINING)
    job.wait_for_steps()
    # Only to the ranks' step, as SLURM does before the limit.
    cluster.run("ctl", "scancel", "--signal=USR1", job.number)
    job.wait_for_steps(2)
    cluster.run("ctl", "scontrol", "requeue", job.number)
    job.wait_for_steps(3)
    job.ends("COMPLETED", 0)
    stopped, requeued, last = job.summaries
    assert [summary["state"] for summary in job.summaries] == ["timeout", "terminated", "completed"]
    assert stopped["checkpoints"][-1]["saved"]
    assert requeued["resumed_at_step"] == stopped["step"]
    assert (last["resumed_at_step"], last["step"]) == (requeued["step"], STEPS)
    assert [attempt["requeued"] for attempt in job.record["attempts"]] == [True, False, False]


def test_sweep_as_an_array(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(micro_run()))

    def sweep(*words: str) -> str:
        return cluster.run(
            "ctl", sys.executable, str(ROOT / "launch" / "sweep.py"), *words, folder=tmp_path
        ).stdout

    run = [
        "--cluster",
        site_file(tmp_path),
        "--config",
        "tiny.json",
        "--folder",
        "lr",
        "--gpus_per_node",
        "2",
    ]
    assert "submitted n001-lr_0.002: job " in sweep(
        *run, "--array", "--vary", "optimizer.params.lr=1e-3,2e-3"
    )
    cluster.wait_until(lambda: "2 completed" in sweep("status", "lr"), 240, "both jobs' ends")
    assert "resubmitting 0 of 2 jobs" in sweep("resume", "lr")
    runs = [
        json.loads(path.read_text())["clap"]["output"]["run_name"]
        for path in tmp_path.glob("lr/runs/*/config.json")
    ]
    assert sorted(runs) == ["n001-lr_0.001", "n001-lr_0.002"]


def test_a_killed_sweep_finds_the_job_that_it_submitted(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(micro_run()))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(
        '#!/bin/sh\n/usr/bin/env PATH="${PATH#*:}" sbatch "$@"\n[ "$1" = --test-only ] || kill -9 $PPID\n'
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)

    def sweep(*words: str, path: str = os.environ["PATH"]) -> str:
        program = ["env", f"PATH={path}", sys.executable, str(ROOT / "launch" / "sweep.py")]
        return cluster.run("ctl", *program, *words, folder=tmp_path, check=False).stdout

    run = [
        "--cluster",
        site_file(tmp_path),
        "--config",
        "tiny.json",
        "--folder",
        "s",
        "--gpus_per_node",
        "2",
    ]
    sweep(*run, "--nodes", "1", "2", path=f"{tmp_path}/bin:{os.environ['PATH']}")
    queued = cluster.run("ctl", "squeue", "-h", "-o", "%i").stdout.split()
    assert len(queued) == 1
    assert f"n001: recorded job {queued[0]}" in sweep("status", "s")
    assert "resubmitting 1 of 2 jobs: n002" in sweep("resume", "s")
    cluster.run("ctl", "scancel", "--user=root")


def test_a_lock_of_another_host_is_stale_once_slurm_says_so(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = (
        f"from clap_ds.run_records.lock import *; FolderLock(Path({str(tmp_path)!r})).acquire()"
    )
    acquire = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", program]
    wrapped = ["sbatch", "--parsable", "--array=3", "--nodelist=node1", "--output=/dev/null"]
    number = cluster.run("ctl", *wrapped, f"--wrap={shlex.join(acquire)}; sleep 600").stdout.strip()
    cluster.wait_until((tmp_path / "writer.json").exists, 60, "the lock")
    elsewhere = ["srun", "--nodelist=node2", *acquire]
    refused = cluster.run("ctl", *elsewhere, check=False)
    assert f"SLURM job {number}_3, " in refused.stderr
    assert refused.returncode != 0
    cluster.run("ctl", "scancel", number)
    cluster.wait_until_idle()
    assert "had a stale lock of host node1, " in cluster.run("ctl", *elsewhere).stderr


# --- DeepSpeed's own command, as at the start of docs/clusters.md


def _type_line(
    cluster: SlurmCluster, folder: Path, launcher: str, nodes: int, of_hosts: str, without: str
) -> tuple[int, str]:
    """Run the page's commands with a smaller model in salloc's shell on the login node; return exit
    code and output. `of_hosts` is a `sed` expression for the hostfile, and `without` is left out of
    deepspeed's line."""
    page = (
        (ROOT / "docs" / "clusters.md")
        .read_text()
        .partition("## DeepSpeed's own line")[2]
        .partition("\n## ")[0]
    )
    lines = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    (hostfile,) = (line for line in lines if line.startswith("clap-ds hostfile"))
    starts = (line for line in lines if line.startswith("deepspeed"))
    (start,) = (line for line in starts if ("--launcher slurm" in line) == (launcher == "slurm"))
    cluster.wait_until_idle()
    (folder / "ds_configs").mkdir()
    (folder / "ds_configs" / "htsat_tiny.json").write_text(json.dumps(micro_run()))
    (folder / "clap_ds").symlink_to(ROOT / "clap_ds")
    (folder / "start.sh").write_text(
        f"{hostfile} && sed -i '{of_hosts}' H\n{start.replace(without, '')}\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cpu = ("DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1")
    allocate = [
        "env",
        f"PATH={path}",
        f"PYTHONPATH={ROOT}",
        *cpu,
        "salloc",
        "--quiet",
        f"--nodes={nodes}",
    ]
    words = [*allocate, "--ntasks-per-node=2", "--gpus-per-node=2", "bash", "start.sh"]
    done = cluster.run("ctl", *words, folder=folder, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("launcher", "nodes", "of_hosts", "without", "expected"),
    [
        ("pdsh", 2, "", "", "node1 node2"),
        ("slurm", 3, "1d", "", "node2 node3"),
        ("pdsh", 1, "", " --force_multi", "error: --force_multi"),
    ],
)
def test_deepspeeds_own_line(
    cluster: SlurmCluster,
    tmp_path: Path,
    launcher: str,
    nodes: int,
    of_hosts: str,
    without: str,
    expected: str,
) -> None:
    """Only the hostfile's hosts compute, even if they are fewer than the allocation's; else an
    error says what to type."""
    code, shown = _type_line(cluster, tmp_path, launcher, nodes, of_hosts, without)
    if expected.startswith("error: "):
        assert code != 0
        assert expected.removeprefix("error: ") in shown
        assert cluster.left_behind(RANKS) == {}
        return
    assert code == 0, shown
    (run,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(run.read_text())["state"] == "completed"
    assert json.loads((run.parent / "environment.json").read_text())["hosts"] == expected.split()


def test_options_of_sbatch_reach_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(micro_run()))
    profile = site_file(tmp_path, sbatch=["--begin=now+1hour"])
    run = ["--cluster", profile, "--config", str(tmp_path / "tiny.json")]
    sweep = str(tmp_path / "sweep")

    def call(script: str, *options: str) -> subprocess.CompletedProcess[str]:
        return cluster.run(
            "ctl", sys.executable, f"launch/{script}.py", *options, check=False, folder=ROOT
        )

    def queue() -> list[str]:
        return sorted(cluster.run("ctl", "squeue", "-hro", "%P %l %E").stdout.splitlines())

    first = call("submit", *run, "-p", "short", "-t", "5", "--parsable").stdout.strip()
    after = f"--dependency=afterok:{first}"
    assert (
        call(
            "sweep", *run, "--folder", sweep, "--array", "--vary", "clap.seed=1,2", after
        ).returncode
        == 0
    )
    assert queue() == ["gpu 15:00 " + f"afterok:{first}(unfulfilled)"] * 2 + ["short 5:00 (null)"]
    cluster.run("ctl", "scancel", "--user=root")
