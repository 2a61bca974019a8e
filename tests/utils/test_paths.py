"""Packaged configurations by name, and the commit of the code."""

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from clap_ds.config.arguments import find_config
from clap_ds.utils import paths
from clap_ds.utils.errors import UserError
from clap_ds.utils.paths import CONFIGS, commit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is its own git repository."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    return tmp_path


def test_configuration_name_without_file_is_the_packaged_one(elsewhere):
    # A folder is no configuration.
    (elsewhere / "htsat_tiny").mkdir()
    for name in ("htsat_tiny", "htsat_tiny.json"):
        assert find_config(Path(name)) == CONFIGS / "htsat_tiny.json"
    (elsewhere / "htsat_tiny.json").write_text("{}")
    assert find_config(Path("htsat_tiny.json")) == Path("htsat_tiny.json")


@pytest.mark.parametrize("name", ["htsat", "ds_configs/htsat_tiny.json", "htsat_tiny.yaml"])
def test_missing_configuration_is_named_with_nearest_and_all(elsewhere, name):
    hint = r"no such file; did you mean 'htsat_tiny'"
    names = r"packaged configurations: fine_tune, .*train_demo_cpu\)"
    with pytest.raises(UserError, match=f"{hint}.*{names}"):
        find_config(Path(name))


def test_compile_cache_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "clap_ds/triton").mkdir(parents=True)
    (tmp_path / "clap_ds/triton").chmod(0o777)
    folder = paths.cache_folder("triton")
    assert (folder, stat.S_IMODE(folder.stat().st_mode)) == (tmp_path / "clap_ds/triton", 0o700)


@pytest.mark.parametrize("problem", ["not a folder", "full disk", "of another user"])
def test_unusable_cache_is_replaced_by_the_next_place(tmp_path, monkeypatch, problem):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    make_private = paths.make_private

    def refuse_first(folder: Path) -> Path:
        if problem == "of another user" and folder.is_relative_to(tmp_path / "first"):
            raise PermissionError(1, "belongs to another user")
        return make_private(folder)

    monkeypatch.setattr(paths, "make_private", refuse_first)
    if problem == "not a folder":
        (tmp_path / "first").touch()
    if problem == "full disk":
        try_to_write = paths._try_to_write

        def fill_first(folder: Path) -> None:
            if folder.is_relative_to(tmp_path / "first"):
                raise OSError(errno.ENOSPC, "No space left on device")
            try_to_write(folder)

        monkeypatch.setattr(paths, "_try_to_write", fill_first)
    assert paths.cache_folder("triton") == tmp_path / "home/.cache/clap_ds/triton"
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").touch()
    folder = paths.cache_folder("triton")
    assert folder == tmp_path / f"temporary/clap_ds-{os.geteuid()}/triton"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_cache_without_home_and_with_its_place_taken_is_a_new_folder(tmp_path, monkeypatch):
    def raise_without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", raise_without_home)
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    # Somebody else may have made what is expected to be a folder.
    taken = tmp_path / f"clap_ds-{os.geteuid()}"
    taken.touch()
    paths._process_folder.cache_clear()
    folders = [paths.cache_folder(name) for name in ("inductor", "triton")]
    paths._process_folder.cache_clear()
    assert folders[0].parent == folders[1].parent
    assert folders[0].parent != taken
    assert stat.S_IMODE(folders[0].parent.stat().st_mode) == 0o700


def test_commit_is_of_the_checkout_and_not_of_a_repository_around_it(elsewhere, monkeypatch):
    head = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True)
    assert str(commit()).partition("+")[0] == head.strip()
    (elsewhere / "copy").mkdir()
    monkeypatch.setattr(paths, "CHECKOUT", elsewhere / "copy")
    assert commit() is None


def test_commit_of_changed_code_has_a_digest_of_the_change(elsewhere, monkeypatch):
    monkeypatch.setattr(paths, "CHECKOUT", elsewhere)
    for folder in paths.CODE:
        (elsewhere / folder).mkdir()
        (elsewhere / folder / "a.py").touch()
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.org"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "All"], check=True)
    unchanged = str(commit())
    assert len(unchanged) == 40
    (elsewhere / "launch/a.py").write_text("a = 2\n")
    assert str(commit()).startswith(f"{unchanged}+")


def test_commit_is_unknown_if_git_hangs(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(paths, "GIT_LIMIT_S", 0.5)
    assert commit() is None


def test_code_digest_depends_on_files_and_not_on_the_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("a = 1\n")
    digest = paths.digest_code()
    # A link in a checkout, a folder in a wheel.
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "b.py").touch()
    assert paths.digest_code() == digest
    (tmp_path / "a.py").write_text("a = 2\n")
    assert paths.digest_code() != digest
