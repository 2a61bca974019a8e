"""Write CSV to a file or to standard output."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from clap_ds.config.errors import printable
from clap_ds.config.files import replacing


def write_csv(output: Path | None, rows: Iterable[Sequence[str | float | None]]) -> None:
    """Write rows to a file, atomically, or to standard output; None and NaN become empty cells. Raises OSError."""
    if output is None:
        return _write(sys.stdout, rows)
    with replacing(output) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        _write(text, rows)
        text.detach()  # flushes


def _write(file: TextIO, rows: Iterable[Sequence[str | float | None]]) -> None:
    writer, shown = csv.writer(file, lineterminator="\n"), printable if file.isatty() else str
    cell = lambda value: "" if value is None or value != value else shown(value) if isinstance(value, str) else value  # noqa: E731
    writer.writerows([*map(cell, row)] for row in rows)
