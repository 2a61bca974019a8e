"""What goes wrong on clusters, brought about on a real one."""

import json
import math
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import ENDLESS, RANKS, Submit, Submitted
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

pytestmark = pytest.mark.end_to_end
LIMIT_S = 60  # by when a fault must have ended the job


def _ranks(cluster: SlurmCluster, host: str) -> dict[str, list[str]]:
    """Environments of the ranks on a host, by process id as the host counts."""
    pids = [line.split()[0] for line in cluster.processes(r"clap_ds/bench\.py").get(host, [])]
    found = {pid: cluster.run(host, "cat", f"/proc/{pid}/environ", check=False).stdout.split("\0") for pid in pids}
    of_ranks = ("RANK=", "SLURM_LAUNCH_NODE_IPADDR=")
    return {pid: lines for pid, lines in found.items() if any(line.startswith(of_ranks) for line in lines)}


def _end(job: Submitted, began: float, *, unreachable: bool = False) -> tuple[str, str]:
    """State and exit code at a job's end after a fault, which left nothing behind where it could be reached."""
    state = job.wait(timeout=LIMIT_S + 30, confirm_s=5 if unreachable else 30)
    seconds = time.monotonic() - began
    assert unreachable or job.cluster.left_behind(RANKS) == {}
    assert seconds < LIMIT_S, job.output
    return state["JobState"].replace("COMPLETING", "FAILED") if unreachable else state["JobState"], state["ExitCode"]


@pytest.mark.parametrize("launcher", ["pdsh", "slurm", "srun"])
def test_scancel_leaves_no_process(submit: Submit, cluster: SlurmCluster, launcher: str) -> None:
    job = submit(2, launcher, clap=ENDLESS)
    job.wait_for_steps()
    ranks = _ranks(cluster, "node2")
    assert len(ranks) == 2
    assert all("CLAP_TEST_LIST=Tree,Ring" in variables for variables in ranks.values())  # the site's settings, whole
    began = time.monotonic()
    cluster.run("ctl", "scancel", job.number)
    assert _end(job, began)[0] == "CANCELLED"
    assert [summary["state"] for summary in job.summaries] == ["terminated"]
    if launcher == "pdsh":
        assert job.record["state"] == "terminated"


@pytest.mark.parametrize("launcher", ["pdsh", "srun"])
def test_killed_rank_ends_the_job_with_its_host(submit: Submit, cluster: SlurmCluster, launcher: str) -> None:
    job = submit(2, launcher, clap=ENDLESS)
    job.wait_for_steps()
    began = time.monotonic()
    cluster.run("node2", "kill", "-9", min(_ranks(cluster, "node2")))
    state, code = _end(job, began)
    assert state == "FAILED"
    assert code != "0:0"
    assert [summary["state"] for summary in job.summaries] == ["failed"]
    assert "node2" in job.record["error"], job.output


@pytest.fixture
def cut(cluster: SlurmCluster) -> Iterator[Callable[[], None]]:
    """Takes node2 off the network until the test is over."""
    yield lambda: cluster.cut("node2")
    cluster.connect("node2")


def test_host_that_cannot_be_reached_is_named(submit: Submit, cut: Callable[[], None]) -> None:
    cut()
    began = time.monotonic()
    job = submit(2, "pdsh", sbatch=("--nodelist=node[1-2]",))
    assert _end(job, began, unreachable=True) == ("FAILED", "1:0")
    assert "1 of 2 hosts can't be reached: node2" in job.output
    assert job.record["state"] == "failed"


def test_host_lost_while_running_is_named(submit: Submit, cluster: SlurmCluster, cut: Callable[[], None]) -> None:
    job = submit(2, "pdsh", clap=ENDLESS, sbatch=("--nodelist=node[1-2]",))
    job.wait_for_steps()
    began = time.monotonic()
    cut()
    assert _end(job, began, unreachable=True) == ("FAILED", "1:0")
    assert "lost node2" in job.record["error"]
    assert [summary["state"] for summary in job.summaries] == ["failed"]
    # Nobody can reach the lost host; it takes itself for cut off, and ends its ranks all the same.
    cluster.wait_until(lambda: not cluster.processes(RANKS), 90, "the lost host to end its ranks")


def test_time_limit_is_announced_and_recorded(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, "pdsh", clap=ENDLESS, sbatch=("--time=10", "--signal=B:USR1@110"))
    job.wait_for_steps()
    sampled = lambda: [path.stem for path in job.runs[0].glob("monitor/*.jsonl") if path.read_text()]  # noqa: E731
    cluster.wait_until(lambda: len(sampled()) == 2, 60, "the monitors' first samples")
    # One to two minutes from now: SLURM counts in minutes, and gives its warning at once.
    hours, minutes, seconds = map(int, cluster.job(job.number)["RunTime"].split(":"))
    limit = 60 * hours + minutes + math.ceil(seconds / 60) + 1
    cluster.run("ctl", "scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    job.ends("FAILED", 138)
    assert job.summaries[0]["state"] == job.record["state"] == "timeout"


def test_requeued_job_runs_again(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(2, "srun", clap=ENDLESS)
    job.wait_for_steps()
    (job.folder / "micro.json").write_text(json.dumps(micro_run()))  # the second start is to come to an end
    cluster.run("ctl", "scontrol", "requeue", job.number)
    cluster.wait_until(lambda: len(job.runs) == 2, 90, "the second start")
    job.ends("COMPLETED", 0)
    assert cluster.job(job.number)["Restarts"] == "1"
    assert [summary["state"] for summary in job.summaries] == ["terminated", "completed"]
    assert job.record["job"] == f"{job.number}.1"
