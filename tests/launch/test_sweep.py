"""Planning, submission, status and resubmission of sweeps, with a fake SLURM."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.jobs import Jobs
from clap_ds.launch.sweep import main
from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of runs' JSONs with the ranks' Python, which takes a second per command."""
    monkeypatch.setattr("clap_ds.launch.jobs.check_environment", lambda *_, **__: "")


def _start(tmp_path: Path, *options: str, code: int = 0) -> Path:
    config = tmp_path / "tiny.json"
    folder = tmp_path / "sweep"
    config.write_text(json.dumps(micro_run()))
    assert (
        main(["--config", str(config), "--folder", str(folder), "--cluster", "jupiter", *options])
        == code
    )
    return folder


@pytest.mark.usefixtures("unchecked")
def test_hyper_parameters_and_repeats(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder = _start(
        tmp_path, "--nodes", "2", "--repeats", "2", "--vary", "optimizer.params.lr=1e-4,3e-4"
    )
    jobs = {job.name: job for job in Jobs.read(folder).jobs}
    assert [*jobs] == [f"n002-lr_{lr}-r{n}" for lr in ("0.0001", "0.0003") for n in (1, 2)]
    assert (
        json.loads((folder / "n002-lr_0.0003-r1" / "run.json").read_text())["optimizer"]["params"][
            "lr"
        ]
        == 3e-4
    )
    assert [job.slurm_id for job in jobs.values()] == ["101", "102", "103", "104"]
    assert slurm.lines("calls") == [f"--parsable {folder}/{name}.sbatch" for name in jobs]


def test_nothing_is_queued_unless_every_job_can_run(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (["--vary", "clap.bench.windws=2,3"], "error: n001-windws_2: clap.bench.windws: no such field"),
        (["--vary", "train_micro_batch_size_per_gpu=4,zwei"], "train_micro_batch_size_per_gpu_zwei"),
        (["--vary", "optimizer.params.lr="], "expected NAME=A,B"),
        (["--vary", "train_batch_size=16,18", "--gpus_per_node", "4"], "n001-train_batch_size_18: train_batch_size: expected"),
        (["--global_batch", "48", "--nodes", "1", "2"], "n002: train_batch_size: expected"),
        (["--gpus_per_node", "1", "--nodes", "2", "2"], "duplicate"),
    ):  # fmt: skip
        folder = _start(tmp_path, *options, code=2)
        assert message in capsys.readouterr().err
        assert not folder.exists()
    assert slurm.lines("calls") == []


@pytest.mark.usefixtures("unchecked")
def test_training_runs_for_a_day_or_as_long_as_the_partition_lets_it(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.write("partitions", "gpu*|gpu:4|12:00:00|9\n")
    options = (
        "--train",
        "--vary",
        "clap.train.max_samples=64,128",
        "--nodes",
        "2",
        "--cluster",
        "generic",
    )
    script = (_start(tmp_path, *options) / "n002-max_samples_64.sbatch").read_text()
    assert {"#SBATCH --time=12:00:00", "#SBATCH --signal=USR1@300"} <= set(script.splitlines())
    assert "-- clap_ds/train.py" in script


@pytest.mark.usefixtures("unchecked")
def test_an_array_is_one_submission(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _start(
        tmp_path, "--array", "--nodes", "2", "--vary", "optimizer.params.lr=1e-4,2e-4,3e-4"
    )
    names = [f"n002-lr_0.000{number}" for number in (1, 2, 3)]
    assert slurm.lines("calls") == [f"--parsable --array=0,1,2 {folder}/array.sbatch"]
    lines = (folder / "array.sbatch").read_text().splitlines()
    assert {"#SBATCH --array=0-2", f"#SBATCH --output={folder}/%A_%a.out"} <= {*lines}
    assert f"folders=({' '.join(f'{folder}/{name}' for name in names)})" in lines
    slurm.write("queue", "101_0|RUNNING|None\n101_1|FAILED|None\n101_2|PENDING|Resources\n")
    assert main(["status", str(folder)]) == 0
    rows = [
        row.split()[:4] for row in capsys.readouterr().out.splitlines() if row.startswith("n002")
    ]
    states = ("running", "failed", "pending")
    assert rows == [[names[task], "2", f"101_{task}", state] for task, state in enumerate(states)]
    assert main(["resume", str(folder), "--partition", "gpu", "--time", "2-0"]) == 2
    assert "partition gpu allows at most" in capsys.readouterr().err
    assert main(["resume", str(folder), "--time", "9", "-q", "big", "--dependency=afterany:7"]) == 0
    options = "--array=1 --time=9 --qos=big --dependency=afterany:7"
    assert slurm.lines("calls")[1:] == [f"--parsable {options} {folder}/array.sbatch"]
    assert [job.slurm_id for job in Jobs.read(folder).jobs] == ["101_0", "102_1", "101_2"]


def _names(folder: Path) -> list[str]:
    """Return the names under which SLURM knows a sweep's jobs."""
    scripts = sorted(folder.glob("*.sbatch"))
    return [re.findall("--job-name=(.*)", script.read_text())[0] for script in scripts]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("queue", "accounting", "rows", "resubmitted"),
    [
        (
            "9|RUNNING|None|{0}\n",
            "",
            ["9 running", "102 pending"],
            0,
        ),  # a killed sweep, another's job 102
        ("", "9|COMPLETED|None|{0}\n", ["9 failed", "102 pending"], 1),
        (
            "9|RUNNING|None|clap-sweep-n001\n",
            "",
            ["- not_submitted", "102 pending"],
            1,
        ),  # another sweep's
        ("9|FAILED|None|{0}\n10|RUNNING|None|{0}\n", "", ["10 running", "102 pending"], 0),
        (
            "8|PENDING|None|{1}\n102|FAILED|None|{1}\n",
            "",
            ["- not_submitted", "8 pending"],
            1,
        ),  # by hand
        ("102|FAILED|None|{1}\n8|FAILED|None|{1}\n", "", ["- not_submitted", "102 failed"], 2),
    ],
)
def test_jobs_without_a_record_are_found_by_their_names(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], queue: str, accounting: str, rows: list[str],
    resubmitted: int,
) -> None:  # fmt: skip
    folder = _start(tmp_path, "--nodes", "1", "2", "--cluster", "generic", "--gpus_per_node", "1")
    (folder / "submission.json").write_text(
        (folder / "submission.json").read_text().replace('"101"', "null")
    )
    known = queue if "102|" in queue else f"{queue}102|PENDING|None|{{1}}\n"
    slurm.write("queue", known.format(*_names(folder)))
    slurm.write("accounting", accounting.format(*_names(folder)))
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    table = [
        row.split() for row in capsys.readouterr().out.splitlines() if re.match(r"n00\d ", row)
    ]
    assert [f"{row[2]} {row[3]}" for row in table] == rows
    assert main(["resume", str(folder)]) == 0
    assert f"resubmitting {resubmitted} of 2 jobs" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")
def test_tasks_of_an_array_without_a_record_are_found(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _start(tmp_path, "--array", "--nodes", "2", "--vary", "optimizer.params.lr=1e-4,2e-4")
    (folder / "submission.json").write_text(
        re.sub(r'"101_\d"', "null", (folder / "submission.json").read_text())
    )
    (name,) = _names(folder)
    slurm.write("queue", f"9_0|RUNNING|None|{name}\n9_1|PENDING|Priority|{name}\n")
    assert main(["resume", str(folder)]) == 0
    assert "resubmitting 0 of 2 jobs" in capsys.readouterr().out
    assert [job.slurm_id for job in Jobs.read(folder).jobs] == ["9_0", "9_1"]


@pytest.mark.usefixtures("unchecked", "slurm")
def test_names_differ_in_folders_of_one_name(tmp_path: Path) -> None:
    names: set[str] = set()
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        names |= {*_names(_start(tmp_path / part, "--nodes", "1", "2"))}
    assert len(names) == 4


@pytest.mark.usefixtures("unchecked")
def test_ctrl_c_while_sbatch_runs_says_how_to_find_the_job(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("sbatch", f"#!/bin/sh\n[ $1 = --test-only ] || kill -INT {os.getpid()}\nsleep 5\n")
    previous = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # pytest's workers ignore it
    try:
        folder = _start(tmp_path, code=130)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert f"clap-ds sweep status {folder}" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("recorded", "state"), [("completed", "completed"), ("running", "failed")])
def test_run_whose_supervisor_was_killed_tells_its_own_end(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], recorded: str, state: str
) -> None:
    folder = _start(tmp_path)
    slurm.write("queue", "101|FAILED|NonZeroExitCode\n")
    (attempt := folder / "n001" / "attempts" / "0").mkdir(parents=True)
    (attempt / "run_directory").write_text(str(tmp_path))
    (tmp_path / "summary.json").write_text(json.dumps({"state": recorded}))
    (folder / "n001" / "attempts.json").write_text(json.dumps({"state": "running"}))
    assert main(["status", str(folder)]) == 0
    assert f"1 {state}" in capsys.readouterr().out


QUEUE = """106|RUNNING|None
107|CANCELLED|None
108|PENDING|Resources
109|PENDING|BeginTime
110|PENDING|job requeued in held state
"""
STATES = (
    "completed", "out_of_memory", "timeout", "failed", "failed", "running", "terminated", "pending", "requeued", "held",
    "not_submitted",
)  # fmt: skip


@pytest.mark.usefixtures("unchecked")
def test_status_and_resume(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("partitions", "booster|gpu:4|infinite|20\n")
    folder = _start(tmp_path, "--nodes", *map(str, range(1, 12)))
    records = ["completed", "out_of_memory", "timeout", "failed", "running", "running"]
    for nodes, state in [*enumerate(records, start=1), (9, "failed"), (10, "failed")]:
        (folder / f"n{nodes:03d}" / "attempts.json").write_text(
            json.dumps({"state": state, "error": "lost n7"})
        )
    (folder / "submission.json").write_text(
        (folder / "submission.json").read_text().replace('"111"', "null")
    )
    slurm.write("queue", QUEUE)
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    heads, *rows, counts = capsys.readouterr().out.splitlines()
    assert heads.split() == ["job", "nodes", "id", "state", "note"]
    # n005's record is `running`, but SLURM no longer knows it.
    assert [row.split()[:4] for row in rows] == [
        [f"n{n:03d}", f"{n}", "-" if n == 11 else f"{100 + n}", state]
        for n, state in enumerate(STATES, start=1)
    ]
    assert "2 failed" in counts
    assert rows[8].endswith("lost n7")
    assert rows[9].endswith("scontrol release 110")
    assert main(["resume", str(folder), "--time", "00:45:00", "--exclude", "n[1-2]"]) == 0
    shown = capsys.readouterr().out
    assert "resubmitting 5 of 11 jobs: n003, n004, n005, n007, n011" in shown
    assert "n010 is held; to release it: scontrol release 110" in shown
    assert len(slurm.lines("calls")) == 16
    assert (
        slurm.lines("calls")[-1]
        == f"--parsable --time=00:45:00 --exclude=n[1-2] {folder}/n011.sbatch"
    )
    assert main(["status", str(folder.parent / "swep")]) == 2
    assert "did you mean 'sweep'?" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked", "slurm")
@pytest.mark.parametrize(("name", "value"), [("name", "a/b"), ("folder", ".."), ("nodes", "1")])
def test_records_that_others_wrote_are_not_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    folder = _start(tmp_path)
    (folder / "n001" / "attempts.json").write_text(
        json.dumps({"state": "failed", "error": "\x1b[2J"})
    )
    assert main(["status", str(folder)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    record = json.loads((folder / "submission.json").read_text())
    record["jobs"][0][name] = value
    (folder / "submission.json").write_text(json.dumps(record))
    assert main(["status", str(folder)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
def test_strong_scaling_keeps_the_global_batch_by_accumulation(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    micro_batch = micro_run()["train_micro_batch_size_per_gpu"]
    folder = _start(
        tmp_path, "--nodes", "1", "2", "4", "--global_batch", str(micro_batch * 32), "--dry_run"
    )
    assert slurm.lines("calls") == []
    for nodes, steps in ((1, 8), (2, 4), (4, 2)):
        run = json.loads((folder / f"n{nodes:03d}" / "run.json").read_text())
        names = (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
        assert [run[name] for name in names] == [micro_batch, steps, micro_batch * 32]


def test_both_published_models_on_1_to_128_nodes_by_the_manuals_line(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    manual = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ clap-ds sweep (--cluster jupiter .*)$", manual, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert main([*line.split(), "--folder", str(tmp_path / "sweep"), "--dry_run"]) == 0
    scales = {1: "15", 2: "15", 4: "15", 8: "15", 16: "25", 32: "25", 64: "30", 128: "30"}
    for model, micro_batch in (("tiny", 616), ("base", 416)):
        for nodes, minutes in scales.items():
            name = f"n{nodes:03d}-htsat_{model}"
            run = json.loads((tmp_path / "sweep" / name / "run.json").read_text())
            assert run["train_micro_batch_size_per_gpu"] == micro_batch
            lines = {*(tmp_path / "sweep" / f"{name}.sbatch").read_text().splitlines()}
            options = (
                f"time=00:{minutes}:00",
                f"nodes={nodes}",
                "cpus-per-task=72",
                "gres=gpu:4",
                "signal=USR1@60",
            )
            assert {f"#SBATCH --{option}" for option in options} <= lines
            assert run["clap"]["output"] == {
                "dir": str(tmp_path / "sweep" / "runs"),
                "run_name": name,
            }


@pytest.mark.usefixtures("unchecked")
def test_a_sweep_whose_files_have_former_names_is_resumed(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("partitions", "booster|gpu:4|infinite|20\n")
    slurm.write("queue")
    slurm.write("accounting")
    folder = _start(tmp_path, "--nodes", "1", "2")
    (folder / "submission.json").rename(folder / "jobs.json")
    (folder / "n001" / "job.json").write_text(json.dumps({"state": "completed"}))
    (folder / "n002" / "job.json").write_text(json.dumps({"state": "failed", "error": "lost n7"}))
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    assert "1 completed, 1 failed" in capsys.readouterr().out
    assert main(["resume", str(folder)]) == 0
    assert "resubmitting 1 of 2 jobs: n002" in capsys.readouterr().out
    assert json.loads((folder / "submission.json").read_text())["jobs"][1]["slurm_id"] == "103"
    assert not (folder / "n002" / "job.json").exists()
