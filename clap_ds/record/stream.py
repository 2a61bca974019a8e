"""What a run tells as it goes: a line of JSON for each step in a file, and scalars for TensorBoard.

A run never ends for want of its log: what can't be written is left out, which is said once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.files import write_atomically

_said: set[str] = set()


@contextmanager
def unless_full(what: object) -> Iterator[None]:
    """Leave out what a full or failing disk doesn't take; the first time it is warned of, by its name `what`."""
    try:
        yield
    except OSError as error:
        if str(what) not in _said:
            _said.add(str(what))
            print(
                f"warning: {what} can't be written: {error.strerror or error}; the run goes on without",
                file=sys.stderr,
                flush=True,
            )


class Stream:
    """A file of lines and a folder of TensorBoard's.

    Args:
        lines: the file; made with its first line.
        tensorboard: the folder; made with the first scalar.
    """

    def __init__(self, lines: Path, tensorboard: Path) -> None:
        self._path, self._folder = lines, tensorboard
        self._file: int | None = None
        self._writer: Any = None
        self._last_step: int | None = None
        self._has_tensorboard = True

    def forget_after(self, step: int) -> None:
        """Drop what is there of later steps, which will be trained again; a line that was cut, too. What there is of a run that
        is to begin is put aside."""
        self._last_step = step
        with unless_full(self._path):
            if self._path.exists() and step == 0:
                now = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
                self._path.rename(self._path.with_name(f"{self._path.stem}-before-{now}{self._path.suffix}"))
            elif self._path.exists():
                kept = [line for line in self._path.read_text(errors="replace").split("\n") if _step_of(line) <= step]
                write_atomically(self._path, "".join(f"{line}\n" for line in kept))

    def append(self, line: Mapping[str, Any]) -> None:
        """One more line, whole or not at all."""
        with unless_full(self._path):
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            content = (json.dumps(line) + "\n").encode()
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, content) < len(content):
                    raise OSError(None, "No space left on device")
            except OSError:
                os.ftruncate(self._file, size)
                raise

    def add_scalars(self, step: int, **values: float) -> None:
        """Scalars for TensorBoard, under this project's own tags: `__` in a name stands for `/`."""
        if not self._has_tensorboard:
            return
        with unless_full(self._folder):
            # Its writer's thread ends with the first error, which a later call raises.
            self._has_tensorboard = False
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                purged = None if self._last_step is None else self._last_step + 1
                self._writer = SummaryWriter(str(self._folder), purge_step=purged)
            for tag, value in values.items():
                self._writer.add_scalar(tag.replace("__", "/"), value, step)
            self._has_tensorboard = True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._writer is not None:
            with unless_full(self._folder):
                self._writer.close()


def _step_of(line: str) -> float:
    """Of a line; infinite where it has none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
