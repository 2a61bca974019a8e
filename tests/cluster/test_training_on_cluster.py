"""Training on a real SLURM: the warning before the time limit saves, and the next job goes on."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import RANKS, Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end
AS_TRAIN_SBATCH = ("--command", "clap_ds/train.py", "--grace", "60")


@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_a_job_told_to_stop_saves_and_the_next_one_goes_on(
    submit: Submit, cluster: SlurmCluster, launcher: str
) -> None:
    settings = {"model": {"preset": "micro"}, "train": {"samples": 10**9, "log_every_steps": 1}}
    job = submit(2, launcher, options=AS_TRAIN_SBATCH, clap=settings)
    job.wait_for_steps()
    cluster.run("ctl", "scancel", "--batch", "--signal=USR1", job.number)
    state = job.wait()
    assert state["ExitCode"] == "138:0", job.output
    assert job.record["state"] == "timeout"
    stopped = job.summaries[0]
    assert stopped["state"] == "timeout"
    assert stopped["checkpoints"][-1]["saved"]
    assert stopped["checkpoints"][-1]["step"] == stopped["step"]
    assert cluster.left_behind(RANKS) == {}

    settings["train"]["samples"] = stopped["samples"] + 5 * 4 * 4
    job = submit(2, launcher, options=AS_TRAIN_SBATCH, clap=settings)
    state = job.wait()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    resumed = job.summaries[1]
    assert (resumed["resumed_at_step"], resumed["step"]) == (stopped["step"], stopped["step"] + 5)
    assert cluster.left_behind(RANKS) == {}
