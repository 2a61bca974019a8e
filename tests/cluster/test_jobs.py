"""Jobs on a real SLURM, through every launcher."""

import json
from typing import Any

import pytest

from tests.cluster.conftest import Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(("launcher", "nodes"), [("pdsh", 2), ("pdsh", 3), ("slurm", 2), ("srun", 3)])
def test_completes_through_every_launcher(submit: Submit, cluster: SlurmCluster, launcher: str, nodes: int) -> None:
    job = submit(nodes, launcher)
    job.ends("COMPLETED", 0)
    (run,), (summary,) = job.runs, job.summaries
    assert summary["state"] == job.record["state"] == "completed"
    assert (summary["num_nodes"], summary["world_size"]) == (nodes, 2 * nodes)
    environment = json.loads((run / "environment.json").read_text())
    assert sorted(environment["hosts"]) == cluster.nodes[:nodes]
    assert environment["gpus_per_node"] == [2] * nodes


def test_exit_code_and_state_are_the_runs(submit: Submit) -> None:
    job = submit(2, "pdsh", clap={"bench": {"windws": 2}})
    job.ends("FAILED", 2)
    assert job.output.count("clap.bench.windws: no such field; did you mean 'windows'?") == 1
    assert (job.record["state"], job.record["exit_code"]) == ("failed", 2)


def test_exhausted_memory_is_the_jobs_state(submit: Submit) -> None:
    job = submit(2, "srun", train_micro_batch_size_per_gpu=10**12)
    job.ends("FAILED", 1)
    assert job.record["state"] == job.summaries[0]["state"] == "out_of_memory"
    assert f"micro-batch {10**12}" in job.record["error"]


@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_training_saves_when_warned_and_the_next_job_resumes(
    submit: Submit, cluster: SlurmCluster, launcher: str
) -> None:
    options = ("--command", "clap_ds/train.py", "--grace", "60")  # as train.sbatch
    settings: dict[str, Any] = {"model": {"preset": "micro"}, "train": {"samples": 10**9, "log_every_steps": 1}}
    job = submit(2, launcher, options=options, clap=settings)
    job.wait_for_steps()
    cluster.run("ctl", "scancel", "--batch", "--signal=USR1", job.number)
    job.ends("FAILED", 138)
    (stopped,) = job.summaries
    assert stopped["state"] == job.record["state"] == "timeout"
    assert stopped["checkpoints"][-1]["saved"]
    assert stopped["checkpoints"][-1]["step"] == stopped["step"]

    settings["train"]["samples"] = stopped["samples"] + 5 * 4 * 4
    job = submit(2, launcher, options=options, clap=settings)
    job.ends("COMPLETED", 0)
    resumed = job.summaries[1]
    assert (resumed["resumed_at_step"], resumed["step"]) == (stopped["step"], stopped["step"] + 5)
