"""Files that others may have written are read within limits, and files are replaced in one go. Standard library only.

Run directories, checkpoints and shards lie where colleagues write, too: a file may be a pipe that never ends, as large as
a disk, or JSON that no parser gets through. `SECURITY.md` says what is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from clap_ds.config.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk with no room left
MOST_BYTES = 64 * 2**20
"""Of a file that is read whole: the manifest of 100,000 shards has 15 MB."""
LONGEST_LINE = 2**20
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # perhaps: surrogates come in pairs


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, open for reading. Raises OSError for another kind, which might keep a reader for ever."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return os.fdopen(number, "rb")


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path to a regular file for who can't be given an open one: of the file that is there now, whatever takes its place."""
    with open_regular(path) as file:
        yield f"/proc/self/fd/{file.fileno()}"


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """All of a regular file; raises OSError where it can't be read, or has more than `most` bytes."""
    with open_regular(path) as file:
        is_small = os.fstat(file.fileno()).st_size <= most
        content = file.read(most + 1) if is_small else b""
        if not is_small or len(content) > most:  # it may grow meanwhile
            raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
        return content


def read_lines(path: str | os.PathLike[str], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Lines of a regular file without their ends, up to one that is too long for a line. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        while (line := file.readline(longest + 1)) and len(line) <= longest:
            yield line.rstrip(b"\r\n")


def parse_json(
    content: bytes | str, pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """JSON in UTF-8, with or without a byte order mark. Raises ValueError for whatever can't be read or couldn't be written
    again: nested too deeply, numbers of thousands of digits, half of a surrogate pair."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        found = json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _HALF_A_PAIR.search(text):
        json.dumps(found, ensure_ascii=False).encode()  # of which the error is a ValueError
    return found


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; raises OSError as `read_bytes`, ValueError as `parse_json`."""
    return parse_json(read_bytes(path))


def object_in(path: Path) -> dict[str, Any]:
    """A file's JSON object; a ValueError, saying where, if it can't be read, holds something else, or has a field twice."""
    try:
        content = parse_json(read_bytes(path), _refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {kind_of(content)}")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """`object_in`, of which the error is a UserError."""
    try:
        return object_in(path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"field {key!r} stands twice in one object")
        seen[key] = value
    return seen


def write_object(path: Path, content: Any, *, spare: int | None = None) -> None:
    """Replace a JSON file in one go, with `spare` room as of `write_atomically`; what JSON can't hold becomes text."""
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n", spare=spare)


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields at any depth by their dotted names, sections without fields left out."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def write_atomically(path: str | os.PathLike[str], text: str, *, spare: int | None = None) -> None:
    """Replace a file in one go: a reader sees the old content, the new, or no file.

    Args:
        spare: if given, a file that is there is overwritten in place where the disk is full, as far as it has room, and padded
            with spaces: no longer in one go, but it says what it is to say. So many spaces are added for a longer text then.

    Raises:
        OSError: it can't be written; what was there stays.
    """
    content = text.encode()
    try:
        with replacing(Path(path)) as file:
            file.write(_padded(content, len(content) + (spare or 0)))
    except OSError as error:
        if spare is None or error.errno not in FULL or not _overwrite(path, content):
            raise


@contextlib.contextmanager
def replacing(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """A file to be written, by default in the folder of `path`, that takes its place once all of it is on the disk. Raises
    OSError where it can't be; what was there stays then."""
    partial = (folder or path.parent) / f".{path.name}.{os.urandom(8).hex()}"  # process ids repeat from host to host
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _overwrite(path: str | os.PathLike[str], content: bytes) -> bool:
    """Whether the file is there and has room for the new content."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if len(content) <= size:
            os.pwrite(file.fileno(), _padded(content, size), 0)
            os.fsync(file.fileno())
            return True
    return False


def _padded(content: bytes, size: int) -> bytes:
    """Text of lines, with spaces before the end of the last where it has fewer bytes."""
    return content.removesuffix(b"\n").ljust(size - 1) + b"\n" if len(content) < size else content
