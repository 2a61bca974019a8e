"""Hosts that can't take part in a run, on a real cluster: no name resolution, a step that SLURM
refuses."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import TRAINING, Submit, site_file
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import ROOT

pytestmark = pytest.mark.end_to_end


@contextlib.contextmanager
def replaced(cluster: SlurmCluster, host: str, path: Path, replacement: Path) -> Iterator[None]:
    """Let a host see other content at a path."""
    cluster.run(host, "mount", "--bind", str(replacement), str(path))
    try:
        yield
    finally:
        cluster.run(host, "umount", "--lazy", str(path))


def _preflight(cluster: SlurmCluster, folder: Path, *allocation: str) -> tuple[int, str]:
    words = [
        "env",
        f"PYTHONPATH={ROOT}",
        "DS_ACCELERATOR=cpu",
        "OMP_NUM_THREADS=1",
        "salloc",
        "--quiet",
        *allocation,
    ]
    words += [
        sys.executable,
        str(ROOT / "launch" / "preflight.py"),
        "--cluster",
        site_file(folder),
        "--megabytes",
        "1",
    ]
    done = cluster.run("ctl", *words, folder=folder, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def test_host_that_cannot_resolve_names_is_left_out(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.99.0.2 node2\n")
    with replaced(cluster, "node2", Path("/etc/hosts"), tmp_path / "hosts"):
        code, shown = _preflight(cluster, tmp_path, "--nodelist=node[1-2]", "--ntasks-per-node=2")
        print(shown)
        assert (code, "node2 can't resolve node1" in shown) == (1, True), shown
        job = submit(2, site={"requeues": 1}, asks={"train": True}, clap=TRAINING)
        cluster.wait_until(lambda: cluster.job(job.number)["Restarts"] == "1", 120, "another start")
        job.wait_for_steps()
        job.ends("COMPLETED", 0)
    first, last = job.record["attempts"]
    assert (first["at_fault"], first["requeued"]) == (["node2"], True)
    assert "node2 can't resolve node1" in first["error"]
    assert "node2" not in last["hosts"]


@pytest.mark.parametrize("tasks", [(), ("--ntasks-per-node=1",)])
def test_step_that_slurm_refuses_blames_no_host(
    cluster: SlurmCluster, tmp_path: Path, tasks: tuple[str, ...]
) -> None:
    cluster.wait_until_idle()
    code, shown = _preflight(cluster, tmp_path, "--nodes=2", *tasks)
    print(shown)
    assert code != 0
    assert "--ntasks-per-node=2" in shown if tasks else "Unable to create step" in shown
    assert "unreachable" not in shown
