"""Submission of one job: its folder, its record, and what is rejected before it is queued."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.submit import main
from tests.conftest import ROOT, micro_run
from tests.launch.conftest import FakeSlurm

Call = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my work").mkdir()
    return tmp_path / "my work"


@pytest.fixture
def call(folder: Path, slurm: FakeSlurm) -> Call:
    """Submit a micro run on a site with an account: `call(*options, site={…}, clap={…})`."""

    def submit(*options: str, site: dict[str, Any] | None = None, **changes: Any) -> int:
        fields = {"account": "mine", "sbatch": ["--exclusive"], "run_root": str(folder / "runs"), **(site or {})}
        (folder / "tiny.json").write_text(json.dumps(micro_run(**changes)))
        (folder / "cluster.json").write_text(json.dumps(fields))
        return main(["--cluster", str(folder / "cluster.json"), "--config", str(folder / "tiny.json"), *options])

    return submit


def _jobs(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "jobs").glob("*"))


def test_everything_of_the_site_is_in_the_script(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    site = {"partition": "gpu", "cpus_per_task": 8, "gpus_per_node": 2}
    # SLURM counts only nodes in service; a submitted job would wait for the others.
    slurm.write("refuse_test", "allocation failure: Requested node configuration is not available\n")
    assert call("--nodes", "2", "--exclude", "n[1-2]", site=site) == 0
    (job,) = _jobs(folder)
    expected = {"--account=mine", "--partition=gpu", "--exclusive", "--nodes=2", "--gres=gpu:2", "--exclude=n[1-2]"}
    assert expected <= {line.removeprefix("#SBATCH ") for line in slurm.lines("tested")}
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]
    assert json.loads((job / "submission.json").read_text())["jobs"][0]["slurm_id"] == "101"
    run = json.loads((job / "run.json").read_text())
    assert run["clap"]["output"] == {"dir": str(folder / "runs"), "run_name": "tiny"}
    shown = capsys.readouterr().out
    assert "Requested node configuration is not available" in shown
    assert all(how in shown for how in ("submitted job 101", f"tail -F '{job}/tiny-101.out'", "scancel 101"))


def test_progress_by_the_line_of_the_watching_page_is_that_of_the_job(call: Call, folder: Path) -> None:
    assert call() == 0
    (job,) = _jobs(folder)
    (job / "tiny-101.out").write_text("loading\nstep 1/2\n")
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(tail -F runs/jobs.*?)`", page)
    command = line.replace("\\|", "|").replace("ID", "101").replace("tail -F", "tail -n +1")
    assert subprocess.check_output(["bash", "-c", command], cwd=folder, text=True) == "step 1/2\n"


@pytest.mark.parametrize(
    ("site", "options", "says", "message"),
    [
        ({"python": "/bin/true"}, "", {}, "/bin/true failed with exit code 0"),
        ({}, "--auto_requeue", {}, "need --train"),
        ({}, "--train", {}, "clap.train: max_samples and epochs are missing"),
        ({"partition": "cpu"}, "", {}, "pass --gpus_per_node"),
        ({}, "", {"refuse_test": "sbatch: error: Invalid qos"}, "Invalid qos"),
        ({}, "--nodes 5 --spare_nodes 2", {}, "7 nodes, but the partition has 6"),
    ],
)
def test_refused_before_it_is_queued(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str],
    site: dict[str, Any], options: str, says: dict[str, str], message: str,
) -> None:  # fmt: skip
    for name, text in says.items():
        slurm.write(name, f"{text}\n")
    assert call(*options.split(), site=site) == 2
    assert message in capsys.readouterr().err
    assert (_jobs(folder), slurm.lines("calls")) == ([], [])


def test_name_that_is_null_is_the_files(call: Call, folder: Path) -> None:
    assert call("--set", "clap.output.run_name=null") == 0
    assert _jobs(folder)[0].name.startswith("tiny-")


@pytest.mark.parametrize("name", ["clap", "clap.output"])
def test_section_that_is_none_is_refused(
    name: str, call: Call, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--set", f"{name}=3") == 2
    assert f"{name} is 3" in capsys.readouterr().err


def test_changed_fields_are_in_the_jobs_folder(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--set", "clap.bench.windows=3", "--set", "clap.output.run_name=other") == 0
    (job,) = _jobs(folder)
    run = json.loads((job / "run.json").read_text())
    assert (run["clap"]["bench"]["windows"], run["clap"]["output"]["run_name"]) == (3, "other")
    assert job.name.startswith("other-")
    capsys.readouterr()
    assert call("--set", "clap.bench.widows=3") == 2
    assert "--set clap.bench.widows: no such field" in capsys.readouterr().err
    assert call(clap={"bench": {"widows": 3}}) == 2
    assert f"{folder / 'tiny.json'}: clap.bench.widows: no such field" in capsys.readouterr().err
