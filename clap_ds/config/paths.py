"""Where this installation's own files are, where its runs go, and which commit it is of. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent if (PACKAGE / "launch").is_symlink() else None
"""The checkout this runs from, an editable installation's too; None where a wheel was installed."""
CONFIGS = PACKAGE / "ds_configs"
COMMIT_FILE = "commit.txt"
"""In the package, written when a wheel or a source archive is built: the commit they were built from."""


def work_folder() -> Path:
    """The checkout, or else the working folder: runs go there, and relative paths start there."""
    return CHECKOUT or Path.cwd()


def cache_folder() -> Path:
    """Where what can be had again is kept: `$XDG_CACHE_HOME/clap_ds`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clap_ds"


def code_folder(name: str) -> Path:
    """Make a folder of the cache into which nobody else can write. Raises PermissionError where it is another user's."""
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(1, "belongs to another user, who might have put any code there", str(folder))
    folder.chmod(0o700)
    return folder


def find_config(path: Path) -> Path:
    """A run's JSON: the file of that path if there is one, or else the packaged one of that name (`htsat_tiny`); a UserError
    with the packaged names where there is neither."""
    packaged = CONFIGS / path.with_suffix(".json").name
    if path.parent == Path() and path.suffix in ("", ".json") and not path.is_file() and packaged.is_file():
        return packaged
    if not path.exists():
        from clap_ds.config.errors import UserError, did_you_mean  # not at the top: setup.py runs this file by itself

        names = sorted(file.stem for file in CONFIGS.glob("*.json"))
        hint = did_you_mean(str(path), [*map(str, path.parent.glob("*.json")), *names], most_listed=0)
        raise UserError(f"{path}: no such file{hint} (packaged configurations: {', '.join(names)})")
    return path


def commit() -> str | None:
    """Commit of this code: of a checkout, with a `+` when files differ from it; of a wheel, the one it was built from. None
    where that isn't known."""
    if CHECKOUT is None:
        recorded = PACKAGE / COMMIT_FILE
        return recorded.read_text().strip() if recorded.is_file() else None
    if not (CHECKOUT / ".git").exists():
        return None  # files without their own repository, perhaps inside another one

    def git(*words: str) -> str:
        command = ["git", "-C", str(CHECKOUT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    """Version of a package that is installed here, without importing it; None where it isn't."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
