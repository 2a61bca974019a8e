"""What goes wrong on clusters, brought about on a real one; each test prints what happened and in how many seconds."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, Submitted
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

Submit = Callable[..., Submitted]
pytestmark = pytest.mark.end_to_end
LIMIT_S = 60
"""A fault must have ended the job by then."""


def _rank_pids(cluster: SlurmCluster, host: str) -> list[str]:
    """Process ids, as the host counts, of the ranks on it."""
    found = []
    for line in cluster.processes(r"clap_ds/bench\.py").get(host, []):
        pid = line.split()[0]
        variables = cluster.run(host, "cat", f"/proc/{pid}/environ", check=False).stdout.split("\0")
        if any(variable.startswith(("RANK=", "SLURM_LAUNCH_NODE_IPADDR=")) for variable in variables):
            found.append(pid)
    return found


def _end(job: Submitted, began: float, what: str) -> dict[str, str]:
    """Wait for the end of a job after a fault, and check that it left nothing behind anywhere."""
    state = job.wait(timeout=LIMIT_S + 30)
    seconds = time.monotonic() - began
    left = job.cluster.left_behind(RANKS)
    print(f"{what}: {state['JobState']} {state['ExitCode']} after {seconds:.1f} s: {job.told.get('error')}")
    assert left == {}
    assert seconds < LIMIT_S, job.output
    return state


@pytest.mark.parametrize("launcher", ["pdsh", "slurm", "srun"])
def test_scancel_leaves_no_process(submit: Submit, cluster: SlurmCluster, launcher: str) -> None:
    job = submit(2, launcher, clap=ENDLESS)
    job.wait_for_steps()
    pids = _rank_pids(cluster, "node2")
    assert len(pids) == 2
    variables = cluster.run("node2", "cat", f"/proc/{pids[0]}/environ").stdout.split("\0")
    assert "CLAP_TEST_LIST=Tree,Ring" in variables  # the site's settings arrive whole
    began = time.monotonic()
    cluster.run("ctl", "scancel", job.number)
    gone_s = cluster.wait_until(lambda: not cluster.processes(RANKS), LIMIT_S, "processes to end")
    print(f"scancel, {launcher}: no process on any host after {gone_s:.1f} s")
    state = _end(job, began, f"scancel, {launcher}")
    assert state["JobState"] == "CANCELLED"
    assert job.summary["state"] == "terminated"
    if launcher == "pdsh":
        assert job.told["state"] == "terminated"


@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_killed_rank_ends_the_job_with_its_host(submit: Submit, cluster: SlurmCluster, launcher: str) -> None:
    job = submit(2, launcher, clap=ENDLESS)
    job.wait_for_steps()
    began = time.monotonic()
    cluster.run("node2", "kill", "-9", _rank_pids(cluster, "node2")[0])
    state = _end(job, began, f"kill -9 of a rank, {launcher}")
    assert state["JobState"] == "FAILED"
    assert state["ExitCode"] != "0:0"
    assert job.summary["state"] == "failed"
    assert "node2" in job.told["error"], job.output


@pytest.fixture
def cut(cluster: SlurmCluster) -> Iterator[Callable[[str], None]]:
    """Takes a host off the network until the test is over."""
    hosts = []

    def cut(host: str) -> None:
        hosts.append(host)
        cluster.set_link(host, up=False)

    yield cut
    for host in hosts:
        cluster.set_link(host, up=True)
        cluster.resume(host)


def test_host_that_cannot_be_reached_is_named(submit: Submit, cut: Callable[[str], None]) -> None:
    cut("node2")
    began = time.monotonic()
    job = submit(2, "pdsh", sbatch=("--nodelist=node[1-2]",))
    state = job.wait(timeout=LIMIT_S + 30, confirm_s=5)
    print(f"unreachable host: {state['JobState']} after {time.monotonic() - began:.1f} s: {job.told['error']}")
    assert time.monotonic() - began < LIMIT_S
    assert state["JobState"] in ("FAILED", "COMPLETING")
    assert state["ExitCode"] == "1:0"
    assert "1 of 2 hosts can't be reached: node2" in job.output
    assert job.told["state"] == "failed"


def test_host_lost_while_running_is_named(submit: Submit, cluster: SlurmCluster, cut: Callable[[str], None]) -> None:
    job = submit(2, "pdsh", clap=ENDLESS, sbatch=("--nodelist=node[1-2]",))
    job.wait_for_steps()
    began = time.monotonic()
    cut("node2")
    state = job.wait(timeout=LIMIT_S + 30, confirm_s=5)
    ended_s = time.monotonic() - began
    print(f"host cut off while running: {state['JobState']} after {ended_s:.1f} s: {job.told['error']}")
    assert ended_s < LIMIT_S
    assert (state["JobState"] in ("FAILED", "COMPLETING"), state["ExitCode"]) == (True, "1:0")
    assert "lost node2" in job.told["error"]
    assert job.summary["state"] == "failed"
    # Nobody can tell the lost host; it takes itself for cut off, and ends its ranks all the same.
    cluster.wait_until(lambda: not cluster.processes(RANKS), 90, "the lost host to end its ranks")
    print(f"host cut off while running: no process on it after {time.monotonic() - began:.1f} s")


def test_time_limit_is_announced_and_recorded(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, "pdsh", clap=ENDLESS, sbatch=("--time=10", "--signal=B:USR1@110"))
    job.wait_for_steps()
    cluster.wait_until(
        lambda: len([path for path in job.runs[0].glob("monitor/*.jsonl") if path.read_text()]) == 2,
        60,
        "the monitor's first samples",
    )
    # One to two minutes from now: SLURM counts in minutes, and gives its warning at once.
    minutes = math.ceil(job.elapsed_s / 60) + 1
    cluster.run("ctl", "scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
    state = job.wait(timeout=150)
    print(
        f"time limit: {state['JobState']} {state['ExitCode']}, stopped in {job.told['seconds_to_stop']} s: {job.told['error']}"
    )
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "138:0"), job.output
    assert job.summary["state"] == job.told["state"] == "timeout"
    assert len([path for path in job.runs[0].glob("monitor/*.jsonl") if path.read_text()]) == 2
    assert cluster.left_behind(RANKS) == {}


def test_requeued_job_runs_again(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, "srun", clap=ENDLESS)
    job.wait_for_steps()
    (job.folder / "micro.json").write_text(json.dumps(micro_run()))  # the second start is to come to an end
    began = time.monotonic()
    cluster.run("ctl", "scontrol", "requeue", job.number)
    cluster.wait_until(lambda: len(job.runs) == 2, 90, "the second start")
    print(f"requeue: second run after {time.monotonic() - began:.1f} s")
    state = job.wait()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), job.output
    states = [json.loads((run / "summary.json").read_text())["state"] for run in job.runs]
    assert states == ["terminated", "completed"]
    assert job.told["job"] == f"{job.number}.1"
    assert cluster.left_behind(RANKS) == {}
