"""Faults on a real cluster: time to detection, the named cause, and cleanup."""

import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import DETECTION_LIMIT_S, ENDLESS, PROGRAMS, TRAINING, Submit
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


# Sends a signal to the second rank of node2 while it imports torch.
HOOK = """
import os, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        is_second = "1" in (os.environ.get("LOCAL_RANK"), os.environ.get("SLURM_LOCALID"))
        if name == "torch.nn" and os.environ.get("SLURMD_NODENAME") == "node2" and is_second:
            os.kill(os.getpid(), int(os.environ["CLAP_TEST_SIGNAL"]))

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    ("number", "launcher"),
    [(signal.SIGSEGV, "slurm"), (signal.SIGTERM, "slurm"), (signal.SIGKILL, "torchrun")],
)
def test_host_of_a_rank_that_is_killed_at_its_start_is_replaced(
    submit: Submit, tmp_path: Path, number: signal.Signals, launcher: str
) -> None:
    """A rank that was asked to stop ends the job."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    variables = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tmp_path),
        "CLAP_TEST_SIGNAL": str(int(number)),
    }
    job = submit(2, launcher, profile={"environment": variables}, request={"spare_nodes": 1})
    if number == signal.SIGTERM:
        job.check_end("FAILED", 143)
        assert job.record["state"] == "terminated"
        assert "rank 3 on node2: stopped by SIGTERM" in job.record["error"]
        return
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


def test_rank_that_stands_still_is_named_and_time_limit_ends_a_run(
    submit: Submit, cluster: SlurmCluster
) -> None:
    """Run two jobs at once, as both take a minute. Ranks that wait for the stopped one aren't
    blamed."""
    cpus = "--cpus-per-task=2"
    timed = submit(2, "torchrun", clap=ENDLESS, sbatch=("--time=10", "--signal=USR1@110", cpus))
    hung = submit(2, clap=ENDLESS, sbatch=("--nodelist=node[1-2]", cpus))
    for job in (timed, hung):
        job.wait_for_steps()
    stopped, variables = sorted(hung.ranks("node2").items())[1]
    cluster.run("node2", "kill", "-STOP", stopped)
    # One to two minutes from now: SLURM rounds to minutes, and sends its warning immediately.
    hours, minutes, seconds = map(int, cluster.job(timed.number)["RunTime"].split(":"))
    limit = 60 * hours + minutes + math.ceil(seconds / 60) + 1
    cluster.run("ctl", "scontrol", "update", f"JobId={timed.number}", f"TimeLimit={limit}")
    assert hung.wait(DETECTION_LIMIT_S) == "FAILED", hung.output
    assert f"rank {variables['SLURM_PROCID']} on node2" in hung.record["error"]
    assert hung.record["attempts"][0]["at_fault"] == ["node2"]
    assert timed.wait() == "FAILED", timed.output
    assert (timed.summaries[0]["state"], timed.record["state"]) == ("timeout", "timeout")
    assert cluster.left_behind(PROGRAMS) == {}


@pytest.fixture
def disconnect(cluster: SlurmCluster) -> Iterator[Callable[[str], None]]:
    """Disconnect nodes until the test ends."""
    disconnected: list[str] = []

    def disconnect(host: str) -> None:
        disconnected.append(host)
        cluster.disconnect(host)

    yield disconnect
    for host in disconnected:
        cluster.connect(host)


def test_host_that_cannot_be_reached_is_named(
    submit: Submit, disconnect: Callable[[str], None]
) -> None:
    disconnect("node2")
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert job.wait(confirm_s=5) in ("FAILED", "COMPLETING")
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def _count_steps(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count('"loss"')


def test_lost_host_without_a_spare_left_requeues_the_job(
    submit: Submit, cluster: SlurmCluster, disconnect: Callable[[str], None]
) -> None:
    """One job has used its spare and requeues itself; SLURM requeues the other. Both record every
    attempt's cause."""
    train = {"max_samples": 10**9, "log_every_steps": 1}
    options: dict[str, Any] = {
        "clap": {**TRAINING, "train": train, "checkpoint": {"every_steps": 15}},
        "profile": {"requeues": 1},
        "sbatch": ("--cpus-per-task=2", "--time=40"),
    }
    spared = submit(1, request={"train": True, "spare_nodes": 1}, **options)
    spared.wait_for_steps()
    plain = submit(2, request={"train": True}, **options)
    plain.wait_for_steps()
    for job in (spared, plain):
        assert cluster.job(job.number)["NodeList"] == "node[1-2]"
    cluster.run("node1", "kill", "-9", min(spared.ranks("node1")))
    spared.wait_for_steps(2)
    has_checkpoint = lambda: _count_steps(spared.runs[1]) >= 20  # noqa: E731
    cluster.wait_until(has_checkpoint, DETECTION_LIMIT_S, "a checkpoint, and some steps more")
    disconnect("node2")
    spared.wait_for_steps(3)
    plain.wait_for_steps(2)
    cluster.run("ctl", "scancel", spared.number, plain.number)
    for job, hosts, at_fault in (
        (spared, [["node1"], ["node2"], ["node3"]], [["node1"], ["node2"], []]),
        (plain, [["node1", "node2"], ["node1", "node3"]], [["node2"], []]),
    ):
        is_recorded = lambda job=job: job.record["state"] == "terminated"  # noqa: E731
        cluster.wait_until(is_recorded, DETECTION_LIMIT_S, "the record of the end")
        attempts = job.record["attempts"]
        assert [attempt["hosts"] for attempt in attempts] == hosts
        assert [attempt["at_fault"] for attempt in attempts] == at_fault
        assert attempts[-2]["error"].startswith("lost node2: ")
        assert job.summaries[-1]["resumed_at_step"] > 0
    assert cluster.job(spared.number)["NumNodes"] == "1"
    assert plain.summaries[0]["error"] == plain.record["attempts"][0]["error"]


def test_job_with_spares_whose_first_host_is_lost_starts_without_waiting_for_spares(
    submit: Submit, cluster: SlurmCluster, disconnect: Callable[[str], None]
) -> None:
    """All nodes that are left are needed. The new start doesn't wait for the job that changes this,
    either."""
    job = submit(2, clap=ENDLESS, request={"spare_nodes": 1})
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
