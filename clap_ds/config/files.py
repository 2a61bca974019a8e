"""JSON objects read, and files replaced in one go. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk with no room left


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; a UserError, saying where, if it can't be read, holds something else, or has a field twice."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {kind_of(content)}")
    return content


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
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")  # process ids repeat from host to host
    content = text.encode()
    try:
        with open(temporary, "wb") as file:
            file.write(_padded(content, len(content) + (spare or 0)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # a signal's, too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        is_full = isinstance(error, OSError) and error.errno in FULL
        if spare is None or not is_full or not _overwrite(path, content):
            raise


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
