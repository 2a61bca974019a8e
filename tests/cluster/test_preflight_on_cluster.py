"""Preflight on a real SLURM: all well, one host with another clock, one with other code, GPUs that others have."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, site_file
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end

# Every process of a host, as far as it asks libc for the time of day, lives five minutes ahead.
SKEWED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += 300;
    return result;
}
"""

NVIDIA_SMI = """#!/bin/sh
for number in 0 1 2 3; do
    case $1 in
        --query-gpu=*) echo "$number, GPU-$number, 7 MiB, H100, 81559 MiB, 580.65.06" ;;
        *) echo "GPU-$number, 1, 7 MiB, python" ;;
    esac
done
"""


def _preflight(cluster: SlurmCluster, tmp_path: Path, *options: str, **site: Any) -> subprocess.CompletedProcess[str]:
    cluster.wait_until_idle()
    allocation = ["salloc", "--quiet", "--nodes=3", "--gpus-per-node=1"]
    site_path = site_file(tmp_path, gpus_per_node=None, **site)  # the allocation tells
    command = [sys.executable, "launch/preflight.py", "--site", site_path, *options]
    return cluster.run("ctl", *allocation, *command, folder=ROOT, check=False, timeout=240)


def _only_problem(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    (problem,) = re.findall("^problem: .*", result.stdout, re.MULTILINE)
    return problem


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
def other_clock(cluster: SlurmCluster, tmp_path: Path) -> Iterator[str]:
    source = tmp_path / "clock.c"
    source.write_text(SKEWED_CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    cluster.run("node2", "pkill", "-x", "sshd")
    cluster.start_sshd("node2", "-o", f"SetEnv=LD_PRELOAD={library}")
    yield "node2"
    cluster.run("node2", "pkill", "-x", "sshd")
    cluster.start_sshd("node2")


def test_other_clock_is_named(cluster: SlurmCluster, tmp_path: Path, other_clock: str) -> None:
    result = _preflight(cluster, tmp_path, "--launcher", "ssh", "--no_ranks")
    found = re.fullmatch(rf"problem: {other_clock}: the clock is off by \+([\d.]+) s", _only_problem(result))
    assert found
    assert 290 < float(found[1]) < 301  # 300, less the time it took to ask


@pytest.fixture
def other_code(cluster: SlurmCluster, tmp_path: Path) -> Iterator[str]:
    """One host sees another version of a file, as with a checkout that wasn't updated."""
    file = ROOT / "clap_ds" / "engine" / "loss.py"
    changed = tmp_path / "loss.py"
    changed.write_text(file.read_text() + "# not what the others run\n")
    cluster.run("node3", "mount", "--bind", str(changed), str(file))
    yield "node3"
    cluster.run("node3", "umount", str(file))


@pytest.mark.parametrize("launcher", ["ssh", "srun"])
def test_other_code_is_named(cluster: SlurmCluster, tmp_path: Path, other_code: str, launcher: str) -> None:
    result = _preflight(cluster, tmp_path, "--launcher", launcher, "--no_ranks")
    # slurmd of the host has its own view of the files, from before: only ssh and srun started in it see the change.
    assert _only_problem(result).startswith(f"problem: {other_code}: code is ")


@pytest.mark.parametrize("launcher", ["ssh", "srun"])
def test_gpus_that_others_have_matter_where_they_are_of_this_job(
    cluster: SlurmCluster, tmp_path: Path, launcher: str
) -> None:
    """Each host has four GPUs, all in use; the job was given one."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = _preflight(cluster, tmp_path, "--launcher", launcher, "--no_ranks", environment=environment)
    used = [line for line in result.stdout.splitlines() if "is in use by" in line]
    assert used == ["problem: node1, node2, node3: GPU 0 is in use by process 1 (python of root), 7 MiB"]
    assert "GPUs are visible" not in result.stdout
