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


def test_script_has_the_options_of_the_profile_unless_the_command_replaces_them(
    submit, folder, slurm
):
    profile = {"partition": "gpu", "gpus_per_node": 2, "sbatch": ["--qos=small", "--exclusive"]}
    # SLURM counts only nodes in service; a submitted job would wait for the others.
    note = "Requested node configuration is not available"
    slurm.write("refuse_test", f"allocation failure: {note}\n")
    options = "--nodes 2 --qos=big -A theirs -p cpu -C b --dependency afterok:7 --set clap.seed=3"
    output = submit(*options.split(), profile=profile)
    (job,) = _job_folders(folder)
    assert slurm.lines("calls") == [f"--parsable --dependency=afterok:7 {job}/tiny.sbatch"]
    assert json.loads((job / "submission.json").read_text())["jobs"][0]["slurm_id"] == "101"
    assert json.loads((job / "run.json").read_text())["clap"]["seed"] == 3
    values: dict[str, str] = {}
    for line in slurm.lines("tested"):
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        values[name] = value  # as in sbatch, the last one counts
    expected = "qos=big account=theirs partition=cpu constraint=b exclusive= nodes=2"
    assert dict(pair.split("=") for pair in expected.split()).items() <= values.items()
    assert "dependency" not in values, "it counts for one submission"
    assert "gres" not in values, "partition cpu has no GPUs"
    for text in (note, "submitted job 101", f"tail -F '{job}/tiny-101.out'", "scancel 101"):
        assert text in output


def test_job_may_continue_on_numbers_of_nodes_that_divide_its_batches(submit, folder):
    """6 nodes of 4 ranks have 96 samples in a micro-step of 4 each; 5 and 4 nodes divide one of the
    global batches only."""
    train = {"max_samples": 960, "batch_ramp": [[0, 96], [960, 192]]}
    options = "--train --nodes 6 --min_nodes 2 --gpus_per_node 4"
    submit(*options.split(), clap={"train": train}, gradient_accumulation_steps=2)
    (job,) = _job_folders(folder)
    run = json.loads((job / "run.json").read_text())
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    assert [run[name] for name in sizes] == [4, 192, None]
    script = (job / "tiny.sbatch").read_text()
    assert "--fewer_nodes=3,2 " in script
    assert "#SBATCH --no-kill" in script


def test_line_of_the_watching_page_prints_the_jobs_progress(submit, folder):
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
        ({}, "-p gpuu", "", "did you mean 'gpu'"),
        ({}, "", "sbatch: error: Invalid qos", "Invalid qos"),
        ({"sbatch": ["--comment=it's"]}, "", "", "it's: No closing"),
        ({}, "--train", "", "clap.train: max_samples and epochs are missing"),
        ({"partition": "cpu"}, "", "", "pass --gpus_per_node"),
        ({}, "--nodes 5 --spare_nodes 2", "", "7 nodes, but the partition has 6"),
        ({}, "--min_nodes 1", "", "--min_nodes needs --train"),
        ({}, "--train --nodes 2 --min_nodes 2", "", "expected fewer than --nodes 2"),
        ({}, "--train --nodes 2 --min_nodes 1 --set clap.train.batch_ramp=[5]", "", "batch_ramp"),
        ({}, "--train --nodes 5 --min_nodes 3", "", "expected a number from 3 to 4 that divides"),
        ({}, "--time 1-00:00:01", "", "allows at most 1-00:00:00"),
        ({"sbatch": ["--exclusive -t 2-0"]}, "", "", "allows at most 1-00:00:00"),
        ({"gpus_per_node": 4}, "-p gpuu", REFUSED_PARTITION, "did you mean 'gpu'"),
        ({"sbatch": ["--comment=a\nrm x"]}, "", "", "printable"),
        ({}, "--set clap.output=3", "", "clap.output is 3"),
        ({}, "--set clap.bench.widows=3", "", "--set clap.bench.widows: no such field"),
    ],
)
def test_job_that_cannot_run_is_rejected_before_queueing(
    submit, folder, slurm, profile, options, sbatch_error, message
):
    if sbatch_error:
        slurm.write("refuse_test", f"{sbatch_error}\n")
    assert message in submit(*options.split(), code=2, profile=profile)
    assert (_job_folders(folder), slurm.lines("calls")) == ([], [])


def test_time_limit_that_another_qos_or_partition_may_allow_is_submitted(
    submit, slurm, monkeypatch
):
    assert "unless --qos" in submit("--time", "2-0", "--qos", "big")
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    options = "--time UNLIMITED --gpus_per_node 2 --parsable"
    assert submit(*options.split()) == "102\n"


def test_job_that_sbatch_rejects_can_be_submitted_again(submit, folder, slurm):
    slurm.write("refuse", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    errors = submit(code=2)
    (job,) = _job_folders(folder)
    assert f"clap-ds sweep resume '{job}'" in errors
    (slurm.folder / "refuse").unlink()
    assert sweep.main(["resume", str(job)]) == 0
    assert slurm.lines("calls") == [f"--parsable {job}/tiny.sbatch"]


def test_missing_path_is_rejected_unless_an_earlier_job_may_make_it(submit, folder):
    shards = f"{folder}/x-{{0..3}}.tar"
    data = {"source": "webdataset", "shards": shards, "tokenizer": f"{folder}/tokenizer"}
    error = submit(code=2, clap={"data": data})
    assert f"{folder / 'tiny.json'}: clap.data.shards: " in error
    assert f"no such file: {folder}/x-0.tar" in error
    assert "clap.data.tokenizer: " in error
    output = submit("--dependency", "afterok:7", clap={"data": data})
    assert "note: clap.data.shards: " in output
