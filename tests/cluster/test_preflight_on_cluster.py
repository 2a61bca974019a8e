"""Preflight on a real SLURM: all well under each launcher, and two hosts that aren't as the others."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.cluster.conftest import ROOT, site_file
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end


def _preflight(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    cluster.wait_until_idle()
    site_path = site_file(tmp_path, gpus_per_node=None, run_root=str(tmp_path / "my runs"))  # the allocation tells
    command = [sys.executable, "launch/preflight.py", "--site", site_path, "--launcher", launcher, "--megabytes", "4"]
    allocation = ["salloc", "--quiet", "--nodes=3", "--gpus-per-node=1"]
    return cluster.run("ctl", *allocation, *command, folder=ROOT, check=False, timeout=240)


@pytest.mark.parametrize("launcher", ["slurm", "pdsh", "torchrun"])
def test_healthy_cluster(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> None:
    if launcher == "pdsh":
        needs.no_space(sys.executable)
    result = _preflight(cluster, tmp_path, launcher)
    assert (result.returncode, "problem:" in result.stdout) == (0, False), result.stdout + result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split("  ")[-1] == "bus, GB/s"
    assert [row.split()[0] for row in rows[:4]] == [*cluster.nodes, "all"]
    assert list((tmp_path / "my runs").iterdir()) == []
    assert cluster.left_behind("preflight") == {}


@pytest.fixture
def two_odd_hosts(cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    """One host sees another version of a file, as with a checkout that wasn't updated, and one an empty package."""
    file, package = ROOT / "clap_ds" / "engine" / "loss.py", importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    changed, hidden = tmp_path / "loss.py", Path(package.origin).parent
    changed.write_text(file.read_text() + "# not what the others run\n")
    (tmp_path / "empty").mkdir()
    cluster.run("node3", "mount", "--bind", str(changed), str(file))
    cluster.run("node2", "mount", "--bind", str(tmp_path / "empty"), str(hidden))
    yield
    cluster.run("node3", "umount", str(file))
    cluster.run("node2", "umount", str(hidden))


def test_odd_hosts_are_named(cluster: SlurmCluster, tmp_path: Path, two_odd_hosts: None) -> None:
    result = _preflight(cluster, tmp_path, "slurm")
    found = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert (result.returncode, len(found)) == (1, 2), result.stdout + result.stderr
    assert found[0].startswith("problem: node3: code is ")
    assert found[1] == "problem: node2: transformers isn't installed"
