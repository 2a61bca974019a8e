"""Jobs on a real SLURM with every launcher. test_walkthrough.py covers sweeps and preflight."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ENDLESS, PROGRAMS, STEPS, TRAINING
from tests.conftest import ROOT, micro_run

pytestmark = pytest.mark.end_to_end
SECRET = "not-for-others"
TRICKY = """a "quoted" $HOME, `b` % \\n"""


def test_jobs_share_nodes_hide_secrets_and_leave_nothing(submit, cluster, tmp_path):
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


def test_training_is_requeued_without_a_bad_host_and_at_its_time_until_done(submit, cluster):
    request = {"train": True, "auto_requeue": True}
    job = submit(2, profile={"requeues": 1}, request=request, clap=TRAINING)
    job.wait_for_steps()
    pid, variables = min(job.ranks("node2").items())
    cluster.run("node2", "kill", "-9", pid)
    job.wait_for_restart()
    job.wait_for_steps(2)
    assert cluster.job(job.number)["ExcNodeList"] == "node2"
    # Only to the ranks' step, as SLURM does before the limit.
    cluster.run("ctl", "scancel", "--signal=USR1", job.number)
    job.check_end("COMPLETED", 0)
    killed, stopped, last = job.record["attempts"]
    assert killed["at_fault"] == ["node2"]
    assert f"rank {variables['SLURM_PROCID']} on node2" in killed["error"]
    assert "node2" not in last["hosts"]
    assert [killed["requeued"], stopped["requeued"], last["requeued"]] == [True, True, False]
    first_run, stopped_run, last_run = job.summaries
    assert first_run["error"] == killed["error"]
    assert (stopped_run["state"], last_run["state"]) == ("timeout", "completed")
    assert stopped_run["checkpoints"][-1]["saved"]
    assert (last_run["resumed_at_step"], last_run["step"]) == (stopped_run["step"], STEPS)


def test_training_continues_on_fewer_nodes_with_the_same_global_batch(submit, cluster):
    clap = {**TRAINING, "checkpoint": {"every_steps": 2}}
    sizes = {"train_batch_size": 16, "gradient_accumulation_steps": None}
    job = submit(2, request={"train": True, "fewer_nodes": [1]}, clap=clap, **sizes)
    job.wait_for_steps()
    cluster.run("node2", "kill", "-9", min(job.ranks("node2")))
    job.check_end("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], second["hosts"]) == (["node2"], ["node1"])
    killed, last = job.summaries
    assert (killed["world_size"], last["world_size"]) == (4, 2)
    assert last["step"] == STEPS
    assert last["samples"] == 16 * STEPS
    assert last["resumed_at_step"] > 0


@pytest.mark.parametrize(
    ("launcher", "nodes", "hostfile_edit", "hosts"),
    [("pdsh", 2, "", ["node1", "node2"]), ("slurm", 3, "1d", ["node2", "node3"])],
)
def test_deepspeeds_own_line_runs_on_the_hostfiles_hosts(
    cluster, tmp_path, launcher, nodes, hostfile_edit, hosts
):
    """Run the page's commands with a smaller model in salloc's shell on the login node. Hosts may be
    fewer than the allocation's. `hostfile_edit` is a `sed` expression."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("## DeepSpeed's launcher")[2].partition("\n## ")[0]
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
