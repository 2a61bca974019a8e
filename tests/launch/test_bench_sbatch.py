"""bench.sbatch up to the command line of launch/job.py, which a stand-in for Python shows."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import micro_run
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


class Batch:
    """`call(script, options, variables)` runs a batch script as SLURM would, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my work"
        self.folder.mkdir()
        (self.folder / "tiny.json").write_text(json.dumps(micro_run()))
        self.site(run_root=str(self.folder / "runs"))
        self.python = self.folder / "python"
        show = 'echo "OMP=$OMP_NUM_THREADS A=${A-}"; printf "%s\\n" "$@"'
        self.python.write_text(
            f'#!/bin/bash\ncase $1 in *launch/job.py) {show} ;; *) exec {shlex.quote(sys.executable)} "$@" ;; esac\n'
        )
        self.python.chmod(0o755)

    def site(self, **fields: object) -> None:
        (self.folder / "site.json").write_text(json.dumps({"run_root": str(self.folder / "runs"), **fields}))

    def call(
        self, script: Path, *options: str, cwd: Path = Path("/"), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMP", "CLAP"))}
        given = {**kept, "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(self.folder), **variables}
        words = ["--site", "site.json", "--config", "tiny.json", "--python", str(self.python), *options]
        return subprocess.run(["bash", str(script), *words], env=given, cwd=cwd, capture_output=True, text=True)

    def words(self, script: Path, *options: str, cwd: Path = Path("/"), **variables: str) -> tuple[str, list[str]]:
        """What job.py sees of the environment, and its arguments."""
        done = self.call(script, *options, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        seen, path, *words = done.stdout.splitlines()
        assert path == str(LAUNCH / "job.py")
        return seen, words


@pytest.fixture
def batch(tmp_path: Path, slurm: FakeSlurm) -> Batch:
    return Batch(tmp_path)


def test_command_of_job_py(batch: Batch) -> None:
    batch.site(setup=["A='b c'"], environment={"A": "d e"}, cpus_per_task=8)
    options = ("--spare_nodes", "1", "--shrink", "--until_done", "--launcher", "srun", "--slots", "2", "--grace", "9")
    seen, words = batch.words(LAUNCH / "bench.sbatch", *options, SLURM_CPUS_PER_TASK="32")
    assert seen == "OMP=8 A=d e"
    folder = f"{batch.folder}/runs/jobs/tiny-7"
    command = [str(ROOT / "clap_ds" / "bench.py"), "--deepspeed_config", f"{folder}/run.json"]
    assert words == ["--site", "site.json", "--folder", folder, *options, "--", *command]
    run = json.loads(Path(folder, "run.json").read_text())
    assert run["clap"]["output"] == {"root": f"{batch.folder}/runs", "label": "tiny"}


def test_threads_are_the_users_then_the_sites_then_slurms(batch: Batch) -> None:
    for site, variables, threads in (
        ({"environment": {"OMP_NUM_THREADS": "3"}, "cpus_per_task": 8}, {}, 3),
        ({"cpus_per_task": 8}, {"OMP_NUM_THREADS": "5"}, 5),
        ({}, {"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({}, {}, 1),
    ):
        batch.site(**site)
        seen, _ = batch.words(LAUNCH / "bench.sbatch", **variables)
        assert seen.startswith(f"OMP={threads} ")


def test_train_by_plain_sbatch_runs_from_a_copy(batch: Batch, tmp_path: Path) -> None:
    """sbatch copies the script to its spool folder, and starts it in the checkout."""
    copy = tmp_path / "slurm_script"
    shutil.copy(LAUNCH / "train.sbatch", copy)
    site, config = str(batch.folder / "site.json"), str(batch.folder / "tiny.json")
    options = ("--site", site, "--config", config, "--label", "mine")
    _, words = batch.words(copy, *options, "--", "--from_weights", "4", SLURM_SUBMIT_DIR=str(ROOT))
    assert words[-2:] == ["--from_weights", "4"]
    assert words[:4] == ["--site", site, "--folder", f"{batch.folder}/runs/jobs/mine-7"]
    assert words[4:8] == ["--grace", "240", "--", "clap_ds/train.py"]
    done = batch.call(copy)
    assert (done.returncode, "submit from the checkout" in done.stderr) == (2, True)


def test_a_job_by_hand_is_told_what_the_site_would_have_given_sbatch(batch: Batch) -> None:
    batch.site(sbatch=["--exclusive", "--qos=big"])
    by_hand = batch.call(LAUNCH / "bench.sbatch")
    assert by_hand.returncode == 0
    assert (
        "by hand: it has the site's --exclusive --qos=big only if sbatch was given that; launch/submit"
        in by_hand.stderr
    )
    by_command = batch.call(LAUNCH / "bench.sbatch", CLAP_ROOT=str(batch.folder))
    assert (by_command.returncode, by_command.stderr) == (0, "")
    batch.site()
    assert batch.call(LAUNCH / "bench.sbatch").stderr == ""


@pytest.mark.parametrize("name", ["bench", "train"])
def test_chdir_brings_it_to_the_checkout(batch: Batch, tmp_path: Path, name: str) -> None:
    """`sbatch --chdir=CHECKOUT` from another folder, which SLURM_SUBMIT_DIR still names."""
    copy = tmp_path / "slurm_script"
    shutil.copy(LAUNCH / f"{name}.sbatch", copy)
    options = ("--site", str(batch.folder / "site.json"), "--config", str(batch.folder / "tiny.json"))
    _, words = batch.words(copy, *options, cwd=ROOT)
    assert f"clap_ds/{name}.py" in words


@pytest.mark.parametrize(
    ("site", "options", "message"),
    [
        ({"account": "mine"}, (), "give sbatch --account=mine, which launch/submit.py gives by itself"),
        ({"gpus_per_node": 4}, (), "give sbatch --gres=gpu:4"),
        ({}, ("--gpus", "4"), "error: launch/bench.sbatch: no such option: --gpus"),
        ({}, ("--slots",), "error: launch/bench.sbatch: --slots: no such option, or its value is missing"),
        ({}, ("--site", "none"), "site 'none'"),
        ({}, ("--python", "false"), "expected Python 3.11 or newer"),
    ],
)
def test_mistakes_end_with_2(batch: Batch, site: dict[str, object], options: tuple[str, ...], message: str) -> None:
    batch.site(**site)
    done = batch.call(LAUNCH / "bench.sbatch", *options, SLURM_JOB_ACCOUNT="other", SLURM_JOB_PARTITION="gpu")
    assert message in done.stderr
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
