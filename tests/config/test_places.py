"""Packaged configurations by name, and the commit of the code that runs."""

import subprocess
from pathlib import Path

import pytest

from clap_ds.config import places
from clap_ds.config.errors import UserError
from clap_ds.config.places import CONFIGS, commit, find_config
from clap_ds.config.settings import load_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is a git repository of its own, inside one of whose hooks this runs."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    return tmp_path


def _head(folder: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("name", ["htsat_tiny", "htsat_tiny.json"])
def test_a_name_is_the_packaged_one(elsewhere: Path, name: str) -> None:
    (elsewhere / "htsat_tiny").mkdir()  # a folder is no configuration
    assert find_config(Path(name)) == CONFIGS / "htsat_tiny.json"
    assert load_run(name).label == "htsat_tiny"


@pytest.mark.parametrize("name", ["htsat_tiny", "htsat_tiny.json", "./htsat_tiny"])
def test_a_file_that_exists_wins(elsewhere: Path, name: str) -> None:
    (elsewhere / name).write_text("{}")
    assert find_config(Path(name)) == Path(name)


@pytest.mark.parametrize("name", ["htsat", "ds_configs/htsat_tiny.json", "htsat_tiny.yaml", "../htsat_tiny"])
def test_what_is_neither_is_refused_with_the_packaged_names(elsewhere: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"no such file.*packaged configurations: htsat_base, .*train_demo_cpu\)"):
        load_run(name)


def test_commit_is_the_checkouts_own(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit()
    monkeypatch.delenv("GIT_DIR")
    assert found is not None
    assert found.removesuffix("+") == _head(ROOT)


def test_files_inside_another_repository_have_no_commit(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CHECKOUT", elsewhere / "copy")
    (elsewhere / "copy").mkdir()
    assert commit() is None
