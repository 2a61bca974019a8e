"""The wheel installs, and its commands start outside a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clap_ds.cli import MODULES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("clap_ds", "launch", "analysis", "ds_configs")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
SUFFIXES = (".py", ".json", ".cpp", ".h", ".sh")
pytestmark = pytest.mark.end_to_end


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(source))
    (wheel,) = root.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """Install the wheel in a folder, with other packages from this environment."""
    site = wheel.parent / "site"
    run_pip("install", "--no-deps", "--no-compile", "--target", str(site), str(wheel))
    return site


def run_installed(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = f"{site / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": path}
    return subprocess.run(
        command, cwd=site.parent, capture_output=True, text=True, timeout=300, env=env
    )


def test_wheel_has_all_files_of_the_package(wheel):
    files = set()
    for folder, _, names in os.walk(ROOT / "clap_ds", followlinks=True):
        paths = [Path(folder, name) for name in names]
        files |= {str(path.relative_to(ROOT)) for path in paths if path.suffix in SUFFIXES}
    assert files <= {*zipfile.ZipFile(wheel).namelist()}


@pytest.mark.parametrize("name", MODULES)
def test_installed_command_prints_help(site, name):
    done = run_installed(site, "clap-ds", name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: clap-ds {name} ")


def test_installed_command_finds_packaged_configuration(site):
    done = run_installed(site, "clap-ds", "train", "--deepspeed_config", "htsat_base")
    assert done.returncode == 2
    assert "clap.train" in done.stderr
    assert "Traceback" not in done.stderr
