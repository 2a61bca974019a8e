"""What a run tells as it goes: a line of JSON for each step in a file.

A run never ends for want of its log: what can't be written is left out, which is said once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.files import parse_json, read_lines, write_atomically

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
        self._file: int | None = None

    def forget_after(self, step: int) -> float:
        """Drop lines of later steps, which will be trained again, and lines that were cut. At step 0, put the whole file aside.
        Returns the seconds of training (`train_s`) that its lines tell of."""
        kept, train_s = [], 0.0
        with unless_full(self._path):
            if self._path.exists() and step == 0:
                now = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
                self._path.rename(self._path.with_name(f"{self._path.stem}-before-{now}{self._path.suffix}"))
            elif self._path.exists():
                for line in read_lines(self._path):
                    with suppress(ValueError, KeyError, TypeError, AttributeError):
                        found = parse_json(line)
                        train_s = max(train_s, found.get("train_s", 0.0))
                        kept += [f"{line.decode()}\n"] * (found["step"] <= step)
                write_atomically(self._path, "".join(kept))
        return train_s

    def append(self, line: Mapping[str, Any]) -> None:
        """One more line, whole or not at all."""
        with unless_full(self._path):
            if self._file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                # No file that a link names, and no pipe that is full for ever.
                self._file = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            content = (json.dumps(line) + "\n").encode()
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, content) < len(content):
                    raise OSError(None, "No space left on device")
            except OSError:
                os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
