"""A sweep from one command to its table of states, on a real SLURM."""

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, site_file
from tests.cluster.slurm_cluster import SlurmCluster
from tests.conftest import micro_run

pytestmark = pytest.mark.end_to_end


def _sweep(cluster: SlurmCluster, *arguments: str) -> str:
    return cluster.run("ctl", sys.executable, "launch/sweep.py", *arguments, folder=ROOT).stdout


def _over(cluster: SlurmCluster) -> None:
    cluster.wait_until(lambda: not cluster.run("ctl", "squeue", "-h").stdout.strip(), 240, "an empty queue")


def _options(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> list[str]:
    cluster.wait_until_idle()
    (tmp_path / "micro.json").write_text(json.dumps(micro_run()))
    site = site_file(tmp_path, launcher=launcher)
    return ["--site", site, "--config", str(tmp_path / "micro.json"), "--folder", str(tmp_path / "sweep")]


def test_three_scales_status_and_resume(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    shown = _sweep(cluster, *_options(cluster, tmp_path, "slurm"), "--nodes", "1", "2", "3", "--chain")
    assert shown.count("submitted n") == 3
    script = (folder / "n003.sbatch").read_text()
    assert {"#SBATCH --nodes=3", "#SBATCH --time=00:15:00", "#SBATCH --gres=gpu:2"} <= set(script.splitlines())
    jobs = {job["name"]: job["slurm_id"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]}
    cluster.run("ctl", "scancel", jobs["n003"])  # still waiting for the others
    cluster.wait_until(lambda: "running" in _sweep(cluster, "status", str(folder)), 60, "a running job")
    _over(cluster)
    assert _sweep(cluster, "status", str(folder)).splitlines()[-1] == "2 completed, 1 failed"
    assert "1 of 3 jobs are missing: n003" in _sweep(cluster, "resume", str(folder), "--dry_run")
    assert _sweep(cluster, "resume", str(folder)).count("submitted") == 1
    _over(cluster)
    assert _sweep(cluster, "status", str(folder)).splitlines()[-1] == "3 completed"
    assert "0 of 3 jobs are missing" in _sweep(cluster, "resume", str(folder))
    summaries = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("n*/summary.json"))]
    assert [(summary["num_nodes"], summary["world_size"]) for summary in summaries] == [(1, 2), (2, 4), (3, 6)]


def test_micro_batches_in_one_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    _sweep(cluster, *_options(cluster, tmp_path, "srun"), "--micro_batch", "2:1000000000002:1000000000000")
    _over(cluster)
    assert "1 completed" in _sweep(cluster, "status", str(folder)), (folder / "n001-micro_batch.sbatch").read_text()
    rows = json.loads((folder / "n001-micro_batch" / "micro_batch.json").read_text())
    assert [(row["micro_batch"], row["state"]) for row in rows] == [(2, "completed"), (1000000000002, "out_of_memory")]
    assert rows[0]["samples_per_s_per_gpu"] > 0
    (output,) = folder.glob("*.out")
    assert "out of memory" in output.read_text().splitlines()[-1]
