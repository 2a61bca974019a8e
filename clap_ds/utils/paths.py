"""Paths of this installation and its runs, and its commit. Standard library only."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
# the checkout of this code, also for an editable installation; None for a wheel
CHECKOUT = PACKAGE.parent if (PACKAGE / "launch").is_symlink() else None
CONFIGS = PACKAGE / "ds_configs"
# folders of the checkout with the package's code
CODE = ("clap_ds", "launch", "analysis")
CODE_SUFFIXES = (".py", ".json", ".cpp", ".h")
# git may wait for a slow disk, and only describes a run
GIT_LIMIT_S = 10.0
# file in built packages with the commit they were built from
COMMIT_FILE = "commit.txt"


def work_folder() -> Path:
    """Return the base of relative paths and runs: the checkout, or the working folder."""
    return CHECKOUT or Path.cwd()


def cache_folder(name: str) -> Path:
    """Create and return a cache folder that only this user can write.

    It is in the first of these that can be written: `$XDG_CACHE_HOME/clap_ds`, `~/.cache/clap_ds`
    and `clap_ds-<user id>` in the folder of temporary files. If none can, it is a new temporary
    folder of this process.
    """
    for parent in _cache_parents():
        try:
            folder = make_private(parent / name)
            _try_to_write(folder)
        except OSError:
            continue
        return folder
    return make_private(_process_folder() / name)


def _cache_parents() -> Iterator[Path]:
    if os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"]) / "clap_ds"
    # a user without an entry in the user database has no home
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "clap_ds"
    # others can write beside it, so the folder itself must be this user's
    with suppress(OSError):
        yield make_private(Path(tempfile.gettempdir()) / f"clap_ds-{os.geteuid()}")


def _try_to_write(folder: Path) -> None:
    """Raise OSError if a small file can't be written, as on a read-only or full disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


@cache
def _process_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="clap_ds-"))


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


def commit() -> str | None:
    """Return the commit of this code, or None if unknown.

    If a checkout's code differs, a `+` and a digest of the difference follow, so that hosts can be
    compared.
    """
    if CHECKOUT is None:
        record = PACKAGE / COMMIT_FILE
        return record.read_text().strip() if record.is_file() else None
    # no repository, or inside another one
    if not (CHECKOUT / ".git").exists():
        return None
    git: Any = partial(
        subprocess.check_output, cwd=CHECKOUT, stderr=subprocess.DEVNULL, timeout=GIT_LIMIT_S
    )
    try:
        head = git(["git", "rev-parse", "HEAD"]).decode().strip()
        changes = git(["git", "diff", "--no-ext-diff", "HEAD", "--", *CODE])
    except (OSError, subprocess.SubprocessError):
        return None
    if not changes:
        return head
    return f"{head}+{hashlib.blake2b(changes, digest_size=4).hexdigest()}"


def digest_code() -> str:
    """Return a digest of the files that ranks run or read from this package, with or without a
    repository."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE)
        # A checkout has these as links, a wheel as folders.
        is_linked = name.parts[0] in (*CODE, "ds_configs")
        if path.suffix in CODE_SUFFIXES and not is_linked and path.is_file():
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def describe_software() -> dict[str, str | None]:
    """Return what must be the same on all hosts of a run."""
    return {
        # only describes the code: git may be missing
        "commit": commit(),
        "code": digest_code(),
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
    }


def version(package: str) -> str | None:
    """Return an installed package's version without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
