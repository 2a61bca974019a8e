"""Read untrusted files within limits, and replace files atomically. Standard library only.

A file in a shared folder may be a pipe, huge, or JSON nested too deeply: see `SECURITY.md`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from clap_ds.utils.errors import UserError

# limit for files read whole; the manifest of 100,000 shards has 15 MB
MOST_BYTES = 64 * 2**20
LONGEST_LINE = 2**20
# Opening a pipe doesn't block, a terminal doesn't become this process's, and children get no file.
_SAFE_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class RefusedFileError(OSError):
    """Raised for a file of others that is reached through a link, isn't regular or is too large."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for other kinds, which might block
    forever."""
    descriptor = os.open(path, flags | _SAFE_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedFileError(errno.EINVAL, "expected a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether a path inside a folder of others leads out of it, by `..` or a link."""
    # A folder has many files, so its path is resolved once.
    target = _resolve(path.parent) / path.name
    if path.is_symlink():
        target = Path(os.path.realpath(path))
    return not target.is_relative_to(_resolve(folder))


@functools.cache
def _resolve(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


@contextlib.contextmanager
def hold_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path to this regular file that stays valid if it is replaced, for libraries that take
    no open file."""
    with open_regular(path) as file:
        yield f"/proc/self/fd/{file.fileno()}"


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Read a regular file. Raises OSError if it is unreadable or has more than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= most:
            content = file.read(most + 1)
            # It may have grown.
            if len(content) <= most:
                return content
    raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))


def read_lines(path: str | os.PathLike[str], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield a regular file's lines without line ends, up to the first that is too long. Raises
    OSError."""
    with open_regular(path) as file:
        while (line := file.readline(longest + 1)) and len(line) <= longest:
            yield line.rstrip(b"\r\n")


def parse_json(
    content: bytes | str,
    pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
    *,
    allow_nan: bool = False,
) -> Any:
    """Parse UTF-8 JSON.

    Raises ValueError if it is invalid or can't be encoded as UTF-8 again, and for numbers no float
    can hold. `allow_nan` accepts NaN and infinity, which Python's own writer produces.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    finite = None if allow_nan else _parse_finite
    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs_hook,
            parse_constant=finite,
            parse_float=finite,
            parse_int=_parse_int,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Half a surrogate pair raises ValueError.
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected finite numbers, found {text[:40]}")
    return number


def _parse_int(text: str) -> int:
    _parse_finite(text)
    return int(text)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file of this project's, whose former versions wrote NaN. Raises OSError or
    ValueError."""
    return parse_json(read_bytes(path), allow_nan=True)


def read_object(path: Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON object. Raises UserError, with line and column if there are any, if it is
    unreadable, no object, or repeats a field."""
    try:
        content = parse_json(read_bytes(path), refuse_duplicates, allow_nan=allow_nan)
    except json.JSONDecodeError as error:
        position = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(f"{position}: not valid JSON: {error.msg}") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"field {name!r} appears twice in one object")
        fields[name] = value
    return fields


def write_object(path: Path, content: Any) -> None:
    """Replace a JSON file atomically; values that aren't JSON become strings."""
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")


def show_results(text: str, results: Any, json_file: Path | None) -> None:
    """Print results as text, and write them as JSON to a file, if any; to `-` means to print only
    the JSON."""
    content = json.dumps(results, indent=1, ensure_ascii=False)
    if json_file == Path("-"):
        print(content)
        return
    print(text)
    if json_file is not None:
        write_atomically(json_file, f"{content}\n")


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested fields to dotted names, dropping empty sections."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def open_without_following(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file or folder inside a run's folder and return its descriptor. Raises OSError for a
    link, possibly an attack."""
    return os.open(path, flags | os.O_NOFOLLOW | _SAFE_FLAGS, 0o666)


@contextlib.contextmanager
def hold_folder(path: Path, *, creates: bool = True) -> Iterator[Path]:
    """Create a folder inside a run's folder and yield a path that stays valid if it is replaced.
    Raises OSError, also for a link."""
    if creates:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
    descriptor = open_without_following(path, os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_path(folder: Path, name: str, *, creates: bool = False) -> Iterator[Path]:
    """Yield the path of a file by its name in a folder, which has no `..`.

    No folder in `name` is a link, also if one is planted meanwhile; `creates` makes missing ones.
    Raises RefusedFileError for links, also if the caller opens one with `O_NOFOLLOW`.
    """
    relative_path = Path(name)
    path = folder
    try:
        with contextlib.ExitStack() as stack:
            for inner_folder in relative_path.parent.parts:
                path = stack.enter_context(hold_folder(path / inner_folder, creates=creates))
            yield path / relative_path.name
    except OSError as error:
        # The caller may have met errors of other file systems.
        if not str(error.filename).startswith(("/proc/self/fd/", str(folder))):
            raise
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EINVAL):
            problem = f"{folder / name}: expected a regular file and no link"
            raise RefusedFileError(problem) from None
        error.filename = str(folder / name)
        raise


@contextlib.contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """Yield a new folder, whose files then replace those of `folder`, inside a run's folder. Raises
    OSError."""
    with hold_folder(folder) as target, tempfile.TemporaryDirectory(dir=target) as draft:
        yield Path(draft)
        for file in Path(draft).iterdir():
            os.replace(file, target / file.name)


@contextlib.contextmanager
def create_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield a new private folder that becomes `target` unless an error is raised. Raises
    OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Others can't enter it, nor guess its name.
    private = Path(tempfile.mkdtemp(".partial", f".{target.name}.", target.parent))
    try:
        with hold_folder(private) as folder:
            draft = folder / target.name
            draft.mkdir()
            yield draft
            draft.rename(target)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file atomically. On OSError the old file stays."""
    with open_atomically(Path(path)) as file:
        file.write(text.encode())


def create_atomically(path: Path, text: str) -> None:
    """Create a file with its text. Raises FileExistsError if there is one, or another OSError."""
    draft = _name_draft(path)
    write_atomically(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    # a file system without hard links
    except OSError:
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which replaces it once it is on disk. On OSError the old
    file stays."""
    # Root can replace devices and /dev/stdout.
    if os.path.realpath(path.parent) == "/dev":
        raise OSError(errno.EINVAL, "expected a file outside /dev", str(path))
    draft = _name_draft(path)
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _name_draft(path: Path) -> Path:
    # Process ids repeat across hosts, so the name is random.
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")
