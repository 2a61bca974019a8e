"""Faults on a real cluster: time to detection, the named cause, and cleanup."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ENDLESS, TRAINING, Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end


def test_job_of_a_killed_rank_is_requeued_without_its_host(
    submit: Submit, cluster: SlurmCluster
) -> None:
    job = submit(2, profile={"requeues": 1}, request={"train": True}, clap=TRAINING)
    job.wait_for_steps()
    pid, variables = min(job.ranks("node2").items())
    cluster.run("node2", "kill", "-9", pid)
    job.wait_for_restart()
    job.wait_for_steps(2)
    assert cluster.job(job.number)["ExcNodeList"] == "node2"
    job.check_end("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], first["requeued"], second["state"]) == (["node2"], True, "completed")
    assert f"rank {variables['SLURM_PROCID']} on node2" in first["error"]
    assert job.summaries[0]["error"] == first["error"]
    assert "node2" not in second["hosts"]


# Kills the second rank of node2 while it imports torch.
HOOK = """
import os, sys

class Kill:
    def find_spec(self, name, path=None, target=None):
        is_second = "1" in (os.environ.get("LOCAL_RANK"), os.environ.get("SLURM_LOCALID"))
        if name == "torch.nn" and os.environ.get("SLURMD_NODENAME") == "node2" and is_second:
            os.kill(os.getpid(), 9)

sys.meta_path.insert(0, Kill())
"""


def test_host_of_a_rank_that_is_killed_at_its_start_is_replaced(
    submit: Submit, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    job = submit(2, "torchrun", profile={"environment": variables}, request={"spare_nodes": 1})
    job.check_end("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], second["hosts"]) == (["node2"], ["node1", "node3"])
    assert "node2" in first["error"]


def test_host_without_python_is_replaced_and_named(submit: Submit, cluster: SlurmCluster) -> None:
    with cluster.mounted("node2", "-t", "tmpfs", "tmpfs", str(Path(sys.executable).parent)):
        job = submit(2, request={"spare_nodes": 1})
        job.check_end("COMPLETED", 0)
    first, _ = job.record["attempts"]
    assert first["at_fault"] == ["node2"]
    assert "node2" in first["error"]
    assert "No such file or directory" in first["error"]


def test_rank_that_stands_still_is_named(submit: Submit, cluster: SlurmCluster) -> None:
    """Ranks that wait for the stopped one aren't blamed."""
    job = submit(2, clap=ENDLESS)
    job.wait_for_steps()
    stopped, variables = sorted(job.ranks("node2").items())[1]
    cluster.run("node2", "kill", "-STOP", stopped)
    job.check_end("FAILED", 1)
    assert f"rank {variables['SLURM_PROCID']} on node2" in job.record["error"]
    assert job.record["attempts"][0]["at_fault"] == ["node2"]


@pytest.fixture
def disconnect(cluster: SlurmCluster) -> Iterator[Callable[[str], None]]:
    """Disconnect nodes until the test ends."""
    with contextlib.ExitStack() as stack:

        def disconnect(host: str) -> None:
            stack.callback(cluster.connect, host)
            cluster.disconnect(host)

        yield disconnect


def test_host_that_cannot_be_reached_is_named(
    submit: Submit, disconnect: Callable[[str], None]
) -> None:
    disconnect("node2")
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert job.wait(confirm_s=5) in ("FAILED", "COMPLETING")
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def test_training_whose_first_host_is_lost_resumes_without_waiting_for_spares(
    submit: Submit, cluster: SlurmCluster, disconnect: Callable[[str], None]
) -> None:
    """All nodes that are left are needed. The new start doesn't wait for the job that changes this,
    either."""
    train = {"max_samples": 10**9, "log_every_steps": 1}
    clap = {**TRAINING, "train": train, "checkpoint": {"every_steps": 2}}
    job = submit(2, clap=clap, request={"train": True, "spare_nodes": 1})
    job.wait_for_steps()
    disconnect("node1")
    job.wait_for_restart()
    job.wait_for_steps(2)
    assert cluster.run("ctl", "squeue", "-h", "-o", "%i").stdout.split() == [job.number]
    cluster.run("ctl", "scancel", job.number)
    first, second = job.record["attempts"]
    assert first["state"] == "failed"
    assert first["error"].startswith("lost node1: ")
    assert second["hosts"] == ["node2", "node3"]
    assert job.summaries[-1]["resumed_at_step"] > 0
