"""One job from one command: its script, its record, and everything that is refused before it is queued."""

import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.submit import main
from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm


class Submission:
    """`call(options)` submits a micro run on a site with an account, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my work"
        self.folder.mkdir()
        self.site: dict[str, Any] = {
            "account": "mine",
            "sbatch": ["--exclusive"],
            "run_root": str(self.folder / "runs"),
        }
        self.run = micro_run()

    def call(self, *options: str) -> int:
        (self.folder / "tiny.json").write_text(json.dumps(self.run))
        (self.folder / "site.json").write_text(json.dumps(self.site))
        given = ["--site", str(self.folder / "site.json"), "--config", str(self.folder / "tiny.json")]
        return main([*given, *options])

    @property
    def jobs(self) -> list[Path]:
        return sorted((self.folder / "runs" / "jobs").glob("*"))


@pytest.fixture
def submission(tmp_path: Path, slurm: FakeSlurm) -> Submission:
    return Submission(tmp_path)


def _lines(job: Path) -> set[str]:
    return set((job / "slurm.sbatch").read_text().splitlines())


def test_everything_of_the_site_is_in_the_script(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submission.site |= {"partition": "gpu", "cpus_per_task": 8, "sbatch": ["--qos=big"], "gpus_per_node": 2}
    assert submission.call("--nodes", "2", "--exclude", "n[1-2]", "--launcher", "pdsh") == 0
    (job,) = submission.jobs
    expected = {
        "--account=mine", "--partition=gpu", "--qos=big", "--nodes=2", "--gres=gpu:2", "--ntasks-per-node=2",
        "--cpus-per-task=8", "--time=00:15:00", "--signal=B:USR1@60", "--requeue", "--open-mode=append",
        "--exclude=n[1-2]", f'--output="{job}/slurm-%j.out"',
    }  # fmt: skip
    assert {f"#SBATCH {option}" for option in expected} <= _lines(job)
    assert "#SBATCH --no-kill" not in _lines(job)
    (recorded,) = json.loads((job / "jobs.json").read_text())["jobs"]
    assert (recorded["slurm_id"], recorded["nodes"]) == ("101", 2)
    (call,) = slurm.calls
    assert f"--job-name={recorded['submitted_as']}" in call
    assert recorded["submitted_as"].startswith("clap-tiny-")
    run = json.loads((job / "run.json").read_text())
    assert run["clap"]["output"] == {"root": str(submission.folder / "runs"), "label": "tiny"}
    shown = capsys.readouterr().out
    log = job / "slurm-101.out"
    assert (
        f"submitted job 101: {recorded['submitted_as']}, 2 nodes, 2 ranks on each, 00:15:00\nfolder: {job}\n" in shown
    )
    assert all(how in shown for how in (f"log: {log}", f"tail -F '{log}'", "squeue -j 101", "scancel 101"))


def test_spare_nodes_and_training(submission: Submission, capsys: pytest.CaptureFixture[str]) -> None:
    submission.run["clap"]["train"] = {"samples": 64}
    submission.run["clap"]["output"] = {"root": "/mine", "label": "its"}
    options = ("--nodes", "2", "--spare_nodes", "1", "--shrink", "--until_done", "--train", "--time", "8:00")
    assert submission.call(*options, "--label", "my own") == 0
    (job,) = submission.jobs
    assert job.name.startswith("my_own-")
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill", "#SBATCH --signal=USR1@240"} <= _lines(job)
    text = (job / "slurm.sbatch").read_text()
    assert "--spare_nodes=1 --requeues=2 --shrink --until_done" in text
    assert text.endswith('-- clap_ds/train.py --deepspeed_config "$folder/run.json"\n')
    assert json.loads((job / "run.json").read_text())["clap"]["output"] == {"root": "/mine", "label": "my_own"}
    assert ", 3 nodes, 1 of them spare, 4 ranks on each, 8:00\n" in capsys.readouterr().out


def test_what_to_do_with_checkpoints_reaches_training(
    submission: Submission, capsys: pytest.CaptureFixture[str]
) -> None:
    submission.run["clap"]["train"] = {"samples": 16}
    assert submission.call("--train", "--", "--from_weights", "40", "--accept_changes") == 0
    (job,) = submission.jobs
    text = (job / "slurm.sbatch").read_text()
    assert text.endswith('--deepspeed_config "$folder/run.json" --from_weights 40 --accept_changes\n')
    assert submission.call("--", "--restart") == 2
    assert "options after --, are for training" in capsys.readouterr().err
    for options in ("--resume", "runs", "--from_weights", "--skip_steps 6-5", "--restart --from_weights 4"):
        with pytest.raises(SystemExit, match="2"):
            submission.call("--train", "--", *options.split())
    assert submission.jobs == [job]


def test_check_shows_the_script_and_leaves_nothing(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submission.call("--check", "--nodes", "2") == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in shown
    assert "sbatch  would take it" in shown
    assert (submission.jobs, slurm.calls) == ([], [])


@pytest.mark.parametrize(
    ("site", "options", "message"),
    [
        ({"python": "/bin/true"}, (), "python: /bin/true can't run this package"),
        ({"setup": ["true", "module load CUDAA"]}, (), "setup: 'module load CUDAA': "),
        ({}, ("--until_done",), "are for training: give --train, too"),
        ({}, ("--train",), "tiny: clap.train: missing samples or epochs"),
        ({}, ("--time", "soon"), "'soon': expected a SLURM time"),
        ({"partition": "cpu"}, (), "no gpus_per_node in the site file, give --gpus: sinfo shows none"),
    ],
)
def test_refused_before_it_is_queued(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str],
    site: dict[str, Any], options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    submission.site |= site
    assert submission.call(*options) == 2
    assert message in capsys.readouterr().err
    assert (submission.jobs, slurm.calls) == ([], [])


def test_what_sbatch_would_refuse_is_never_queued(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("refuse_test", "allocation failure: Invalid qos specification\n")
    for options in ((), ("--check",)):
        assert submission.call(*options, "--nodes", "2") == 2
        assert "error: sbatch would refuse it: Invalid qos specification\n" in capsys.readouterr().err
    assert slurm.tested == ["#SBATCH --nodes=2"] * 2
    slurm.write("refuse_test", "sbatch: error: Socket timed out on send/recv operation\n")
    assert submission.call("--check") == 0
    assert (
        "not checked: partition, account, nodes and time: sbatch --test-only: Socket timed out"
        in capsys.readouterr().out
    )
    assert (submission.jobs, slurm.calls) == ([], [])


def test_nodes_that_are_down_for_now_do_not_keep_a_job_from_the_queue(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("refuse_test", "allocation failure: Requested node configuration is not available\n")
    assert submission.call() == 2
    assert "would refuse it: Requested node configuration is not available" in capsys.readouterr().err
    slurm.write("absent", "n[1-3]\nn7\n")
    assert submission.call() == 0
    assert "configuration is not available; out of service: n[1-3],n7" in capsys.readouterr().out


def test_sbatch_that_refuses_leaves_no_folder(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("refuse", "sbatch: error: Invalid qos specification\n")
    assert submission.call() == 2
    assert "Invalid qos specification" in capsys.readouterr().err
    assert submission.jobs == []


def test_a_job_whose_answer_was_lost_is_found_by_the_next_call(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("silent")
    slurm.write("forgotten")
    assert submission.call() == 2
    assert "Socket timed out" in capsys.readouterr().err
    for name in ("silent", "forgotten"):
        slurm.remove(name)
    assert submission.call() == 2
    assert "job 101 was submitted at" in capsys.readouterr().err
    (job,) = submission.jobs
    assert json.loads((job / "jobs.json").read_text())["jobs"][0]["slurm_id"] == "101"
    assert len(slurm.calls) == 1
    assert (submission.call(), submission.call()) == (0, 0)
    assert len(slurm.calls) == len(submission.jobs) == 3
