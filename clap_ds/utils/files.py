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

MOST_BYTES = 64 * 2**20
"""Limit for files read whole; the manifest of 100,000 shards has 15 MB."""
LONGEST_LINE = 2**20


class RefusedFileError(OSError):
    """Raised for a file of others that is reached through a link, isn't regular or is too large."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for other kinds, which might block
    forever."""
    number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise RefusedFileError(errno.EINVAL, "expected a regular file", str(path))
    return os.fdopen(number, "rb")


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether a path inside a folder of others leads out of it, by `..` or a link."""
    target = (
        Path(os.path.realpath(path)) if path.is_symlink() else _resolve(path.parent) / path.name
    )
    return not target.is_relative_to(_resolve(folder))


@functools.cache  # a folder has many files
def _resolve(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path to this regular file that stays valid if it is replaced, for libraries that take
    no open file."""
    with open_regular(path) as file:
        yield f"/proc/self/fd/{file.fileno()}"


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Read a regular file. Raises OSError if it is unreadable or has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
        if content is None or len(content) > most:  # it may have grown
            raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
        return content


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
    """Parse UTF-8 JSON. Raises ValueError if it is invalid or can't be encoded as UTF-8 again, and
    for numbers no float can hold. `allow_nan` accepts NaN and infinity, which Python's own writer
    produces."""
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
    if "\\u" in text:  # half a surrogate pair raises ValueError
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
    """Read a JSON object. Raises UserError, with the place, if it is unreadable, no object, or
    repeats a field."""
    try:
        content = parse_json(read_bytes(path), refuse_duplicates, allow_nan=allow_nan)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
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
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return flat


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file or folder inside a run's folder and return its descriptor. Raises OSError for a
    link, possibly an attack."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def own_folder(path: Path, *, creates: bool = True) -> Iterator[Path]:
    """Create a folder inside a run's folder and yield a path that stays valid if it is replaced.
    Raises OSError."""
    if creates:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
    number = open_own(path, os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


@contextlib.contextmanager
def own_path(folder: Path, name: str, *, creates: bool = False) -> Iterator[Path]:
    """Yield the path of a file by its name in a folder, which has no `..`. No folder in `name` is a
    link, also if one is planted meanwhile; `creates` makes missing ones. Raises RefusedFileError
    for links, also if the caller opens one with `O_NOFOLLOW`."""
    path = folder
    try:
        with contextlib.ExitStack() as stack:
            for part in Path(name).parent.parts:
                path = stack.enter_context(own_folder(path / part, creates=creates))
            yield path / Path(name).name
    except OSError as error:
        if not str(error.filename).startswith(
            ("/proc/self/fd/", str(folder))
        ):  # of another file system
            raise
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EINVAL):
            raise RefusedFileError(
                f"{folder / name}: expected a regular file and no link"
            ) from None
        error.filename = str(folder / name)
        raise


@contextlib.contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a new folder, whose files then replace those of `folder`, inside a run's folder. Raises
    OSError."""
    with own_folder(folder) as there, tempfile.TemporaryDirectory(dir=there) as draft:
        yield Path(draft)
        for file in Path(draft).iterdir():
            os.replace(file, there / file.name)


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """Yield a new private folder that becomes `target` unless an error is raised. Raises
    OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    outer = Path(tempfile.mkdtemp(".partial", f".{target.name}.", target.parent))
    try:
        with own_folder(outer) as there:
            (draft := there / target.name).mkdir()
            yield draft
            draft.rename(target)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file atomically. On OSError the old file stays."""
    with replacing(Path(path)) as file:
        file.write(text.encode())


def create_atomically(path: Path, text: str) -> None:
    """Create a file with its text. Raises FileExistsError if there is one, or another OSError."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    write_atomically(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file, by default in the folder of `path`, that replaces `path` once it is on
    disk. On OSError the old file stays."""
    if os.path.realpath(path.parent) == "/dev":  # root can replace devices and /dev/stdout
        raise OSError(errno.EINVAL, "expected a file outside /dev", str(path))
    partial = (
        folder or path.parent
    ) / f".{path.name}.{os.urandom(8).hex()}"  # process ids repeat across hosts
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
