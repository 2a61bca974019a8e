"""Plans, submission, states and what is missing, with SLURM's commands played by small scripts; what records say of a job."""

import json
import re
from pathlib import Path

import pytest

from clap_ds.launch.jobs import Jobs, figures_of, state_of
from clap_ds.launch.sweep import main
from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs' JSONs aren't tried by the ranks' Python, which takes a second for each command."""
    monkeypatch.setattr("clap_ds.launch.jobs.check_environment", lambda *_, **__: "")


def _start(tmp_path: Path, *options: str, code: int = 0) -> Path:
    config, folder = tmp_path / "tiny.json", tmp_path / "sweep"
    config.write_text(json.dumps(micro_run()))
    assert main(["--config", str(config), "--folder", str(folder), "--site", "jupiter", *options]) == code
    return folder


def _finish(folder: Path, name: str, state: str, **fields: str) -> None:
    (folder / name / "job.json").write_text(json.dumps({"state": state, "error": None, **fields}))


def _states(folder: Path) -> dict[str, tuple[str, str]]:
    return Jobs.read(folder).states()


@pytest.mark.usefixtures("unchecked")
def test_hyper_parameters_and_repeats(tmp_path: Path, slurm: FakeSlurm) -> None:
    options = ("--nodes", "2", "--repeats", "2", "--vary", "optimizer.params.lr=1e-4,3e-4", "--array")
    folder = _start(tmp_path, *options)
    sweep = Jobs.read(folder)
    assert [job.name for job in sweep.jobs] == [f"n002-lr_{lr}-r{n}" for lr in ("0.0001", "0.0003") for n in (1, 2)]
    assert json.loads((folder / "n002-lr_0.0003-r1" / "run.json").read_text())["optimizer"]["params"]["lr"] == 3e-4
    (call,) = slurm.calls
    assert "--array=0,1,2,3" in call
    assert [job.slurm_id for job in sweep.jobs] == ["101_0", "101_1", "101_2", "101_3"]
    for job in sweep.jobs[:3]:
        _finish(folder, job.name, "completed")
    assert main(["resume", str(folder)]) == 0
    assert "--array=3" in slurm.calls[1]
    assert [job.slurm_id for job in Jobs.read(folder).jobs] == ["101_0", "101_1", "101_2", "102_3"]


@pytest.mark.usefixtures("unchecked")
def test_sbatch_is_asked_once_for_each_number_of_nodes(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "--repeats", "3")
    assert slurm.tested == ["#SBATCH --nodes=1", "#SBATCH --nodes=2"]
    before = (folder / "n001-r1.sbatch").read_text()
    slurm.write("refuse_test", "sbatch: error: Invalid node name specified in exclude list: nope\n")
    assert main(["resume", str(folder), "--exclude", "nope"]) == 2
    assert "sbatch would refuse it: Invalid node name" in capsys.readouterr().err
    assert (len(slurm.calls), (folder / "n001-r1.sbatch").read_text()) == (6, before)


def test_nothing_is_queued_unless_every_job_can_run(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (["--vary", "clap.bench.windws=2,3"], "n001-windws_2: clap.bench.windws: no such field; did you mean"),
        (["--vary", "train_micro_batch_size_per_gpu=4,zwei"], 'n001-train_micro_batch_size_per_gpu_zwei: train_micro_batch'),
        (["--vary", "train_batch_size=16,18", "--gpus", "4"], "n001-train_batch_size_18: train_batch_size: 18 is not"),
        (["--train"], "n001: clap.train: missing samples or epochs"),
        (["--global_batch", "48", "--nodes", "1", "2"], "n002: train_batch_size: 48 is not"),
    ):  # fmt: skip
        folder = _start(tmp_path, *options, code=2)
        assert message in capsys.readouterr().err
        assert not folder.exists()
    folder.mkdir()
    _start(tmp_path, "--train", code=2)
    assert folder.exists(), "it was there before"
    assert slurm.calls == []


@pytest.mark.usefixtures("unchecked")
def test_training_runs_for_a_day_or_as_long_as_the_partition_lets_it(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.write("partitions", "gpu*|8|gpu:4|12:00:00\n")
    options = ("--train", "--vary", "clap.train.samples=64,128", "--nodes", "2", "--site", "generic")
    folder = _start(tmp_path, *options)
    script = (folder / "n002-samples_64.sbatch").read_text()
    assert {"#SBATCH --time=12:00:00", "#SBATCH --signal=USR1@300"} <= set(script.splitlines())
    assert "-- clap_ds/train.py" in script


@pytest.mark.usefixtures("unchecked")
def test_status_and_resume(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "3", "4", "5", "6", "7", "8")
    for nodes, state in enumerate(["completed", "out_of_memory", "timeout", "failed", "running", "running"], start=1):
        _finish(folder, f"n{nodes:03d}", state)
    (folder / "n005-105.out").write_text("began")
    _finish(folder, "n001", "completed", run_directory=str(folder))
    (folder / "summary.json").write_text('{"samples_per_s_per_gpu": {"mean": 2.5}}')
    slurm.write("queue", "106 RUNNING\n108 PENDING\n107 CANCELLED\n")
    states = _states(folder)
    # n005 says it runs, but SLURM no longer knows it; n007 never came to say anything.
    expected = ["completed", "out_of_memory", "timeout", "failed", "failed", "running", "terminated", "init"]
    assert [state for state, _ in states.values()] == expected
    assert states["n005"][1].endswith(f"see {folder / 'n005-105.out'}")
    assert states["n007"][1] == "cancelled before it began"
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    heads, first, *_, last, counts = capsys.readouterr().out.splitlines()
    assert [line.split() for line in (heads, first, last)] == [
        ["job", "nodes", "id", "state", "result", "note"],
        ["n001", "1", "101", "completed", "2.50", "samples/s/GPU"],
        ["n008", "8", "108", "init", "pending"],
    ]
    assert counts.endswith(", 1 terminated, 1 init")
    assert main(["resume", str(folder), "--dry_run"]) == 0
    assert "4 of 8 jobs are missing: n003, n004, n005, n007" in capsys.readouterr().out
    assert main(["resume", str(folder), "--time", "00:45:00", "--exclude", "n[1-2]"]) == 0
    assert len(slurm.calls) == 12
    lines = (folder / "n003.sbatch").read_text().splitlines()
    assert {"#SBATCH --time=00:45:00", "#SBATCH --exclude=n[1-2]"} <= set(lines)
    slurm.write("queue", "106 RUNNING\n108 PENDING\n109 PENDING\n110 PENDING\n111 PENDING\n112 RUNNING\n")
    assert main(["resume", str(folder)]) == 0
    assert "0 of 8 jobs are missing" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")
def test_mistakes_end_with_2(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = _start(tmp_path, "--nodes", "1"), str(tmp_path / "tiny.json")
    for arguments, message in (
        (["--config", config, "--folder", str(folder)], "there is a sweep already"),
        (["status", str(tmp_path)], f"{tmp_path}/jobs.json: can't be read: No such file"),
        (["--site", "jupitr", "--config", config], "did you mean 'jupiter'?"),
        (["--config", str(tmp_path / "missing.json")], "no such file"),
        (["--config", config, "--gpus", "1", "--nodes", "2", "2", "--folder", str(tmp_path / "other")], "given twice"),
        (["--config", config, "--vary", "clap.seed"], "expected NAME=VALUE"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    for bad in (["--nodes", "0"], ["--per_nodes", "8"]):
        with pytest.raises(SystemExit, match="2"):
            main(["--config", config, *bad])


@pytest.mark.usefixtures("unchecked")
def test_a_file_from_a_node_count_on(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tokens in (("few", 16), ("many", 32)):
        (tmp_path / f"{name}.json").write_text(json.dumps(micro_run(clap={"text_tokens": tokens})))
    files = [f"8={tmp_path}/many.json", f"1={tmp_path}/few.json"]
    command = ["--site", "jupiter", "--nodes", "2", "8", "16", "--dry_run", "--folder", str(tmp_path / "sweep")]
    assert main([*command, "--per_nodes", *files]) == 0
    runs = [json.loads((tmp_path / "sweep" / name / "run.json").read_text()) for name in ("n002", "n008", "n016")]
    assert [run["clap"]["text_tokens"] for run in runs] == [16, 32, 32]
    for wrong, message in (
        ([*files, "--config", "htsat_tiny"], "one of the two"),
        (files[:1], "no file for 2 nodes: the first is for 8 and more"),
    ):
        assert main([*command[:-1], str(tmp_path / "other"), "--per_nodes", *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
def test_strong_scaling_keeps_the_global_batch_by_accumulation(tmp_path: Path, slurm: FakeSlurm) -> None:
    micro_batch = micro_run()["train_micro_batch_size_per_gpu"]
    folder = _start(tmp_path, "--nodes", "1", "2", "4", "--global_batch", str(micro_batch * 32), "--dry_run")
    for nodes, steps in ((1, 8), (2, 4), (4, 2)):
        run = json.loads((folder / f"n00{nodes}" / "run.json").read_text())
        sizes = [
            run[name] for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        ]
        assert sizes == [micro_batch, steps, micro_batch * 32]


def test_both_published_models_on_1_to_128_nodes_by_the_manuals_line(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    manual = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ python launch/sweep\.py (--site jupiter .*)$", manual, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert main([*line.split(), "--folder", str(tmp_path / "sweep"), "--dry_run"]) == 0
    scales = {1: "15", 2: "15", 4: "15", 8: "15", 16: "25", 32: "25", 64: "30", 128: "30"}
    for model, micro_batch in (("tiny", 616), ("base", 416)):
        for nodes, minutes in scales.items():
            name = f"n{nodes:03d}-htsat_{model}"
            run = json.loads((tmp_path / "sweep" / name / "run.json").read_text())
            assert run["train_micro_batch_size_per_gpu"] == micro_batch
            lines = {*(tmp_path / "sweep" / f"{name}.sbatch").read_text().splitlines()}
            options = (f"time=00:{minutes}:00", f"nodes={nodes}", "cpus-per-task=72", "gres=gpu:4", "signal=USR1@60")
            assert {f"#SBATCH --{option}" for option in options} <= lines
            assert run["clap"]["output"] == {"root": str(tmp_path / "sweep" / "runs"), "label": name}
    assert (len(slurm.tested), slurm.calls) == (len(scales), [])


# --- what became of a job, whose records may be missing, half-written or stale


@pytest.mark.parametrize(
    ("record", "slurm_id", "slurm_state", "logged", "expected"),
    [
        ({"state": "completed"}, "7", None, True, ("completed", "")),
        ({"state": "failed", "error": "why"}, "7", "FAILED", True, ("failed", "why")),
        ({"state": "completed"}, None, None, True, ("completed", "")),  # its id was lost
        ({"state": "running"}, "7", "RUNNING", True, ("running", "running")),
        ({"state": "timeout"}, "7", "PENDING", True, ("init", "pending")),  # queued again
        ({"state": "running"}, "7", "COMPLETING", True, ("running", "completing")),
        ({}, "7", "CONFIGURING", False, ("init", "configuring")),
        ({}, "7", "PENDING", False, ("init", "pending")),
        ({}, None, None, False, ("init", "not submitted")),
        ({}, "7", "CANCELLED", False, ("terminated", "cancelled before it began")),
        ({}, "7", None, False, ("terminated", "cancelled before it began")),
        ({}, "7", "NODE_FAIL", False, ("failed", "node_fail before it began")),
        ({"state": "running"}, "7", "NODE_FAIL", True, ("failed", "SLURM: NODE_FAIL; see ")),
        ({"state": "running"}, "7", "PREEMPTED", True, ("terminated", "SLURM: PREEMPTED; ")),
        ({"state": "running"}, "7", "OUT_OF_MEMORY", True, ("failed", "SLURM: OUT_OF_MEMORY; ")),
        ({"state": "running"}, "7", "TIMEOUT", True, ("timeout", "SLURM: TIMEOUT; ")),
        ({"state": "running"}, "7", None, True, ("failed", "SLURM: no longer known; see ")),
    ],
)
def test_states(
    tmp_path: Path, record: dict[str, str], slurm_id: str | None, slurm_state: str | None, logged: bool,
    expected: tuple[str, str],
) -> None:  # fmt: skip
    if record:
        (tmp_path / "job.json").write_text(json.dumps(record))
    if logged:
        (tmp_path / "log").touch()
    state, note = state_of(tmp_path, slurm_id, slurm_state, tmp_path / "log")
    assert state == expected[0]
    assert note.startswith(expected[1])
    assert ("log" in note) == ("SLURM" in expected[1])


def test_figures_of_what_was_measured_and_learned(tmp_path: Path) -> None:
    assert figures_of(tmp_path) == ""
    for text in ("{", "{}", '{"run_directory": null}', '{"run_directory": "/no/such"}'):
        (tmp_path / "job.json").write_text(text)
        assert figures_of(tmp_path) == ""
    (tmp_path / "job.json").write_text(json.dumps({"run_directory": str(tmp_path)}))
    for summary, figures in (
        ({}, ""),
        ({"samples_per_s_per_gpu": {"mean": 1234.5}}, "1,234.50 samples/s/GPU"),
        ({"command": "train", "loss": 0.25, "step": 1200}, "loss 0.2500 at step 1,200"),
    ):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert figures_of(tmp_path) == figures
