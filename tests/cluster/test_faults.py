"""Faults on a real cluster: time to detection, the named cause, and cleanup."""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, TRAINING, Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end
LONGEST_S = (
    240  # generous: a hang is detected after a minute, or later if the run paused longer before
)


def _steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def test_job_is_queued_again_without_the_host_of_a_killed_rank(
    submit: Submit, cluster: SlurmCluster
) -> None:
    job = submit(2, site={"requeues": 1}, asks={"train": True}, clap=TRAINING)
    job.wait_for_steps()
    pid, variables = min(job.ranks("node2").items())
    cluster.run("node2", "kill", "-9", pid)
    cluster.wait_until(
        lambda: cluster.job(job.number)["Restarts"] == "1", LONGEST_S, "another start"
    )
    job.wait_for_steps(2)
    assert cluster.job(job.number)["ExcNodeList"] == "node2"
    job.ends("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], first["requeued"], second["state"]) == (["node2"], True, "completed")
    assert f"rank {variables['SLURM_PROCID']} on node2" in first["error"]
    assert job.summaries[0]["error"] == first["error"]
    assert "node2" not in second["hosts"]


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
    [
        (signal.SIGKILL, "slurm"),
        (signal.SIGSEGV, "slurm"),
        (signal.SIGTERM, "slurm"),
        (signal.SIGKILL, "torchrun"),
    ],
)
def test_signal_of_a_rank_that_imports_torch(
    submit: Submit, tmp_path: Path, number: signal.Signals, launcher: str
) -> None:
    """The host of a rank that was killed is replaced by a spare one; a rank that was stopped ends
    the job."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    variables["CLAP_TEST_SIGNAL"] = str(int(number))
    job = submit(2, launcher, site={"environment": variables}, asks={"spare_nodes": 1})
    if number == signal.SIGTERM:
        job.ends("FAILED", 143)
        assert job.record["state"] == "terminated"
        assert "rank 3 on node2: stopped by SIGTERM" in job.record["error"]
        return
    job.ends("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], second["hosts"]) == (["node2"], ["node1", "node3"])
    assert "node2" in first["error"]


def test_host_without_python_is_replaced_and_named(submit: Submit, cluster: SlurmCluster) -> None:
    folder = str(Path(sys.executable).parent)
    cluster.run("node2", "mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        job = submit(2, asks={"spare_nodes": 1})
        job.ends("COMPLETED", 0)
    finally:
        cluster.run("node2", "umount", folder)
    first, _ = job.record["attempts"]
    assert first["at_fault"] == ["node2"]
    assert "node2" in first["error"]
    assert "No such file or directory" in first["error"]


def test_rank_that_stands_still_and_time_that_runs_out(
    submit: Submit, cluster: SlurmCluster
) -> None:
    """Run two jobs at once, as both take a minute. Ranks that wait for the stopped one aren't
    blamed."""
    timed = submit(
        2, "torchrun", clap=ENDLESS, sbatch=("--time=10", "--signal=USR1@110", "--cpus-per-task=2")
    )
    hung = submit(2, clap=ENDLESS, sbatch=("--nodelist=node[1-2]", "--cpus-per-task=2"))
    for job in (timed, hung):
        job.wait_for_steps()
    # One to two minutes from now: SLURM rounds to minutes, and sends its warning immediately.
    hours, minutes, seconds = map(int, cluster.job(timed.number)["RunTime"].split(":"))
    limit = 60 * hours + minutes + math.ceil(seconds / 60) + 1
    stopped, variables = sorted(hung.ranks("node2").items())[1]
    cluster.run("node2", "kill", "-STOP", stopped)
    cluster.run("ctl", "scontrol", "update", f"JobId={timed.number}", f"TimeLimit={limit}")
    assert hung.wait(timeout=LONGEST_S)["JobState"] == "FAILED", hung.output
    assert f"rank {variables['SLURM_PROCID']} on node2" in hung.record["error"]
    assert hung.record["attempts"][0]["at_fault"] == ["node2"]
    state = timed.wait()
    assert (state["JobState"], timed.summaries[0]["state"], timed.record["state"]) == (
        "FAILED",
        "timeout",
        "timeout",
    )
    assert cluster.left_behind(RANKS) == {}


@pytest.fixture
def cut(cluster: SlurmCluster) -> Iterator[Callable[[str], None]]:
    """Disconnect nodes until the test ends."""
    gone: list[str] = []

    def disconnect(host: str) -> None:
        gone.append(host)
        cluster.cut(host)

    yield disconnect
    for host in gone:
        cluster.connect(host)


def test_host_that_cannot_be_reached_is_named(submit: Submit, cut: Callable[[str], None]) -> None:
    cut("node2")
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert job.wait(confirm_s=5)["JobState"] in ("FAILED", "COMPLETING")
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def test_lost_host_without_a_spare_left(
    submit: Submit, cluster: SlurmCluster, cut: Callable[[str], None]
) -> None:
    """One job has used its spare and requeues itself; SLURM requeues the other. Both record every
    attempt's cause."""
    train = {"max_samples": 10**9, "log_every_steps": 1}
    clap = {**TRAINING, "train": train, "checkpoint": {"every_steps": 15}}
    more: dict[str, Any] = {
        "clap": clap,
        "site": {"requeues": 1},
        "sbatch": ("--cpus-per-task=2", "--time=40"),
    }
    spared = submit(1, asks={"train": True, "spare_nodes": 1}, **more)
    spared.wait_for_steps()
    plain = submit(2, asks={"train": True}, **more)
    plain.wait_for_steps()
    assert (
        cluster.job(plain.number)["NodeList"]
        == cluster.job(spared.number)["NodeList"]
        == "node[1-2]"
    )
    cluster.run("node1", "kill", "-9", min(spared.ranks("node1")))
    spared.wait_for_steps(2)
    cluster.wait_until(
        lambda: len(_steps(spared.runs[1])) >= 20, LONGEST_S, "a checkpoint, and some steps more"
    )
    cut("node2")
    spared.wait_for_steps(3)
    plain.wait_for_steps(2)
    cluster.run("ctl", "scancel", spared.number, plain.number)
    for job, hosts, at_fault in (
        (spared, ["node1", "node2", "node3"], [["node1"], ["node2"], []]),
        (plain, ["node1 node2", "node1 node3"], [["node2"], []]),
    ):
        cluster.wait_until(
            lambda job=job: job.record["state"] == "terminated", LONGEST_S, "the record of the end"
        )
        attempts = job.record["attempts"]
        assert [" ".join(attempt["hosts"]) for attempt in attempts] == hosts
        assert [attempt["at_fault"] for attempt in attempts] == at_fault
        assert attempts[-2]["error"].startswith("lost node2: ")
        assert job.summaries[-1]["resumed_at_step"] > 0
    assert cluster.job(spared.number)["NumNodes"] == "1"
    assert plain.summaries[0]["error"] == plain.record["attempts"][0]["error"]


def test_job_with_spares_whose_first_host_is_lost(
    submit: Submit, cluster: SlurmCluster, cut: Callable[[str], None]
) -> None:
    """All nodes that are left are needed: the new start must not wait for a spare one, nor for the
    job that changes this."""
    job = submit(2, clap=ENDLESS, asks={"spare_nodes": 1})
    job.wait_for_steps()
    cut("node1")
    cluster.wait_until(
        lambda: cluster.job(job.number)["Restarts"] == "1", LONGEST_S, "another start"
    )
    job.wait_for_steps(2)
    assert cluster.run("ctl", "squeue", "-h", "-o", "%i").stdout.split() == [job.number]
    cluster.run("ctl", "scancel", job.number)
    first, second = job.record["attempts"]
    assert (first["state"], first["error"].split(":")[0]) == ("failed", "lost node1")
    assert second["hosts"] == ["node2", "node3"]
