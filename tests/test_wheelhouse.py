"""`make wheelhouse`, then the README's command on a machine that has torch, torchaudio and transformers, and nothing else."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests import needs
from tests.conftest import micro_run

ROOT = Path(__file__).resolve().parents[1]
THERE = ("torch", "torchaudio", "transformers")
pytestmark = pytest.mark.end_to_end


def _machine(tmp_path: Path) -> Path:
    """The interpreter of a virtual environment that sees three packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "machine")], check=True)
    python = tmp_path / "machine" / "bin" / "python"
    packages, here = tmp_path / "there", Path(sysconfig.get_paths()["purelib"])
    packages.mkdir()
    for name in THERE:
        for entry in {file.parts[0] for file in distribution(name).files or []} - {"..", "__pycache__"}:
            (packages / entry).symlink_to(here / entry)
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    (site,) = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()
    (Path(site) / "there.pth").write_text(f"{packages}\n")
    return python


@pytest.mark.parametrize("given", [True, False])
def test_gpu_check_installs_what_an_interpreter_lacks_of_a_wheelhouse(tmp_path: Path, given: bool) -> None:
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\necho "$PYTHONPATH: $*" >> "{said}"\n')
    python.chmod(0o755)
    (tmp_path / "wheels").mkdir()
    for name in ("pydantic_core-2.0-cp312-cp312-any", "PyYAML-6-py3-none-any", "not_here-1.0-py3-none-any") * given:
        (tmp_path / "wheels" / f"{name}.whl").touch()
    command = ["make", "gpu-check", f"PYTHON={python}", f"WHEELHOUSE={tmp_path / 'wheels'}", "CALL=2", "OUTPUT=there"]
    subprocess.run(command, cwd=ROOT, check=True)
    *installed, checked = said.read_text().splitlines()
    assert [line.split()[-1] for line in installed] == [
        str(tmp_path / "wheels" / "not_here-1.0-py3-none-any.whl")
    ] * given
    assert checked.startswith(f"{ROOT}/runs/packages")
    assert checked.endswith(": -m benchmarks.gpu_check 2 --output there")


def test_what_gpu_check_takes_is_pinned() -> None:
    (wanted,) = re.findall(r"^CHECKED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(wanted.split("|")) <= set(pinned)


def test_installs_and_runs_without_an_index(tmp_path: Path) -> None:
    needs.package_index()
    command = ["make", "wheelhouse", f"PYTHON={sys.executable}", f"WHEELHOUSE={tmp_path / 'wheelhouse'}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    machine = _machine(tmp_path)
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ pip (install --no-index .*)$", page, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(machine)]
    (installed,) = re.findall("Successfully installed (.*)", run(*pip, *shlex.split(line), "--no-compile").stdout)
    assert not {name.rpartition("-")[0] for name in installed.split()} & set(THERE)
    run(*pip, "check")
    (tmp_path / "micro.json").write_text(json.dumps(micro_run()))
    run(str(machine.parent / "clap-bench"), "--deepspeed_config", "micro.json")
    (summary,) = tmp_path.glob("runs/micro-*/summary.json")
    assert json.loads(summary.read_text())["state"] == "completed"
