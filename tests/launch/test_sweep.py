"""Plans, scripts, submission and states, with SLURM's commands played by small scripts."""

import json
import os
from pathlib import Path

import pytest

from clap_ds.launch.sweep import Sweep, main, queued
from tests.conftest import micro_run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `queue` is what squeue shows; `calls` has every sbatch command line."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "queue").write_text("")
    scripts = {
        "sbatch": f'echo "$*" >> {folder}/calls; echo $((100 + $(wc -l < {folder}/calls)))',
        "squeue": f"cat {folder}/queue",
        "sinfo": 'echo "gpu:h100:4(S:0-1)"; echo "(null)"; echo "gpu:2"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def _start(tmp_path: Path, *options: str) -> Path:
    config, folder = tmp_path / "tiny.json", tmp_path / "sweep"
    config.write_text(json.dumps(micro_run()))
    assert main(["--config", str(config), "--folder", str(folder), "--site", "jupiter", *options]) == 0
    return folder


def _finish(folder: Path, name: str, state: str) -> None:
    (folder / name / "job.json").write_text(json.dumps({"state": state, "error": None}))


def test_one_readable_script_per_scale(tmp_path: Path, slurm: Path) -> None:
    folder = _start(tmp_path, "--nodes", "1", "16", "128", "--dry_run")
    assert not (slurm / "calls").exists()
    assert sorted(path.name for path in folder.glob("*.sbatch")) == ["n001.sbatch", "n016.sbatch", "n128.sbatch"]
    shebang, *lines = (folder / "n016.sbatch").read_text().splitlines()
    assert shebang == "#!/bin/bash"
    options = ("--nodes=16", "--time=00:25:00", "--gres=gpu:4", "--signal=B:USR1@60")
    assert {f"#SBATCH {option}" for option in options} <= set(lines)
    run = json.loads((folder / "n016" / "run.json").read_text())
    assert run["clap"]["output"] == {"root": str(folder / "runs"), "label": "n016"}


def test_hyper_parameters_and_repeats(tmp_path: Path, slurm: Path) -> None:
    options = ("--nodes", "2", "--repeats", "2", "--set", "optimizer.params.lr=1e-4,3e-4", "--array")
    folder = _start(tmp_path, *options)
    sweep = Sweep.read(folder)
    assert [job.name for job in sweep.jobs] == [f"n002-lr_{lr}-r{n}" for lr in ("0.0001", "0.0003") for n in (1, 2)]
    assert json.loads((folder / "n002-lr_0.0003-r1" / "run.json").read_text())["optimizer"]["params"]["lr"] == 3e-4
    (call,) = (slurm / "calls").read_text().splitlines()
    assert "--array=0,1,2,3" in call
    assert [job.slurm_id for job in sweep.jobs] == ["101_0", "101_1", "101_2", "101_3"]
    for job in sweep.jobs[:3]:
        _finish(folder, job.name, "completed")
    assert main(["resume", str(folder)]) == 0
    assert "--array=3" in (slurm / "calls").read_text().splitlines()[1]
    assert [job.slurm_id for job in Sweep.read(folder).jobs] == ["101_0", "101_1", "101_2", "102_3"]


def test_chain_waits_for_the_one_before(tmp_path: Path, slurm: Path) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "4", "--chain", "--site", "generic")
    assert "#SBATCH --gres=gpu:4" in (folder / "n001.sbatch").read_text()  # the most that sinfo shows
    calls = (slurm / "calls").read_text().splitlines()
    assert ["--dependency" in call for call in calls] == [False, True, True]
    assert "--dependency=afterany:102" in calls[2]


def test_status_and_resume(tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _start(tmp_path, "--nodes", "1", "2", "3", "4", "5", "6", "7", "8")
    for nodes, state in enumerate(["completed", "out_of_memory", "timeout", "failed", "running", "running"], start=1):
        _finish(folder, f"n{nodes:03d}", state)
    (slurm / "queue").write_text("106 RUNNING\n108 PENDING\n")
    states = {name: state for name, (state, _) in Sweep.read(folder).states(queued()).items()}
    # n005 says it runs, but SLURM no longer knows it; n007 never came to say anything.
    expected = ["completed", "out_of_memory", "timeout", "failed", "failed", "running", "failed", "init"]
    assert states == {f"n{nodes:03d}": state for nodes, state in enumerate(expected, start=1)}
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    assert ", 3 failed" in capsys.readouterr().out
    assert main(["resume", str(folder), "--dry_run"]) == 0
    assert "4 of 8 jobs are missing: n003, n004, n005, n007" in capsys.readouterr().out
    assert main(["resume", str(folder)]) == 0
    assert len((slurm / "calls").read_text().splitlines()) == 12
    (slurm / "queue").write_text("106 RUNNING\n108 PENDING\n109 PENDING\n110 PENDING\n111 PENDING\n112 RUNNING\n")
    assert main(["resume", str(folder)]) == 0
    assert "0 of 8 jobs are missing" in capsys.readouterr().out


def test_mistakes_end_with_2(tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = _start(tmp_path, "--nodes", "1"), str(tmp_path / "tiny.json")
    for arguments, message in (
        (["--config", config, "--folder", str(folder)], "there is a sweep already"),
        (["status", str(tmp_path)], "sweep.json: No such file"),
        (["--site", "jupitr", "--config", config], "did you mean 'jupiter'?"),
        (["--config", str(tmp_path / "missing.json")], "no such file"),
        (["--config", config, "--gpus", "1", "--nodes", "2", "2", "--folder", str(tmp_path / "other")], "given twice"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    for bad in (["--nodes", "0"], ["--micro_batch", "8-16"], ["--array", "--chain"]):
        with pytest.raises(SystemExit, match="2"):
            main(["--config", config, *bad])
