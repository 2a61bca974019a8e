"""Planning, submission, status and resubmission of sweeps, with a fake SLURM."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.jobs import Jobs
from clap_ds.launch.sweep import main
from tests.conftest import ROOT, micro_run


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of runs' JSONs with the ranks' Python, which takes a second per command."""
    monkeypatch.setattr("clap_ds.launch.jobs.check_environment", lambda *_, **__: "")


def _start(tmp_path: Path, *options: str, code: int = 0) -> Path:
    """Sweep over micro runs on a cluster whose default partition has 4 GPUs per node."""
    config = tmp_path / "tiny.json"
    folder = tmp_path / "sweep"
    config.write_text(json.dumps(micro_run()))
    assert main(["--config", str(config), "--folder", str(folder), *options]) == code
    return folder


def _read_run(folder: Path, job: str) -> dict[str, Any]:
    return dict(json.loads((folder / job / "run.json").read_text()))


def _edit_record(folder: Path, pattern: str, replacement: str) -> None:
    record = folder / "submission.json"
    record.write_text(re.sub(pattern, replacement, record.read_text()))


def _read_slurm_names(folder: Path) -> list[str]:
    """Return the names under which SLURM knows a sweep's jobs."""
    scripts = sorted(folder.glob("*.sbatch"))
    return [re.findall("--job-name=(.*)", script.read_text())[0] for script in scripts]


Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a subcommand: `call("resume", folder, *options, code=2)` checks the exit code, and
    returns the output, or the errors if it isn't 0."""

    def call(name: str, folder: Path, *options: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([name, str(folder), *options]) == code
        output, errors = capsys.readouterr()
        return errors if code else output

    return call


def _parse_table(output: str) -> list[list[str]]:
    """Return name, nodes, id and state of each job, as `status` prints them."""
    return [line.split()[:4] for line in output.splitlines() if re.match(r"n0\S* +\d", line)]


@pytest.mark.usefixtures("unchecked")
def test_sweep_has_a_job_for_each_value_and_repeat(tmp_path, slurm):
    slurm.write("partitions", "gpu*|gpu:4|12:00:00|9\n")
    training = ["--train", "--vary", "clap.train.max_samples=64,128"]
    folder = _start(tmp_path, "--nodes", "2", "--repeats", "2", *training)
    names = [f"n002-max_samples_{value}-r{repeat}" for value in (64, 128) for repeat in (1, 2)]
    assert [job.name for job in Jobs.read(folder).jobs] == names
    assert _read_run(folder, names[2])["clap"]["train"]["max_samples"] == 128
    assert slurm.lines("calls") == [f"--parsable {folder}/{name}.sbatch" for name in names]
    # Training runs for a day or the partition's limit.
    script = (folder / f"{names[0]}.sbatch").read_text()
    assert {"#SBATCH --time=12:00:00", "#SBATCH --signal=USR1@300"} <= {*script.splitlines()}
    assert "-- clap_ds/train.py" in script


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--vary clap.bench.windws=2,3", "error: n001-windws_2: clap.bench.windws: no such field"),
        ("--vary optimizer.params.lr=", "expected NAME=A,B"),
        ("--vary train_batch_size=16,18", "n001-train_batch_size_18: train_batch_size: expected"),
        ("--nodes 2 2", "duplicate"),
    ],
)
def test_nothing_is_queued_unless_every_job_can_run(tmp_path, slurm, capsys, options, message):
    folder = _start(tmp_path, *options.split(), code=2)
    assert message in capsys.readouterr().err
    assert not folder.exists()
    assert slurm.lines("calls") == []


@pytest.mark.usefixtures("unchecked")
def test_array_is_one_submission_and_resumes_missing_tasks(tmp_path, slurm, call):
    folder = _start(tmp_path, "--array", "--vary", "optimizer.params.lr=1e-4,2e-4,3e-4")
    names = ["n001-lr_0.0001", "n001-lr_0.0002", "n001-lr_0.0003"]
    assert slurm.lines("calls") == [f"--parsable --array=0,1,2 {folder}/array.sbatch"]
    lines = (folder / "array.sbatch").read_text().splitlines()
    assert {"#SBATCH --array=0-2", f"#SBATCH --output={folder}/%A_%a.out"} <= {*lines}
    assert f"folders=({' '.join(f'{folder}/{name}' for name in names)})" in lines
    slurm.write("queue", "101_0|RUNNING|None\n101_1|FAILED|None\n101_2|PENDING|Resources\n")
    rows = _parse_table(call("status", folder))
    assert [row[2:] for row in rows] == [
        ["101_0", "running"],
        ["101_1", "failed"],
        ["101_2", "pending"],
    ]
    call("resume", folder, "--time", "9", "-q", "big", "--dependency=afterany:7")
    options = "--array=1 --time=9 --qos=big --dependency=afterany:7"
    assert slurm.lines("calls")[1:] == [f"--parsable {options} {folder}/array.sbatch"]
    assert [job.slurm_id for job in Jobs.read(folder).jobs] == ["101_0", "102_1", "101_2"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("queue", "accounting", "first", "second", "num_resubmitted"),
    [
        # A killed sweep, and another one's job 102.
        ("9|RUNNING|None|{0}\n102|PENDING|None|{1}\n", "", "9 running", "102 pending", 0),
        ("102|PENDING|None|{1}\n", "9|COMPLETED|None|{0}\n", "9 failed", "102 pending", 1),
        # Another sweep's.
        ("9|RUNNING|None|clap-sweep-n001\n102|PENDING|None|{1}\n", "", "- not_submitted", "102 pending", 1),
        # Submitted by hand.
        ("8|PENDING|None|{1}\n102|FAILED|None|{1}\n", "", "- not_submitted", "8 pending", 1),
    ],
)  # fmt: skip
def test_job_without_a_record_is_found_by_its_name(
    tmp_path, slurm, call, queue, accounting, first,
    second, num_resubmitted
):  # fmt: skip
    folder = _start(tmp_path, "--nodes", "1", "2")
    _edit_record(folder, '"101"', "null")
    names = _read_slurm_names(folder)
    slurm.write("queue", queue.format(*names))
    slurm.write("accounting", accounting.format(*names))
    rows = _parse_table(call("status", folder))
    assert [" ".join(row[2:]) for row in rows] == [first, second]
    assert f"resubmitting {num_resubmitted} of 2 jobs" in call("resume", folder)


@pytest.mark.usefixtures("unchecked")
def test_ctrl_c_while_sbatch_runs_names_the_command_that_finds_the_job(tmp_path, slurm, capsys):
    slurm.write_program("sbatch", f"[ $1 = --test-only ] || kill -INT {os.getpid()}\nsleep 5")
    previous = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # pytest's workers ignore it
    try:
        folder = _start(tmp_path, code=130)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert f"clap-ds sweep status {folder}" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
def test_job_of_a_killed_supervisor_has_the_state_of_its_run(tmp_path, slurm, call):
    folder = _start(tmp_path)
    slurm.write("queue", "101|FAILED|NonZeroExitCode\n")
    attempt = folder / "n001" / "attempts" / "0"
    attempt.mkdir(parents=True)
    (attempt / "run_directory").write_text(str(tmp_path))
    (tmp_path / "summary.json").write_text(json.dumps({"state": "completed"}))
    (folder / "n001" / "attempts.json").write_text(json.dumps({"state": "running"}))
    assert _parse_table(call("status", folder)) == [["n001", "1", "101", "completed"]]


# Of each job: state in its record, in SLURM, and as shown.
JOBS = [
    ("completed", "", "completed"),
    ("out_of_memory", "", "out_of_memory"),
    ("running", "", "failed"),  # SLURM no longer knows it
    ("running", "RUNNING|None", "running"),
    ("", "CANCELLED|None", "terminated"),
    ("", "PENDING|Resources", "pending"),
    ("failed", "PENDING|BeginTime", "requeued"),
    ("failed", "PENDING|job requeued in held state", "held"),
]


@pytest.mark.usefixtures("unchecked")
def test_resume_submits_jobs_that_are_neither_done_nor_under_way(tmp_path, slurm, call):
    slurm.write("partitions", "gpu*|gpu:4|infinite|20\n")
    folder = _start(tmp_path, "--nodes", *(str(number) for number in range(1, len(JOBS) + 1)))
    queue = ""
    for number, (recorded, slurm_state, _) in enumerate(JOBS, start=1):
        if recorded:
            record = json.dumps({"state": recorded, "error": "lost n7"})
            (folder / f"n{number:03d}" / "attempts.json").write_text(record)
        if slurm_state:
            queue += f"{100 + number}|{slurm_state}\n"
    slurm.write("queue", queue)
    assert [row[3] for row in _parse_table(call("status", folder))] == [state for *_, state in JOBS]
    *_, requeued, held, counts = call("status", folder).splitlines()
    assert requeued.endswith("lost n7")
    assert held.endswith("scontrol release 108")
    assert "1 failed" in counts
    num_calls = len(slurm.lines("calls"))
    output = call("resume", folder, "--time", "00:45:00", "--exclude", "n[1-2]")
    assert "resubmitting 2 of 8 jobs: n003, n005" in output
    assert "n008 is held; to release it: scontrol release 108" in output
    calls = slurm.lines("calls")[num_calls:]
    assert len(calls) == 2
    assert calls[0] == f"--parsable --time=00:45:00 --exclude=n[1-2] {folder}/n003.sbatch"


def test_missing_folder_is_rejected_with_the_nearest_name(tmp_path, call):
    (tmp_path / "sweep").mkdir()
    assert "did you mean 'sweep'?" in call("status", tmp_path / "swep", code=2)


@pytest.mark.usefixtures("unchecked", "slurm")
@pytest.mark.parametrize(("name", "value"), [("name", "a/b"), ("nodes", "1")])
def test_record_is_not_trusted(tmp_path, call, name, value):
    folder = _start(tmp_path)
    (folder / "n001" / "attempts.json").write_text('{"state": "failed", "error": "\\u001b[2J"}')
    assert "\x1b" not in call("status", folder)
    record = json.loads((folder / "submission.json").read_text())
    record["jobs"][0][name] = value
    (folder / "submission.json").write_text(json.dumps(record))
    assert name in call("status", folder, code=2)


@pytest.mark.usefixtures("unchecked")
def test_strong_scaling_keeps_the_global_batch_by_accumulation(tmp_path, slurm):
    micro_batch = micro_run()["train_micro_batch_size_per_gpu"]
    global_batch = micro_batch * 32  # 8 micro-batches on each of 4 GPUs
    options = ["--global_batch", str(global_batch), "--dry_run"]
    folder = _start(tmp_path, "--nodes", "1", "4", *options)
    assert slurm.lines("calls") == []
    for nodes, steps in ((1, 8), (4, 2)):
        run = _read_run(folder, f"n{nodes:03d}")
        assert run["train_micro_batch_size_per_gpu"] == micro_batch
        assert run["gradient_accumulation_steps"] == steps
        assert run["train_batch_size"] == global_batch


def test_line_of_the_manual_runs_both_published_models_on_1_to_128_nodes(
    tmp_path, slurm, monkeypatch
):
    manual = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ clap-ds sweep (--cluster jupiter .*)$", manual, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "sweep"
    assert main([*line.split(), "--folder", str(folder), "--dry_run"]) == 0
    names = [f"n{2**power:03d}-htsat_{model}" for model in ("tiny", "base") for power in range(8)]
    assert sorted(job.name for job in Jobs.read(folder).jobs) == sorted(names)
    run = _read_run(folder, "n016-htsat_base")
    assert run["train_micro_batch_size_per_gpu"] == 416
    assert run["clap"]["output"] == {"dir": str(folder / "runs"), "run_name": "n016-htsat_base"}
    options = "time=00:25:00 nodes=16 cpus-per-task=72 gres=gpu:4 signal=USR1@60"
    script = (folder / "n016-htsat_base.sbatch").read_text()
    assert {f"#SBATCH --{option}" for option in options.split()} <= {*script.splitlines()}
