"""Jobs on a real SLURM, through every launcher."""

from __future__ import annotations

import json

import pytest

from tests.cluster.conftest import RANKS, Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(("launcher", "nodes"), [("pdsh", 2), ("pdsh", 3), ("slurm", 2), ("srun", 3)])
def test_completes_through_every_launcher(submit: Submit, cluster: SlurmCluster, launcher: str, nodes: int) -> None:
    job = submit(nodes, launcher)
    state = job.wait()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    (run,), (summary,) = job.runs, job.summaries
    assert summary["state"] == job.record["state"] == "completed"
    assert (summary["num_nodes"], summary["world_size"]) == (nodes, 2 * nodes)
    environment = json.loads((run / "environment.json").read_text())
    assert sorted(environment["hosts"]) == cluster.nodes[:nodes]
    assert environment["gpus_per_node"] == [2] * nodes
    assert cluster.left_behind(RANKS) == {}


def test_exit_code_and_state_are_the_runs(submit: Submit) -> None:
    job = submit(2, "pdsh", clap={"bench": {"windws": 2}})
    state = job.wait()
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), job.output
    assert job.output.count("clap.bench.windws: no such field; did you mean 'windows'?") == 1
    assert (job.record["state"], job.record["exit_code"]) == ("failed", 2)


def test_exhausted_memory_is_the_jobs_state(submit: Submit) -> None:
    job = submit(2, "srun", train_micro_batch_size_per_gpu=10**12)
    state = job.wait()
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "1:0"), job.output
    assert job.record["state"] == job.summaries[0]["state"] == "out_of_memory"
    assert f"micro-batch {10**12}" in job.record["error"]
