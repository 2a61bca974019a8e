"""What a run tells as it goes: a line of JSON for each step in a file.

A run never ends for want of its log: what can't be written is left out, which is said once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from clap_ds.config.files import open_own, parse_json, read_lines, write_atomically

_said: set[str] = set()


@contextmanager
def unless_full(what: object) -> Iterator[None]:
    """Leave out what a full or failing disk doesn't take, and warn of it the first time, by its name `what`."""
    try:
        yield
    except OSError as error:
        if str(what) not in _said:
            _said.add(str(what))
            reason = error.strerror or error
            print(f"warning: {what} can't be written: {reason}; the run goes on without", file=sys.stderr, flush=True)


class Stream:
    """A file of lines, made with its first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def forget_after(self, step: int) -> float:
        """Drop lines of later steps, which will be trained again, and lines that were cut.
        Returns the seconds of training (`train_s`) that its lines tell of."""
        kept, train_s = [], 0.0
        with unless_full(self._path), suppress(FileNotFoundError):
            for line in read_lines(self._path):
                with suppress(ValueError, KeyError):
                    found = parse_json(line)
                    train_s = max(train_s, found.get("train_s", 0.0))
                    kept += [f"{line.decode()}\n"] * (found["step"] <= step)
            write_atomically(self._path, "".join(kept))
        return train_s

    def append(self, line: Mapping[str, Any]) -> None:
        """One more line, whole or not at all."""
        with unless_full(self._path):
            self._file = self._file or FileIO(open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
            content, size = (json.dumps(line) + "\n").encode(), os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(content) < len(content):
                    raise OSError(None, "No space left on device")
            except OSError:
                self._file.truncate(size)
                raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
