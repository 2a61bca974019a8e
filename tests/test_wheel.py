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
pytestmark = pytest.mark.end_to_end


def _pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a folder, with other packages from this environment."""
    root = tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / "source" / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, root / "source")
    _pip(
        "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(root / "source")
    )
    (wheel,) = root.glob("*.whl")
    _pip("install", "--no-deps", "--no-compile", "--target", str(root / "site"), str(wheel))
    held = set(zipfile.ZipFile(wheel).namelist())
    paths = (
        Path(at, name)
        for at, _, names in os.walk(ROOT / "clap_ds", followlinks=True)
        for name in names
    )
    ours = {
        str(path.relative_to(ROOT))
        for path in paths
        if path.suffix in (".py", ".json", ".cpp", ".h", ".sh")
    }
    assert ours <= held, "package files missing from the wheel"
    return root / "site"


def _call(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
    }
    return subprocess.run(
        command, cwd=site.parent, capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.parametrize("name", MODULES)
def test_commands_start(site: Path, name: str) -> None:
    done = _call(site, "clap-ds", name, "--help")
    assert (done.returncode, done.stdout.startswith(f"usage: clap-ds {name} ")) == (0, True), (
        done.stderr
    )


def test_packaged_configurations_are_found(site: Path) -> None:
    done = _call(site, "clap-ds", "train", "--deepspeed_config", "htsat_base")
    assert done.returncode == 2
    assert "clap.train" in done.stderr
    assert "Traceback" not in done.stderr
