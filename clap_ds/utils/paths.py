"""Paths of this installation and its runs, and its commit. Standard library only."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent if (PACKAGE / "launch").is_symlink() else None
"""The checkout of this code, also for an editable installation; None for a wheel."""
CONFIGS = PACKAGE / "ds_configs"
CODE = ("clap_ds", "launch", "analysis")
"""Folders of the checkout with the package's code."""
CODE_SUFFIXES = (".py", ".json", ".cpp", ".h")
GIT_LIMIT_S = 10.0  # git may wait for a slow disk, and only describes a run
COMMIT_FILE = "commit.txt"
"""File in built packages with the commit they were built from."""


def work_folder() -> Path:
    """Return the base of relative paths and runs: the checkout, or the working folder."""
    return CHECKOUT or Path.cwd()


def cache_folder() -> Path:
    """Return the cache folder `$XDG_CACHE_HOME/clap_ds`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clap_ds"


def compile_cache_dir(name: str) -> Path:
    """Create a cache folder that only this user can write. Raises PermissionError if it is another
    user's."""
    return make_private(cache_folder() / name)


def make_private(folder: Path) -> Path:
    """Create a folder that only this user can write. Raises PermissionError if it, or a link to it,
    is another user's."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if {folder.stat().st_uid, folder.lstat().st_uid} != {os.geteuid()}:
        raise PermissionError(
            1, "belongs to another user, who could have put code there", str(folder)
        )
    folder.chmod(0o700)
    return folder


def find_config(path: Path) -> Path:
    """Return the path of a run's JSON: this file, or the packaged one of that name (`htsat_tiny`).
    Raises UserError with the packaged names if there is neither."""
    packaged = CONFIGS / path.with_suffix(".json").name
    if (
        path.parent == Path()
        and path.suffix in ("", ".json")
        and not path.is_file()
        and packaged.is_file()
    ):
        return packaged
    if not path.exists():
        from clap_ds.utils.errors import (
            UserError,
            did_you_mean,
        )  # not at the top: setup.py runs this file alone

        names = sorted(file.stem for file in CONFIGS.glob("*.json"))
        near = did_you_mean(path.stem, names, most_listed=0)
        raise UserError(f"{path}: no such file{near} (packaged configurations: {', '.join(names)})")
    return path


def commit() -> str | None:
    """Return the commit of this code, or None if unknown. If a checkout's code differs, a `+` and a
    digest of the difference follow, so that hosts can be compared."""
    if CHECKOUT is None:
        recorded = PACKAGE / COMMIT_FILE
        return recorded.read_text().strip() if recorded.is_file() else None
    if not (CHECKOUT / ".git").exists():
        return None  # no repository, or inside another one
    git: Any = partial(
        subprocess.check_output, cwd=CHECKOUT, stderr=subprocess.DEVNULL, timeout=GIT_LIMIT_S
    )
    try:
        head = git(["git", "rev-parse", "HEAD"]).decode().strip()
        changes = git(["git", "diff", "--no-ext-diff", "HEAD", "--", *CODE])
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" + hashlib.blake2b(changes, digest_size=4).hexdigest() if changes else "")


def digest_code() -> str:
    """Return a digest of the files that ranks run or read from this package, with or without a
    repository."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE)
        # A wheel contains what a checkout has as links.
        if (
            path.suffix in CODE_SUFFIXES
            and name.parts[0] not in (*CODE, "ds_configs")
            and path.is_file()
        ):
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def describe_software() -> dict[str, str | None]:
    """Return what must be the same on all hosts of a run. The commit only describes the code: git
    may be missing."""
    return {
        "commit": commit(),
        "code": digest_code(),
        **{name: version(name) for name in ("torch", "deepspeed")},
    }


def version(package: str) -> str | None:
    """Return an installed package's version without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
