"""Preflight on a real SLURM: all well, and one host with other code."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, site_file
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end


def _preflight(cluster: SlurmCluster, tmp_path: Path, *options: str, **site: Any) -> subprocess.CompletedProcess[str]:
    cluster.wait_until_idle()
    allocation = ["salloc", "--quiet", "--nodes=3", "--gpus-per-node=1"]
    site_path = site_file(tmp_path, gpus_per_node=None, **site)  # the allocation tells
    command = [sys.executable, "launch/preflight.py", "--site", site_path, *options]
    return cluster.run("ctl", *allocation, *command, folder=ROOT, check=False, timeout=240)


@pytest.mark.parametrize("launcher", ["ssh", "srun"])
def test_healthy_cluster(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> None:
    result = _preflight(cluster, tmp_path, "--launcher", launcher, "--megabytes", "4")
    assert (result.returncode, "problem:" in result.stdout) == (0, False), result.stdout + result.stderr
    for host in cluster.nodes:
        assert any(line.startswith(host) and " yes " in line for line in result.stdout.splitlines())
    assert "bus, GB/s" in result.stdout
    assert list((tmp_path / "runs").iterdir()) == []
    assert cluster.left_behind("host_agent|preflight") == {}


@pytest.fixture
def other_code(cluster: SlurmCluster, tmp_path: Path) -> Iterator[str]:
    """One host sees another version of a file, as with a checkout that wasn't updated."""
    file = ROOT / "clap_ds" / "engine" / "loss.py"
    changed = tmp_path / "loss.py"
    changed.write_text(file.read_text() + "# not what the others run\n")
    cluster.run("node3", "mount", "--bind", str(changed), str(file))
    yield "node3"
    cluster.run("node3", "umount", str(file))


def test_other_code_is_named(cluster: SlurmCluster, tmp_path: Path, other_code: str) -> None:
    result = _preflight(cluster, tmp_path, "--launcher", "ssh", "--no_ranks")
    (problem,) = (line for line in result.stdout.splitlines() if line.startswith("problem: "))
    assert problem.startswith(f"problem: {other_code}: code is ")
    assert result.returncode == 1
