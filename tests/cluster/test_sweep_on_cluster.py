"""A sweep from one command to its table of states, on a real SLURM."""

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, site_file
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

pytestmark = pytest.mark.end_to_end


def _sweep(cluster: SlurmCluster, *arguments: str, check: bool = True) -> str:
    done = cluster.run("ctl", sys.executable, "launch/sweep.py", *arguments, folder=ROOT, check=check)
    return done.stdout + done.stderr


def _over(cluster: SlurmCluster) -> None:
    cluster.wait_until(lambda: not cluster.run("ctl", "squeue", "-h").stdout.strip(), 240, "an empty queue")


def _options(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> list[str]:
    cluster.wait_until_idle()
    (tmp_path / "micro.json").write_text(json.dumps(micro_run()))
    site = site_file(tmp_path, launcher=launcher, sbatch=["--exclusive"])
    return ["--site", site, "--config", str(tmp_path / "micro.json"), "--folder", str(tmp_path / "sweep")]


def test_two_scales_status_and_resume(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    shown = _sweep(cluster, *_options(cluster, tmp_path, "slurm"), "--nodes", "1", "3")
    assert shown.count("submitted n") == 2
    script = (folder / "n003.sbatch").read_text()
    assert {"#SBATCH --nodes=3", "#SBATCH --time=00:15:00", "#SBATCH --gres=gpu:2"} <= set(script.splitlines())
    jobs = {job["name"]: job["slurm_id"] for job in json.loads((folder / "jobs.json").read_text())["jobs"]}
    cluster.run("ctl", "scancel", jobs["n003"])  # still waiting for the other's node
    cluster.wait_until(lambda: "running" in _sweep(cluster, "status", str(folder)), 60, "a running job")
    _over(cluster)
    shown = _sweep(cluster, "status", str(folder)).splitlines()
    assert shown[-1] == "1 completed, 1 terminated"
    assert shown[2].endswith("cancelled before it began")
    assert shown[1].endswith("samples/s/GPU")
    assert "1 of 2 jobs are missing: n003" in _sweep(cluster, "resume", str(folder), "--dry_run")
    assert _sweep(cluster, "resume", str(folder)).count("submitted") == 1
    _over(cluster)
    assert _sweep(cluster, "status", str(folder)).splitlines()[-1] == "2 completed"
    assert "0 of 2 jobs are missing" in _sweep(cluster, "resume", str(folder))
    summaries = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("n*/summary.json"))]
    assert [(summary["num_nodes"], summary["world_size"]) for summary in summaries] == [(1, 2), (3, 6)]


def test_submission_of_one_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    """What SLURM makes of the script, in a folder whose name has a space, and of a job it doesn't have the nodes for."""
    work = tmp_path / "my 50% work"
    work.mkdir()
    site_and_config = _options(cluster, work, "slurm")[:4]
    submit = ["launch/submit.py", *site_and_config, "--time", "00:10:00"]
    refused = cluster.run("ctl", sys.executable, *submit, "--nodes", "4", folder=ROOT, check=False)
    message = "sbatch would refuse it: Requested node configuration is not available"
    assert (refused.returncode, message in refused.stderr) == (2, True)
    shown = cluster.run("ctl", sys.executable, *submit, "--nodes", "1", "--exclude", "node[1-2]", folder=ROOT).stdout
    (folder,) = (work / "runs" / "jobs").iterdir()
    (record,) = json.loads((folder / "jobs.json").read_text())["jobs"]
    number = record["slurm_id"]
    assert f"squeue -j {number}" in shown
    job = cluster.job(number)
    assert (job["JobName"], job["TimeLimit"], job["ExcNodeList"]) == (f"clap-{folder.name}", "00:10:00", "node[1-2]")
    log = folder / f"slurm-{number}.out"
    cluster.wait_until(log.exists, 60, "the job's log")
    _over(cluster)
    assert json.loads((folder / "job.json").read_text())["state"] == "completed", log.read_text()
