"""Append JSON lines to a file. Lines that can't be written are dropped with one warning and never
end the run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

from clap_ds.config.files import open_own, parse_json, read_lines, write_atomically


@contextmanager
def warn_on_disk_full(what: object) -> Iterator[None]:
    """Suppress OSError of a full or failing disk, with one warning that names `what`."""
    try:
        yield
    except OSError as error:
        _warn(f"warning: {what} can't be written: {error.strerror or error}; the run continues")


@cache
def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class JsonlWriter:
    """A file of lines, created with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def truncate_after(self, step: int) -> float:
        """Drop incomplete lines and those of later steps, which are trained again. Returns the
        largest `train_s`."""
        kept = []
        train_s = 0.0
        with warn_on_disk_full(self._path), suppress(FileNotFoundError):
            for line in read_lines(self._path):
                with suppress(ValueError, KeyError):
                    found = parse_json(line, allow_nan=True)
                    train_s = max(train_s, found.get("train_s", 0.0))
                    kept += [f"{line.decode()}\n"] * (found["step"] <= step)
            write_atomically(self._path, "".join(kept))
        return train_s

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, whole or not at all."""
        with warn_on_disk_full(self._path):
            self._file = self._file or FileIO(
                open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab"
            )
            content = (json.dumps(line) + "\n").encode()
            size = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(content) < len(content):
                    raise OSError(None, "No space left on device")
            except OSError:
                self._file.truncate(size)
                raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
