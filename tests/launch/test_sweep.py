"""Plans, submission, states and what is missing, with SLURM's commands played by small scripts."""

import json
import re
from pathlib import Path

import pytest

from clap_ds.launch.jobs import Jobs
from clap_ds.launch.sweep import main
from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


def _start(tmp_path: Path, *options: str, code: int = 0) -> Path:
    config, folder = tmp_path / "tiny.json", tmp_path / "sweep"
    config.write_text(json.dumps(micro_run()))
    assert main(["--config", str(config), "--folder", str(folder), "--site", "jupiter", *options]) == code
    return folder


def _finish(folder: Path, name: str, state: str, **fields: str) -> None:
    (folder / name / "job.json").write_text(json.dumps({"state": state, "error": None, **fields}))


def _states(folder: Path) -> dict[str, tuple[str, str]]:
    return Jobs.read(folder).states()


def test_one_readable_script_per_scale(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder = _start(tmp_path, "--nodes", "1", "16", "128", "--dry_run")
    assert slurm.calls == []
    assert sorted(path.name for path in folder.glob("*.sbatch")) == ["n001.sbatch", "n016.sbatch", "n128.sbatch"]
    shebang, *lines = (folder / "n016.sbatch").read_text().splitlines()
    assert shebang == "#!/bin/bash"
    options = ("--nodes=16", "--time=00:25:00", "--gres=gpu:4", "--ntasks-per-node=4", "--signal=USR1@60")
    assert {f"#SBATCH {option}" for option in options} <= set(lines)
    run = json.loads((folder / "n016" / "run.json").read_text())
    assert run["clap"]["output"] == {"root": str(folder / "runs"), "label": "n016"}


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
        (["--global_batch", "48", "--nodes", "1", "2"], "n002: train_batch_size: 48 over"),
    ):  # fmt: skip
        folder = _start(tmp_path, *options, code=2)
        assert message in capsys.readouterr().err
        assert not folder.exists()
    folder.mkdir()
    _start(tmp_path, "--train", code=2)
    assert folder.exists(), "it was there before"
    assert slurm.calls == []


def test_training_runs_for_a_day_or_as_long_as_the_partition_lets_it(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.write("partitions", "gpu*|8|gpu:4|12:00:00\n")
    options = ("--train", "--vary", "clap.train.samples=64,128", "--nodes", "2", "--site", "generic")
    folder = _start(tmp_path, *options)
    script = (folder / "n002-samples_64.sbatch").read_text()
    assert {"#SBATCH --time=12:00:00", "#SBATCH --signal=USR1@300"} <= set(script.splitlines())
    assert "-- clap_ds/train.py" in script


def test_status_and_resume(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "3", "4", "5", "6", "7", "8")
    for nodes, state in enumerate(["completed", "out_of_memory", "timeout", "failed", "running", "running"], start=1):
        _finish(folder, f"n{nodes:03d}", state)
    (folder / "n005-105.out").write_text("began")
    slurm.write("queue", "106 RUNNING\n108 PENDING\n107 CANCELLED\n")
    states = _states(folder)
    # n005 says it runs, but SLURM no longer knows it; n007 never came to say anything.
    expected = ["completed", "out_of_memory", "timeout", "failed", "failed", "running", "terminated", "init"]
    assert [state for state, _ in states.values()] == expected
    assert states["n005"][1].endswith(f"see {folder / 'n005-105.out'}")
    assert states["n007"][1] == "cancelled before it began"
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    *_, last_job, counts = capsys.readouterr().out.splitlines()
    assert last_job.split() == ["n008", "8", "108", "init", "pending"]
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


def test_table_has_what_was_measured_and_learned(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "3")
    summaries = ({"samples_per_s_per_gpu": {"mean": 1234.5}}, {"command": "train", "loss": 0.25, "step": 1200})
    for name, summary in zip(("n001", "n002"), summaries, strict=True):
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps(summary))
        _finish(folder, name, "completed", run_directory=str(run))
    _finish(folder, "n003", "completed")
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    heads, *table, counts = capsys.readouterr().out.splitlines()
    assert heads.split() == ["job", "nodes", "id", "state", "result", "note"]
    assert [line.split(maxsplit=4) for line in table] == [
        ["n001", "1", "101", "completed", "1,234.50 samples/s/GPU"],
        ["n002", "2", "102", "completed", "loss 0.2500 at step 1,200"],
        ["n003", "3", "103", "completed"],
    ]
    assert counts == "3 completed"


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
            assert {
                f"#SBATCH --time=00:{minutes}:00",
                f"#SBATCH --nodes={nodes}",
                "#SBATCH --cpus-per-task=72",
            } <= lines
    assert len(slurm.tested) == len(scales)
