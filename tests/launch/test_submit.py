"""One job from one command: its folder, its record, and everything that is refused before it is queued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.submit import main
from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm

Call = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my work").mkdir()
    return tmp_path / "my work"


@pytest.fixture
def call(folder: Path, slurm: FakeSlurm) -> Call:
    """Submits a micro run on a site with an account: `call(*options, site={…}, clap={…})`."""

    def submit(*options: str, site: dict[str, Any] | None = None, **changes: Any) -> int:
        fields = {"account": "mine", "sbatch": ["--exclusive"], "run_root": str(folder / "runs"), **(site or {})}
        (folder / "tiny.json").write_text(json.dumps(micro_run(**changes)))
        (folder / "site.json").write_text(json.dumps(fields))
        return main(["--site", str(folder / "site.json"), "--config", str(folder / "tiny.json"), *options])

    return submit


def _jobs(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "jobs").glob("*"))


def test_everything_of_the_site_is_in_the_script(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    site = {"partition": "gpu", "cpus_per_task": 8, "sbatch": ["--qos=big"], "gpus_per_node": 2}
    assert call("--nodes", "2", "--exclude", "n[1-2]", "--launcher", "pdsh", site=site) == 0
    (job,) = _jobs(folder)
    expected = {
        "--account=mine", "--partition=gpu", "--qos=big", "--nodes=2", "--gres=gpu:2", "--cpus-per-task=8",
        "--time=00:15:00", "--signal=B:USR1@60", f"--job-name=clap-{job.name}", "--exclude=n[1-2]",
        f'--output="{job}/slurm-%j.out"',
    }  # fmt: skip
    lines = {*(job / "slurm.sbatch").read_text().splitlines()}
    assert {f"#SBATCH {option}" for option in expected} <= lines
    assert "#SBATCH --no-kill" not in lines
    (recorded,) = json.loads((job / "jobs.json").read_text())["jobs"]
    assert (recorded["slurm_id"], slurm.calls) == ("101", [f"--parsable {job}/slurm.sbatch"])
    run = json.loads((job / "run.json").read_text())
    assert run["clap"]["output"] == {"root": str(folder / "runs"), "label": "tiny"}
    shown, log = capsys.readouterr().out, job / "slurm-101.out"
    assert f"submitted job 101: 2 nodes, 2 ranks on each, 00:15:00\nfolder: {job}\n" in shown
    assert all(how in shown for how in (f"log: {log}", f"tail -F '{log}'", "squeue -j 101", "scancel 101"))


def test_spare_nodes_and_training(call: Call, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clap = {"train": {"samples": 64}, "output": {"root": "/mine", "label": "its"}}
    options = ("--nodes", "2", "--spare_nodes", "1", "--shrink", "--until_done", "--train", "--time", "8:00")
    assert call(*options, "--label", "my own", "--", "--skip_steps", "5-6", clap=clap, site={"sbatch": []}) == 0
    (job,) = _jobs(folder)
    assert job.name.startswith("my_own-")
    text = (job / "slurm.sbatch").read_text()
    assert "#SBATCH --nodes=3\n" in text
    assert "--spare_nodes=1 --requeues=2 --shrink --until_done" in text
    assert text.endswith('-- clap_ds/train.py --deepspeed_config "$folder/run.json" --skip_steps 5-6\n')
    assert json.loads((job / "run.json").read_text())["clap"]["output"] == {"root": "/mine", "label": "my_own"}
    shown = capsys.readouterr().out
    assert ": 3 nodes, 1 of them spare, 4 ranks on each, 8:00\n" in shown
    assert "note: cores: with neither cpus_per_task nor --exclusive in the site" in shown


@pytest.mark.parametrize(
    ("site", "options", "says", "message"),
    [
        ({"python": "/bin/true"}, "", {}, "python: /bin/true can't run this package"),
        ({"setup": ["true", "module load CUDAA"]}, "", {}, "setup: 'module load CUDAA': "),
        ({}, "--until_done", {}, "are for training: give --train, too"),
        ({}, "-- --restart", {}, "are for training: give --train, too"),
        ({}, "--train", {}, "tiny: clap.train: missing samples or epochs"),
        ({}, "--time soon", {}, "'soon': expected a SLURM time"),
        ({"partition": "cpu"}, "", {}, "no gpus_per_node in the site file, give --gpus: sinfo shows none"),
        ({}, "", {"refuse_test": "sbatch: error: Invalid qos"}, "sbatch would refuse it: Invalid qos"),
        # Asked, sbatch doesn't count nodes that are down for now.
        ({}, "", dict.fromkeys(("refuse_test", "refuse"), "Requested node configuration is not available"), "not available"),
        ({}, "", {"silent": ""}, "Socket timed out on send/recv operation\n       `squeue --me` tells"),
    ],
)  # fmt: skip
def test_refused_before_it_is_queued(
    call: Call, folder: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str],
    site: dict[str, Any], options: str, says: dict[str, str], message: str,
) -> None:  # fmt: skip
    for name, text in says.items():
        slurm.write(name, f"{text}\n")
    assert call(*options.split(), site=site) == 2
    assert message in capsys.readouterr().err
    if "silent" not in says:  # SLURM may have it
        assert (_jobs(folder), slurm.calls) == ([], [])


def test_nodes_that_are_down_for_now_do_not_keep_a_job_from_the_queue(
    call: Call, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("refuse_test", "allocation failure: Requested node configuration is not available\n")
    assert call() == 0
    assert "note: nodes: Requested node configuration is not available, as far as" in capsys.readouterr().out


@pytest.mark.parametrize("options", ["--resume runs", "--skip_steps 6-5"])
def test_wrong_options_of_training_are_refused(call: Call, options: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        call("--train", "--", *options.split(), clap={"train": {"samples": 64}})
