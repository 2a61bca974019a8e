"""Faults on a real cluster: time to detection, the named cause, and cleanup."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ENDLESS, TRAINING, write_profile
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import ROOT

pytestmark = pytest.mark.end_to_end


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


def test_host_of_a_rank_that_is_killed_at_its_start_is_replaced(submit, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    job = submit(2, "torchrun", profile={"environment": variables}, request={"spare_nodes": 1})
    job.check_end("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], second["hosts"]) == (["node2"], ["node1", "node3"])
    assert "node2" in first["error"]


def test_host_without_python_is_replaced_and_named(submit, cluster):
    with cluster.mounted("node2", "-t", "tmpfs", "tmpfs", str(Path(sys.executable).parent)):
        job = submit(2, request={"spare_nodes": 1})
        job.check_end("COMPLETED", 0)
    first, _ = job.record["attempts"]
    assert first["at_fault"] == ["node2"]
    assert "node2" in first["error"]
    assert "No such file or directory" in first["error"]


def test_rank_that_stands_still_is_named(submit, cluster):
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


def test_host_that_cannot_be_reached_is_named(submit, disconnect):
    disconnect("node2")
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert job.wait(confirm_s=5) in ("FAILED", "COMPLETING")
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def test_training_whose_first_host_is_lost_resumes_without_waiting_for_spares(
    submit, cluster, disconnect
):
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


def _preflight(cluster: SlurmCluster, folder: Path, *allocation: str) -> tuple[int, str]:
    """Run preflight in an allocation, and return its exit code and output."""
    salloc = ["env", f"PYTHONPATH={ROOT}", "salloc", "--quiet", *allocation]
    command = [sys.executable, str(ROOT / "launch" / "preflight.py")]
    command += ["--cluster", write_profile(folder)]
    done = cluster.run("ctl", *salloc, *command, folder=folder, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def test_host_that_cannot_resolve_names_is_named(cluster, tmp_path):
    cluster.wait_until_idle()
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.99.0.2 node2\n")
    with cluster.mounted("node2", "--bind", str(tmp_path / "hosts"), "/etc/hosts"):
        code, output = _preflight(cluster, tmp_path, "--nodelist=node[1-2]", "--ntasks-per-node=2")
    assert code == 1
    assert "node2 can't resolve node1" in output


def test_step_that_slurm_refuses_blames_no_host(cluster, tmp_path):
    cluster.wait_until_idle()
    code, output = _preflight(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=1")
    assert code != 0
    assert "Unable to create step" in output
    assert "unreachable" not in output
