"""The wheel: what is in it, and its commands in a folder that is no checkout but lies inside somebody else's repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import micro_run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("clap_ds", "launch", "analysis", "ds_configs")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
pytestmark = pytest.mark.end_to_end


@dataclass
class Installed:
    """A wheel and where it is installed: by `pip install --target`, with every other package taken from this environment."""

    wheel: Path
    commit: str
    source: Path
    site: Path
    work: Path

    def call(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the working folder, with the wheel's own first on the path."""
        path = f"{self.site / 'bin'}:{variables.pop('PATH', os.environ['PATH'])}"
        environment = {**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1", **variables, "PATH": path}
        return subprocess.run(command, cwd=self.work, capture_output=True, text=True, timeout=300, env=environment)


def _repository(folder: Path) -> str:
    """Make the folder a git repository with everything in it committed; the commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", str(folder)]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    source, other = root / "source", root / "other"
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    commit = _repository(source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(source))
    (wheel,) = root.glob("*.whl")
    (other / "work").mkdir(parents=True)
    _pip("install", "--no-deps", "--no-compile", "--target", str(other / "site"), str(wheel))
    _repository(other)
    return Installed(wheel, commit, source, other / "site", other / "work")


def test_holds_every_file_of_the_package_and_no_other_package(installed: Installed) -> None:
    found = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    ours = {
        str(Path(folder, name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "clap_ds", followlinks=True)
        for name in names
        if "__pycache__" not in folder and not name.endswith(".md")
    }
    assert found == ours | {"clap_ds/commit.txt"}


def test_declares_what_it_imports(installed: Installed) -> None:
    (distribution,) = distributions(path=[str(installed.site)])
    required = [Requirement(text) for text in distribution.requires or []]
    declared = {canonicalize_name(each.name) for each in required if 'extra == "test"' not in str(each.marker)}
    owners = packages_distributions()
    undeclared = {}
    for path in (installed.site / "clap_ds").rglob("*.py"):
        # Imports inside functions, too; triton comes with torch where there are GPUs.
        found = re.findall(
            r"^ *(?:import(?= \S+(?: as \w+)?(?: +#.*)?$)|from(?= \S+ import )) (\w+)", path.read_text(), re.M
        )
        for name in set(found) - sys.stdlib_module_names - {"clap_ds", "triton"}:
            if not {canonicalize_name(owner) for owner in owners.get(name, [name])} & declared:
                undeclared[name] = str(path.relative_to(installed.site))
    assert not undeclared


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["clap-flops", "--counters", "analytic", "--json", "--deepspeed_config", "htsat_tiny"], 0, '"text_tokens": 77'),
        (["clap-train", "--deepspeed_config", "htsat_base"], 2, "htsat_base.json: clap.train: missing samples or epochs"),
        (["clap-evaluate", "none", "--deepspeed_config", "htsat_base"], 2, "htsat_base.json has no clap.evaluation"),
        (["clap-bench", "--deepspeed_config", "htsat_tny"], 2, "htsat_tny: no such file; did you mean 'htsat_tiny'?"),
        (["clap-sites", "check", "generic"], 0, "torch 2."),
        (["clap-sweep", "--config", "htsat_tiny", "--gpus", "4", "--dry_run"], 0, "#SBATCH --gres=gpu:4"),
        (["clap-plan", "--deepspeed_config", "htsat_tiny", "--gpu", "h100-sxn"], 2, "did you mean 'h100-sxm'?"),
        (["clap-shards", "size", "--clips", "1000"], 0, "130,058 B"),
        (["clap-efficiency", "none"], 2, "none: no such file or directory"),
        *(([f"clap-{name}", "--help"], 0, f"usage: clap-{name} ") for name in ("compare", "project", "report")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_commands_find_what_is_packaged(installed: Installed, command: list[str], code: int, message: str) -> None:
    result = installed.call(*command)
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    assert message in output
    assert "Traceback" not in output


def test_sweep_runs_its_jobs_in_the_working_folder_and_records_the_wheels_commit(installed: Installed) -> None:
    """SLURM's part is played: `sbatch` only answers, then the script runs from a copy elsewhere, and `srun` on this host."""
    srun = 'while :; do case $1 in -n) shift 2 ;; --*) shift ;; *) exec "$@" ;; esac; done'
    (bin_folder := installed.work / "bin").mkdir()
    for name, script in (("sbatch", "echo 7"), ("srun", srun), ("sinfo", "")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_folder / name).chmod(0o755)
    quick = {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 0}
    (installed.work / "quick.json").write_text(json.dumps(micro_run(clap={"bench": quick})))
    slurm = {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    submitted = installed.call("clap-sweep", "--config", "quick.json", "--gpus", "1", "--launcher", "slurm", **slurm)
    assert submitted.returncode == 0, submitted.stderr
    (script_file,) = (installed.work / "runs" / "sweeps").glob("quick-*/n001.sbatch")
    copy = shutil.copy(script_file, installed.work.parent / "slurm_script")
    slurm |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": os.uname().nodename, "SLURMD_NODENAME": os.uname().nodename}
    job = installed.call("bash", str(copy), **slurm)
    assert job.returncode == 0, job.stdout + job.stderr
    record = json.loads((script_file.parent / "n001" / "job.json").read_text())
    run = Path(record["run_directory"])
    assert (record["state"], run.parent) == ("completed", script_file.parent / "runs")
    environment = json.loads((run / "environment.json").read_text())
    assert environment["git_commit"] == installed.commit
    assert environment["versions"]["clap_ds"] == installed.wheel.name.split("-")[1]
