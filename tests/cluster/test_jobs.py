"""Jobs on a real SLURM, through every launcher."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.cluster.conftest import ENDLESS, ROOT, Submit
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

pytestmark = pytest.mark.end_to_end
CPU = ("DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1")
SECRET = "not-for-others"
TRICKY = """a "quoted" $HOME, `b` % \\n"""


@pytest.mark.parametrize(("launcher", "nodes"), [("slurm", 2), ("pdsh", 2), ("torchrun", 2), ("slurm", 1)])
def test_completes_through_every_launcher(submit: Submit, cluster: SlurmCluster, launcher: str, nodes: int) -> None:
    job = submit(nodes, launcher)
    job.ends("COMPLETED", 0)
    (run,), (summary,) = job.runs, job.summaries
    assert summary["state"] == job.record["state"] == "completed"
    assert (summary["num_nodes"], summary["world_size"]) == (nodes, 2 * nodes)
    environment = json.loads((run / "environment.json").read_text())
    assert sorted(environment["hosts"]) == cluster.nodes[:nodes]
    assert environment["gpus_per_node"] == [2] * nodes


def test_jobs_share_nodes_and_keep_their_secrets(submit: Submit, cluster: SlurmCluster, tmp_path: Path) -> None:
    """Two jobs at once on the same nodes: each has GPUs of its own, and one environment."""
    variables = {"HF_TOKEN": SECRET, "TRICKY": TRICKY, "PYTORCH_CUDA_ALLOC_CONF": "a:1,b:2"}
    more: dict[str, Any] = {"variables": variables, "clap": ENDLESS}
    more["sbatch"] = ("--nodelist=node[1-2]", "--cpus-per-task=2")
    jobs = [submit(2, launcher, **more) for launcher in ("slurm", "torchrun")]
    for job in jobs:
        job.wait_for_steps()
    cluster.wait_until(
        lambda: all(len(job.ranks(host)) == 2 for job in jobs for host in cluster.nodes[:2]), 60, "ranks"
    )
    for host in cluster.nodes[:2]:
        ranks = [ranks for job in jobs for ranks in job.ranks(host).values()]
        taken = [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks]
        assert taken[0] == taken[1] != taken[2] == taken[3]  # by its local rank a rank takes its own of the host's
        assert sorted(",".join({*taken}).split(",")) == ["0", "1", "2", "3"]
        for rank in ranks:
            assert {name: rank[name] for name in variables if name in rank} == variables
            assert rank["CLAP_TEST_LIST"] == "Tree,Ring"  # the site's settings, whole
    assert cluster.processes(SECRET) == {}
    for job in jobs:
        cluster.run("ctl", "scancel", job.number)
    for job in jobs:
        job.wait()
    # SLURM keeps a job's own environment; nothing of this project's does.
    assert subprocess.run(["grep", "-rl", SECRET, str(tmp_path)], capture_output=True, text=True).stdout == ""


def test_exit_code_and_state_are_the_runs(submit: Submit) -> None:
    job = submit(2, clap={"bench": {"windws": 2}})
    job.ends("FAILED", 2)
    message = "clap.bench.windws: no such field; did you mean 'windows'?"
    assert job.output.count(message) == 2  # rank 0's, and the job's
    assert (job.record["state"], job.record["exit_code"]) == ("failed", 2)
    assert message in job.record["error"]


def test_exhausted_memory_is_the_jobs_state(submit: Submit) -> None:
    job = submit(2, train_micro_batch_size_per_gpu=10**12)
    job.ends("FAILED", 1)
    assert job.record["state"] == job.summaries[0]["state"] == "out_of_memory"
    assert f"micro-batch {10**12}" in job.record["error"]


def test_training_saves_at_its_time_and_is_queued_until_done(submit: Submit, cluster: SlurmCluster) -> None:
    settings: dict[str, Any] = {"model": {"preset": "micro"}, "train": {"samples": 16 * 120, "log_every_steps": 1}}
    job = submit(2, asks={"train": True, "until_done": True}, clap=settings)
    job.wait_for_steps()
    cluster.run(
        "ctl", "scancel", "--signal=USR1", job.number
    )  # as SLURM does before the limit: to the ranks' step alone
    job.wait_for_steps(2)
    job.ends("COMPLETED", 0)
    stopped, resumed = job.summaries
    assert stopped["state"] == "timeout"
    assert stopped["checkpoints"][-1]["saved"]
    assert (resumed["resumed_at_step"], resumed["step"]) == (stopped["step"], 120)
    assert [(attempt["state"], attempt["requeued"]) for attempt in job.record["attempts"]] == [
        ("timeout", True), ("completed", False),
    ]  # fmt: skip


def test_requeued_by_slurm_resumes(submit: Submit, cluster: SlurmCluster) -> None:
    """As after a preemption: the ranks save when they are told to end, and the next start goes on."""
    settings: dict[str, Any] = {"model": {"preset": "micro"}, "train": {"samples": 16 * 120, "log_every_steps": 1}}
    job = submit(2, asks={"train": True}, clap=settings)
    job.wait_for_steps()
    cluster.run("ctl", "scontrol", "requeue", job.number)
    job.wait_for_steps(2)
    job.ends("COMPLETED", 0)
    stopped, resumed = job.summaries
    assert (stopped["state"], resumed["state"]) == ("terminated", "completed")
    assert resumed["resumed_at_step"] == stopped["step"]


def test_two_runs_in_one_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Neither takes the other's processes for its own, or its port."""
    cluster.wait_until_idle()
    (tmp_path / "micro.json").write_text(json.dumps(micro_run(clap={"output": {"root": str(tmp_path / "runs")}})))
    python = shlex.quote(sys.executable)
    run = f"mkdir {tmp_path}/$n && {python} launch/hostfile.py --output {tmp_path}/$n/hostfile --slots 2"
    run += f" && {python} -m clap_ds.launch.job --folder {tmp_path}/$n"
    run += f" -- clap_ds/bench.py --deepspeed_config {tmp_path}/micro.json"
    both = f"for n in 1 2; do ({run}) > {tmp_path}/$n.out 2>&1 & done; wait"
    allocate = ["env", *CPU, "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    cluster.run("ctl", *allocate, "bash", "-c", both, folder=ROOT, timeout=240)
    for number in (1, 2):
        record = json.loads((tmp_path / str(number) / "job.json").read_text())
        assert record["state"] == "completed", (tmp_path / f"{number}.out").read_text()
    assert len({re.sub(r".*/", "", path.parent.name) for path in tmp_path.glob("runs/*/summary.json")}) == 2


# --- DeepSpeed's own line, as the first lines of docs/cluster.md have it


def _line(launcher: str) -> str:
    """The page's commands, in a shell of salloc's, on a smaller model."""
    page = (ROOT / "docs" / "cluster.md").read_text().partition("## DeepSpeed's own line")[2].partition("\n## ")[0]
    lines = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    (hostfile,) = (line for line in lines if line.startswith("clap-hostfile"))
    (start,) = (
        line for line in lines if line.startswith("deepspeed") and ("--launcher slurm" in line) == (launcher == "slurm")
    )
    return f"{hostfile} && {start}"


@pytest.mark.parametrize(("launcher", "nodes"), [("pdsh", 2), ("slurm", 2), ("slurm", 1)])
def test_deepspeeds_own_line(cluster: SlurmCluster, tmp_path: Path, launcher: str, nodes: int) -> None:
    """From a folder with nothing in it but the run's JSON; the login node computes nothing."""
    cluster.wait_until_idle()
    if launcher == "pdsh":
        needs.no_space(sys.executable)
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "htsat_tiny.json").write_text(json.dumps(micro_run()))
    (tmp_path / "clap_ds").symlink_to(ROOT / "clap_ds")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    allocate = ["env", f"PATH={path}", f"PYTHONPATH={ROOT}", *CPU, "salloc", "--quiet", f"--nodes={nodes}"]
    words = [*allocate, "--ntasks-per-node=2", "--gpus-per-node=2", "bash", "-c", _line(launcher)]
    done = cluster.run("ctl", *words, folder=tmp_path, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.glob("runs/*/summary.json")
    assert (json.loads(run.read_text())["state"], json.loads(run.read_text())["world_size"]) == ("completed", 2 * nodes)
    assert json.loads((run.parent / "environment.json").read_text())["hosts"] == cluster.nodes[:nodes]
    assert ("--force_multi" in done.stderr) == (nodes == 1), "what else DeepSpeed would do is said"
