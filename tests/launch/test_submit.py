"""Submission of one job: its folder, its record, and rejections before it is queued."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import sweep
from clap_ds.launch.submit import main
from tests.conftest import ROOT, micro_run
from tests.launch.conftest import FakeSlurm

Submit = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my work").mkdir()
    return tmp_path / "my work"


@pytest.fixture
def submit(folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> Submit:
    """Submit a micro run: `submit(*options, code=2, profile={…}, clap={…})` checks the exit code,
    and returns the output, or the errors if it isn't 0."""

    def submit(
        *options: str, code: int = 0, profile: dict[str, Any] | None = None, **changes: Any
    ) -> str:
        fields = {"account": "mine", "run_root": str(folder / "runs"), **(profile or {})}
        (folder / "tiny.json").write_text(json.dumps(micro_run(**changes)))
        (folder / "cluster.json").write_text(json.dumps(fields))
        paths = ["--cluster", str(folder / "cluster.json"), "--config", str(folder / "tiny.json")]
        assert main([*paths, *options]) == code
        output, errors = capsys.readouterr()
        return errors if code else output

    return submit


def _job_folders(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "jobs").glob("*"))


def test_script_has_the_options_of_profile_and_command(
    submit: Submit, folder: Path, slurm: FakeSlurm
) -> None:
    profile = {"partition": "gpu", "gpus_per_node": 2, "sbatch": ["--exclusive"]}
    # SLURM counts only nodes in service; a submitted job would wait for the others.
    note = "Requested node configuration is not available"
    slurm.write("refuse_test", f"allocation failure: {note}\n")
    output = submit("--nodes", "2", "--exclude", "n[1-2]", profile=profile)
    (job,) = _job_folders(folder)
    options = "--account=mine --partition=gpu --exclusive --nodes=2 --gres=gpu:2 --exclude=n[1-2]"
    assert {f"#SBATCH {option}" for option in options.split()} <= {*slurm.lines("tested")}
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]
    assert json.loads((job / "submission.json").read_text())["jobs"][0]["slurm_id"] == "101"
    run = json.loads((job / "run.json").read_text())
    assert run["clap"]["output"] == {"dir": str(folder / "runs"), "run_name": "tiny"}
    for text in (note, "submitted job 101", f"tail -F '{job}/tiny-101.out'", "scancel 101"):
        assert text in output


def test_line_of_the_watching_page_prints_the_jobs_progress(submit: Submit, folder: Path) -> None:
    submit()
    (job,) = _job_folders(folder)
    (job / "tiny-101.out").write_text("loading\nstep 1/2\n")
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(tail -F runs/jobs.*?)`", page)
    command = line.replace("\\|", "|").replace("ID", "101").replace("tail -F", "tail -n +1")
    assert subprocess.check_output(["bash", "-c", command], cwd=folder, text=True) == "step 1/2\n"


REFUSED_PARTITION = "invalid partition specified: gpuu"


@pytest.mark.parametrize(
    ("profile", "options", "sbatch_error", "message"),
    [
        ({"python": "/bin/true"}, "", "", "/bin/true failed with exit code 0"),
        ({}, "--auto_requeue", "", "need --train"),
        ({}, "--train", "", "clap.train: max_samples and epochs are missing"),
        ({"partition": "cpu"}, "", "", "pass --gpus_per_node"),
        ({}, "", "sbatch: error: Invalid qos", "Invalid qos"),
        ({}, "--nodes 5 --spare_nodes 2", "", "7 nodes, but the partition has 6"),
        ({}, "--time 1-00:00:01", "", "allows at most 1-00:00:00"),
        ({}, "--time soon", "", "expected a SLURM time"),
        ({"sbatch": ["--exclusive -t 2-0"]}, "", "", "allows at most 1-00:00:00"),
        ({}, "-p gpuu", "", "did you mean 'gpu'"),
        ({"partition": "gpuu", "gpus_per_node": 4}, "", REFUSED_PARTITION, "did you mean 'gpu'"),
        ({"sbatch": ["--comment=a\nrm x"]}, "", "", "printable"),
        ({"sbatch": ["--comment=it's"]}, "", "", "it's: No closing"),
        ({}, "--set clap.output=3", "", "clap.output is 3"),
    ],
)
def test_job_that_cannot_run_is_rejected_before_queueing(
    submit: Submit,
    folder: Path,
    slurm: FakeSlurm,
    profile: dict[str, Any],
    options: str,
    sbatch_error: str,
    message: str,
) -> None:
    if sbatch_error:
        slurm.write("refuse_test", f"{sbatch_error}\n")
    assert message in submit(*options.split(), code=2, profile=profile)
    assert (_job_folders(folder), slurm.lines("calls")) == ([], [])


@pytest.mark.parametrize(
    ("profile", "options", "note"),
    [
        ({}, "--partition cpu --gpus_per_node 2", ""),
        ({}, "--qos big", "unless --qos"),
        ({"sbatch": ["--time-min=1:00:00"]}, "", "unless --qos"),
        ({"sbatch": ["--part cpu"], "gpus_per_node": 2}, "", ""),
    ],
)
def test_time_limit_that_another_partition_or_qos_may_allow_is_submitted(
    submit: Submit,
    slurm: FakeSlurm,
    profile: dict[str, Any],
    options: str,
    note: str,
) -> None:
    assert note in submit("--time", "2-0", *options.split(), profile=profile)
    assert len(slurm.lines("calls")) == 1


def test_partition_of_the_environment_counts(
    submit: Submit, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    submit("--time", "UNLIMITED", "--gpus_per_node", "2")
    assert not any(line.startswith("#SBATCH --gres") for line in slurm.lines("tested"))


def test_options_of_the_command_replace_the_profiles(
    submit: Submit, folder: Path, slurm: FakeSlurm
) -> None:
    profile = {
        "partition": "gpu",
        "gpus_per_node": 2,
        "sbatch": ["--qos=small", "--constraint=a", "--exclusive"],
    }
    options = "--qos=big -A theirs -p cpu -C b --reservation r --dependency afterok:7 --parsable"
    assert submit(*options.split(), profile=profile) == "101\n"
    (job,) = _job_folders(folder)
    assert slurm.lines("calls") == [f"--parsable --dependency=afterok:7 {job}/tiny.sbatch"]
    values: dict[str, str] = {}
    for line in slurm.lines("tested"):
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        values[name] = value  # as in sbatch, the last one counts
    expected = "qos=big account=theirs partition=cpu constraint=b reservation=r"
    assert dict(pair.split("=") for pair in expected.split()).items() <= values.items()
    assert "dependency" not in values, "it counts for one submission"
    assert "gres" not in values, "partition cpu has no GPUs"


@pytest.mark.parametrize(("option", "value"), [("--qos", "a\nrm x"), ("--dependency", "")])
def test_option_that_is_blank_or_has_a_line_end_is_rejected(
    option: str, value: str, submit: Submit, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        submit(option, value)
    assert "printable" in capsys.readouterr().err
    assert slurm.lines("calls") == []


def test_job_that_sbatch_rejects_can_be_submitted_again(
    submit: Submit, folder: Path, slurm: FakeSlurm
) -> None:
    slurm.write("refuse", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    errors = submit(code=2)
    (job,) = _job_folders(folder)
    assert f"clap-ds sweep resume '{job}'" in errors
    (slurm.folder / "refuse").unlink()
    assert sweep.main(["resume", str(job)]) == 0
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]


def test_missing_path_is_rejected_unless_an_earlier_job_may_make_it(
    submit: Submit, folder: Path
) -> None:
    shards = f"{folder}/x-{{0..3}}.tar"
    data = {"source": "webdataset", "shards": shards, "tokenizer": f"{folder}/tokenizer"}
    error = submit(code=2, clap={"data": data})
    assert f"{folder / 'tiny.json'}: clap.data.shards: " in error
    assert f"no such file: {folder}/x-0.tar" in error
    assert "clap.data.tokenizer: " in error
    output = submit("--dependency", "afterok:7", clap={"data": data})
    assert "note: clap.data.shards: " in output


def test_changed_field_is_in_the_jobs_folder_and_named_in_errors(
    submit: Submit, folder: Path
) -> None:
    changes = ["--set", "clap.bench.windows=3", "--set", "clap.output.run_name=other"]
    submit(*changes)
    (job,) = _job_folders(folder)
    run = json.loads((job / "run.json").read_text())
    assert (run["clap"]["bench"]["windows"], run["clap"]["output"]["run_name"]) == (3, "other")
    assert job.name.startswith("other-")
    problem = "clap.bench.widows: no such field"
    assert f"--set {problem}" in submit("--set", "clap.bench.widows=3", code=2)
    errors = submit(code=2, clap={"bench": {"widows": 3}})
    assert f"{folder / 'tiny.json'}: {problem}" in errors


def test_run_whose_name_is_null_has_the_name_of_its_file(submit: Submit, folder: Path) -> None:
    submit("--set", "clap.output.run_name=null")
    assert _job_folders(folder)[0].name.startswith("tiny-")
