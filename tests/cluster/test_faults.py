"""What goes wrong on clusters, brought about on a real one: how soon it is clear, who is named, and that nothing is left."""

import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, Submit, Submitted
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.end_to_end
LIMIT_S = 60  # by when a fault must have ended the job
HANG_S = 90  # and a host that is lost
LONGEST_S = 240  # a rank that stands still: a minute, or longer where the run has made long pauses before
TRAINING: dict[str, Any] = {"model": {"preset": "micro"}, "train": {"samples": 16 * 150, "log_every_steps": 1}}


def _end(job: Submitted, began: float, limit_s: float = LIMIT_S, *, unreachable: bool = False) -> tuple[str, str]:
    """State and exit code at a job's end after a fault, which left nothing behind where it could be reached."""
    state = job.wait(timeout=limit_s + 30, confirm_s=5 if unreachable else 30)
    seconds = time.monotonic() - began
    assert unreachable or job.cluster.left_behind(RANKS) == {}
    assert seconds < limit_s, job.output
    return state["JobState"].replace("COMPLETING", "FAILED") if unreachable else state["JobState"], state["ExitCode"]


def _losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("launcher", ["slurm", "pdsh"])
def test_scancel_leaves_no_process(submit: Submit, cluster: SlurmCluster, launcher: str) -> None:
    job = submit(2, launcher, clap=ENDLESS)
    job.wait_for_steps()
    began = time.monotonic()
    cluster.run("ctl", "scancel", job.number)
    assert _end(job, began)[0] == "CANCELLED"
    assert [summary["state"] for summary in job.summaries] == ["terminated"]
    assert job.record["state"] == "terminated"


@pytest.mark.parametrize(("number", "said"), [("KILL", "killed"), ("SEGV", "Segmentation fault")])
def test_killed_rank_ends_the_job_with_its_host(submit: Submit, cluster: SlurmCluster, number: str, said: str) -> None:
    job = submit(2, clap=ENDLESS)
    job.wait_for_steps()
    began = time.monotonic()
    pid, variables = min(job.ranks("node2").items())
    cluster.run("node2", "kill", f"-{number}", pid)
    state, code = _end(job, began)
    assert state == "FAILED"
    assert code != "0:0"
    assert [summary["state"] for summary in job.summaries] == ["failed"]
    assert f"rank {variables['SLURM_PROCID']} on node2" in job.record["error"], job.output
    assert said in job.record["error"]
    assert job.record["attempts"][0]["at_fault"] == ["node2"]
    assert job.summaries[0]["error"] == job.record["error"]


def test_job_is_queued_again_without_a_host_at_fault(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, site={"requeues": 1}, asks={"train": True}, clap=TRAINING)
    job.wait_for_steps()
    cluster.run("node2", "kill", "-9", min(job.ranks("node2")))
    cluster.wait_until(lambda: cluster.job(job.number)["Restarts"] == "1", 60, "another start")
    job.wait_for_steps(2)
    assert cluster.job(job.number)["ExcNodeList"] == "node2"
    job.ends("COMPLETED", 0)
    first, second = job.record["attempts"]
    assert (first["excluded"], first["requeued"], second["state"]) == (["node2"], True, "completed")
    assert "node2" not in second["hosts"]


def test_rank_that_stands_still_and_time_that_runs_out(submit: Submit, cluster: SlurmCluster) -> None:
    """Two jobs at once, for both take a minute. The others wait for the stopped rank and aren't blamed."""
    timed = submit(2, "torchrun", clap=ENDLESS, sbatch=("--time=10", "--signal=USR1@110", "--cpus-per-task=2"))
    hung = submit(2, clap=ENDLESS, sbatch=("--nodelist=node[1-2]", "--cpus-per-task=2"))
    for job in (timed, hung):
        job.wait_for_steps()
    # One to two minutes from now: SLURM counts in minutes, and gives its warning at once.
    hours, minutes, seconds = map(int, cluster.job(timed.number)["RunTime"].split(":"))
    limit = 60 * hours + minutes + math.ceil(seconds / 60) + 1
    stopped, variables = sorted(hung.ranks("node2").items())[1]
    cluster.run("node2", "kill", "-STOP", stopped)
    sampled = lambda: [path.stem for path in timed.runs[0].glob("monitor/*.jsonl") if path.read_text()]  # noqa: E731
    cluster.wait_until(lambda: len(sampled()) == 2, 60, "the monitors' first samples")
    cluster.run("ctl", "scontrol", "update", f"JobId={timed.number}", f"TimeLimit={limit}")
    assert hung.wait(timeout=LONGEST_S)["JobState"] == "FAILED", hung.output
    assert f"rank {variables['SLURM_PROCID']} on node2" in hung.record["error"]
    assert "the other 3 in " in hung.record["error"]
    assert hung.record["attempts"][0]["at_fault"] == ["node2"]
    stacks = {path.stem: path.read_text() for path in hung.runs[0].glob("stacks/*.txt")}
    assert len(stacks) == 4
    assert "most recent call first" in stacks["rank0"]
    state = timed.wait()
    assert (state["JobState"], timed.summaries[0]["state"], timed.record["state"]) == ("FAILED", "timeout", "timeout")


@pytest.fixture
def cut(cluster: SlurmCluster) -> Iterator[Callable[[], None]]:
    """Takes node2 off the network until the test is over."""
    yield lambda: cluster.cut("node2")
    cluster.connect("node2")


def test_host_that_cannot_be_reached_is_named(submit: Submit, cut: Callable[[], None]) -> None:
    cut()
    began = time.monotonic()
    job = submit(2, sbatch=("--nodelist=node[1-2]",))
    assert _end(job, began, HANG_S, unreachable=True)[0] == "FAILED"
    assert "lost node2: " in job.output
    assert job.record["state"] == "failed"


def test_spare_host_takes_over_from_a_lost_one(submit: Submit, cluster: SlurmCluster, cut: Callable[[], None]) -> None:
    """From the newest checkpoint, within 90 s; the lost host, which nobody can reach, ends its ranks by itself."""
    clap = {**TRAINING, "train": {"samples": 10**9, "log_every_steps": 1}, "checkpoint": {"every_steps": 15}}
    job = submit(2, clap=clap, asks={"train": True, "spare_nodes": 1})
    job.wait_for_steps()
    cluster.wait_until(lambda: len(_losses(job.runs[0])) >= 20, 60, "a checkpoint, and some steps more")
    began = time.time()
    cut()
    job.wait_for_steps(2)
    # How long ranks take to start is the machine's.
    assert datetime.fromisoformat(job.record["attempts"][0]["finished"]).timestamp() - began < HANG_S, job.output
    cluster.wait_until(lambda: len(_losses(job.runs[1])) >= 15, 60, "steps that were made before")
    cluster.run("ctl", "scancel", job.number)
    job.wait(confirm_s=5)
    first, second = job.record["attempts"]
    assert first["error"].startswith("lost node2: ")
    assert (first["excluded"], second["hosts"]) == (["node2"], ["node1", "node3"])
    lost, resumed = job.summaries
    assert lost["state"] == "failed"
    assert "node2" in lost["error"]
    assert resumed["resumed_at_step"] == 15
    cluster.wait_until(lambda: not cluster.processes(RANKS), 90, "the lost host to end its ranks")
    cluster.connect("node2")
    # Another run that goes on from the same step makes the same losses.
    cluster.wait_until_idle()
    (checkpoint,) = (job.folder / "runs").glob("micro-*-checkpoints/step-00000015")
    clap["train"] = {"samples": 16 * 25, "log_every_steps": 1, "resume": str(checkpoint)}
    another = submit(2, clap=clap, asks={"train": True})
    another.ends("COMPLETED", 0)
    losses, expected = _losses(job.runs[1]), _losses(another.runs[0])
    assert [losses[step] for step in range(16, 26)] == [expected[step] for step in range(16, 26)]


def test_goes_on_with_fewer_hosts(submit: Submit, cluster: SlurmCluster) -> None:
    """Three hosts of two ranks with two accumulation steps leave two with three."""
    settings = {**TRAINING, "checkpoint": {"every_steps": 20}}
    job = submit(3, asks={"train": True, "shrink": True}, clap=settings, gradient_accumulation_steps=2)
    job.wait_for_steps()
    began = time.monotonic()
    cluster.run("node3", "kill", "-9", min(job.ranks("node3")))
    job.wait_for_steps(2)
    assert time.monotonic() - began < HANG_S
    job.ends("COMPLETED", 0)
    before, after = job.summaries
    assert (before["world_size"], before["gradient_accumulation_steps"]) == (6, 2)
    assert (after["world_size"], after["gradient_accumulation_steps"]) == (4, 3)
    assert before["global_batch"] == after["global_batch"]
