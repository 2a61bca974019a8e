"""Submission of one job: its folder, its record, and what is rejected before it is queued."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.submit import main
from clap_ds.launch.sweep import main as resume_sweep
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
        fields = {
            "account": "mine",
            "sbatch": ["--exclusive"],
            "run_root": str(folder / "runs"),
            **(site or {}),
        }
        (folder / "tiny.json").write_text(json.dumps(micro_run(**changes)))
        (folder / "cluster.json").write_text(json.dumps(fields))
        return main(
            [
                "--cluster",
                str(folder / "cluster.json"),
                "--config",
                str(folder / "tiny.json"),
                *options,
            ]
        )

    return submit


def _jobs(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "jobs").glob("*"))


def test_everything_of_the_site_is_in_the_script(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    site = {"partition": "gpu", "cpus_per_task": 8, "gpus_per_node": 2}
    # SLURM counts only nodes in service; a submitted job would wait for the others.
    slurm.write(
        "refuse_test", "allocation failure: Requested node configuration is not available\n"
    )
    assert call("--nodes", "2", "--exclude", "n[1-2]", site=site) == 0
    (job,) = _jobs(folder)
    expected = {
        "--account=mine",
        "--partition=gpu",
        "--exclusive",
        "--nodes=2",
        "--gres=gpu:2",
        "--exclude=n[1-2]",
    }
    assert expected <= {line.removeprefix("#SBATCH ") for line in slurm.lines("tested")}
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]
    assert json.loads((job / "submission.json").read_text())["jobs"][0]["slurm_id"] == "101"
    run = json.loads((job / "run.json").read_text())
    assert run["clap"]["output"] == {"dir": str(folder / "runs"), "run_name": "tiny"}
    shown = capsys.readouterr().out
    assert "Requested node configuration is not available" in shown
    assert all(
        how in shown
        for how in ("submitted job 101", f"tail -F '{job}/tiny-101.out'", "scancel 101")
    )


def test_progress_by_the_line_of_the_watching_page_is_that_of_the_job(
    call: Call, folder: Path
) -> None:
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
        ({}, "--time 1-00:00:01", {}, "allows at most 1-00:00:00"),
        ({}, "--time soon", {}, "expected a SLURM time"),
        ({"sbatch": ["--exclusive -t 2-0"]}, "", {}, "allows at most 1-00:00:00"),
        ({}, "-p gpuu", {}, "did you mean 'gpu'"),
        (
            {"partition": "gpuu", "gpus_per_node": 4},
            "",
            {"refuse_test": "invalid partition specified: gpuu"},
            "did you mean 'gpu'",
        ),
        ({"sbatch": ["--comment=a\nrm x"]}, "", {}, "printable"),
        ({"sbatch": ["--comment=it's"]}, "", {}, "it's: No closing"),
        ({"run_root": "runs\nrm x"}, "", {}, "printable"),
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


@pytest.mark.parametrize(
    ("site", "options", "note"),
    [
        ({}, "--partition cpu --gpus_per_node 2", ""),
        ({}, "--qos big", "unless --qos"),
        ({"sbatch": ["--time-min=1:00:00"]}, "", "unless --qos"),
        ({"sbatch": ["--part cpu"], "gpus_per_node": 2}, "", ""),
    ],
)
def test_time_limit_that_another_partition_or_qos_may_allow_is_submitted(
    call: Call,
    slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    site: dict[str, Any],
    options: str,
    note: str,
) -> None:
    assert call("--time", "2-0", *options.split(), site=site) == 0
    assert note in capsys.readouterr().out
    assert len(slurm.lines("calls")) == 1


def test_partition_of_the_environment_counts(
    call: Call, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    assert call("--time", "UNLIMITED", "--gpus_per_node", "2") == 0
    assert not any(line.startswith("#SBATCH --gres") for line in slurm.lines("tested"))


def test_options_of_sbatch_override_the_profiles_and_a_dependency_counts_once(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    site = {
        "partition": "gpu",
        "gpus_per_node": 2,
        "sbatch": ["--qos=small", "--constraint=a", "--exclusive"],
    }
    options = "--qos=big -A theirs -p cpu -C b --reservation r --dependency afterok:7 --parsable"
    assert call(*options.split(), site=site) == 0
    assert capsys.readouterr().out == "101\n"
    (job,) = _jobs(folder)
    assert slurm.lines("calls") == [f"--parsable --dependency=afterok:7 {job}/tiny.sbatch"]
    # The last value counts.
    values = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in slurm.lines("tested")
    )
    expected = {
        "qos": "big",
        "account": "theirs",
        "partition": "cpu",
        "constraint": "b",
        "reservation": "r",
    }
    assert expected.items() <= values.items()
    assert not {"gres", "dependency"} & values.keys(), "partition cpu has no GPUs"


@pytest.mark.parametrize(("option", "value"), [("--qos", "a\nrm x"), ("--dependency", "")])
def test_option_that_is_blank_or_has_a_line_end_is_rejected(
    option: str, value: str, call: Call, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(option, value)
    assert "printable" in capsys.readouterr().err
    assert slurm.lines("calls") == []


def test_job_that_sbatch_rejects_can_be_submitted_again(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("refuse", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    assert call() == 2
    (job,) = _jobs(folder)
    assert f"clap-ds sweep resume '{job}'" in capsys.readouterr().err
    (slurm.folder / "refuse").unlink()
    assert resume_sweep(["resume", str(job)]) == 0
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]


def test_paths_that_are_missing_where_their_folder_exists_are_rejected(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = {
        "source": "webdataset",
        "shards": f"{folder}/x-{{0..3}}.tar",
        "tokenizer": f"{folder}/tokenizer",
    }
    assert call(clap={"data": shards}) == 2
    shown = capsys.readouterr().err
    assert f"{folder / 'tiny.json'}: clap.data.shards: " in shown
    assert f"no such file: {folder}/x-0.tar" in shown
    assert "clap.data.tokenizer: " in shown
    assert call("--dependency", "afterok:7", clap={"data": shards}) == 0, "job 7 may make them"
    assert "note: clap.data.shards: " in capsys.readouterr().out


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
