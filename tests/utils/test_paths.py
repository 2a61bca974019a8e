"""Packaged configurations by name, and the commit of the code."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from clap_ds.config.settings import load_run
from clap_ds.utils import paths
from clap_ds.utils.errors import UserError
from clap_ds.utils.paths import CONFIGS, commit, find_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is its own git repository."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    return tmp_path


def test_a_file_or_else_the_packaged_one_of_that_name(elsewhere: Path) -> None:
    (elsewhere / "htsat_tiny").mkdir()  # a folder is no configuration
    for name in ("htsat_tiny", "htsat_tiny.json"):
        assert find_config(Path(name)) == CONFIGS / "htsat_tiny.json"
    assert load_run("htsat_tiny").run_name == "htsat_tiny"
    (elsewhere / "htsat_tiny.json").write_text("{}")
    assert find_config(Path("htsat_tiny.json")) == Path("htsat_tiny.json")
    for name in ("htsat", "ds_configs/htsat_tiny.json", "htsat_tiny.yaml", "../htsat_tiny"):
        with pytest.raises(
            UserError,
            match=r"no such file; did you mean 'htsat_tiny'.*packaged configurations: fine_tune, .*train_demo_cpu\)",
        ):
            find_config(Path(name))
    with pytest.raises(UserError, match="did you mean 'htsat_tiny'"):
        find_config(Path("htsat_tiny.jsn"))


def test_compiled_code_is_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "clap_ds/triton").mkdir(parents=True)
    (tmp_path / "clap_ds/triton").chmod(0o777)
    folder = paths.compile_cache_dir("triton")
    assert (folder, stat.S_IMODE(folder.stat().st_mode)) == (tmp_path / "clap_ds/triton", 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        paths.compile_cache_dir("triton")


def test_commit_is_the_checkouts_own(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert str(commit()).partition("+")[0] == head.stdout.strip()
    monkeypatch.setattr(paths, "CHECKOUT", elsewhere / "copy")  # inside another repository
    (elsewhere / "copy").mkdir()
    assert commit() is None


def test_uncommitted_code_is_told_apart(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CHECKOUT", elsewhere)
    for folder in (*paths.CODE, "docs"):
        (elsewhere / folder).mkdir()
        (elsewhere / folder / "a.py").write_text("a = 1\n")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.org"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "All"], check=True)
    (elsewhere / "docs/a.py").write_text("a = 2\n")
    clean = commit()
    found = list[str | None]()
    for text in ("a = 2\n", "a = 3\n", "a = 2\n"):
        (elsewhere / "launch/a.py").write_text(text)
        found.append(commit())
    assert len(str(clean)) == 40
    assert all(str(each).startswith(f"{clean}+") for each in found)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("program", ["exec sleep 60", "echo dubious ownership >&2; exit 128"])
def test_git_that_hangs_or_refuses_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(paths, "GIT_LIMIT_S", 0.5)
    assert commit() is None


def test_digest_of_code_depends_on_files_and_not_on_the_kind_of_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for name, launch, text in (
        ("checkout", "", "a = 1\n"),
        ("wheel", "b = 1\n", "a = 1\n"),
        ("other", "", "a = 2\n"),
    ):
        package = tmp_path / name
        (package / "launch").mkdir(parents=True)
        (package / "launch" / "b.py").write_text(launch)
        (package / "a.py").write_text(text)
        monkeypatch.setattr(paths, "PACKAGE", package)
        digests.append(paths.digest_code())
    assert digests[0] == digests[1] != digests[2]
