"""Hosts that can't take part in a run, on a real cluster: no name resolution, a step that SLURM
refuses."""

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Submit, write_profile
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import ROOT

pytestmark = pytest.mark.end_to_end


def _preflight(cluster: SlurmCluster, folder: Path, *allocation: str) -> tuple[int, str]:
    """Run preflight in an allocation, and return its exit code and output."""
    salloc = ["env", f"PYTHONPATH={ROOT}", "salloc", "--quiet", *allocation]
    command = [sys.executable, str(ROOT / "launch" / "preflight.py")]
    command += ["--cluster", write_profile(folder)]
    done = cluster.run("ctl", *salloc, *command, folder=folder, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def test_host_that_cannot_resolve_names_is_named(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.99.0.2 node2\n")
    with cluster.mounted("node2", "--bind", str(tmp_path / "hosts"), "/etc/hosts"):
        code, output = _preflight(cluster, tmp_path, "--nodelist=node[1-2]", "--ntasks-per-node=2")
        assert code == 1
        assert "node2 can't resolve node1" in output
        job = submit(2)
        job.check_end("FAILED", 1)
    assert job.record["attempts"][0]["at_fault"] == ["node2"]
    assert "node2 can't resolve node1" in job.record["error"]


def test_step_that_slurm_refuses_blames_no_host(cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster.wait_until_idle()
    code, output = _preflight(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=1")
    assert code != 0
    assert "Unable to create step" in output
    assert "unreachable" not in output
