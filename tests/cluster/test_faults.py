"""Faults on a real cluster: time to detection, the named cause, and cleanup."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, TRAINING, Submit
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end
LONGEST_S = 240  # generous: a hang is detected after a minute, or later if the run paused longer before


def _steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def test_job_is_queued_again_without_the_host_of_a_killed_rank(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, site={"requeues": 1}, asks={"train": True}, clap=TRAINING)
    job.wait_for_steps()
    pid, variables = min(job.ranks("node2").items())
    cluster.run("node2", "kill", "-9", pid)
    cluster.wait_until(lambda: cluster.job(job.number)["Restarts"] == "1", LONGEST_S, "another start")
    job.wait_for_steps(2)
    assert cluster.job(job.number)["ExcNodeList"] == "node2"
    job.ends("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["at_fault"], first["requeued"], second["state"]) == (["node2"], True, "completed")
    assert f"rank {variables['SLURM_PROCID']} on node2" in first["error"]
    assert job.summaries[0]["error"] == first["error"]
    assert "node2" not in second["hosts"]


def test_rank_that_stands_still_and_time_that_runs_out(submit: Submit, cluster: SlurmCluster) -> None:
    """Run two jobs at once, as both take a minute. Ranks that wait for the stopped one aren't blamed."""
    timed = submit(2, "torchrun", clap=ENDLESS, sbatch=("--time=10", "--signal=USR1@110", "--cpus-per-task=2"))
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
    assert (state["JobState"], timed.summaries[0]["state"], timed.record["state"]) == ("FAILED", "timeout", "timeout")
    assert cluster.left_behind(RANKS) == {}


@pytest.fixture
def cut(cluster: SlurmCluster) -> Iterator[Callable[[], None]]:
    """Disconnect node2 until the test ends."""
    yield lambda: cluster.cut("node2")
    cluster.connect("node2")


def test_host_that_cannot_be_reached_is_named(submit: Submit, cut: Callable[[], None]) -> None:
    cut()
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert job.wait(confirm_s=5)["JobState"] in ("FAILED", "COMPLETING")
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def test_spare_host_takes_over_from_a_lost_one(submit: Submit, cluster: SlurmCluster, cut: Callable[[], None]) -> None:
    """Training resumes from the newest checkpoint; the unreachable host ends its ranks itself."""
    clap = {**TRAINING, "train": {"max_samples": 10**9, "log_every_steps": 1}, "checkpoint": {"every_steps": 15}}
    job = submit(2, clap=clap, asks={"train": True, "spare_nodes": 1})
    job.wait_for_steps()
    cluster.wait_until(lambda: len(_steps(job.runs[0])) >= 20, LONGEST_S, "a checkpoint, and some steps more")
    cut()
    job.wait_for_steps(2)
    cluster.wait_until(lambda: _steps(job.runs[1])[:1] == [16], LONGEST_S, "the step after the checkpoint's")
    cluster.run("ctl", "scancel", job.number)
    cluster.wait_until(lambda: len(job.record["attempts"]) == 2, LONGEST_S, "the job's record of its end")
    first, second = job.record["attempts"]
    assert first["error"].startswith("lost node2: ")
    assert (first["at_fault"], second["hosts"]) == (["node2"], ["node1", "node3"])
    lost, resumed = job.summaries
    assert (lost["state"], resumed["resumed_at_step"]) == ("failed", 15)
    assert "node2" in lost["error"]
    cluster.wait_until(lambda: not cluster.processes(RANKS), LONGEST_S, "the lost host to end its ranks")
