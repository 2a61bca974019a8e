"""CSV that spreadsheets and terminals show as text: what stands in it, file names say, others may have written."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from clap_ds.config.files import replacing

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Text that begins so would be a formula in a spreadsheet."""


def safe_cell(text: str) -> str:
    """With an apostrophe before what a spreadsheet would take for a formula, as spreadsheets have it themselves."""
    return f"'{text}" if text.startswith(FORMULA) else text


def printable(text: str) -> str:
    """As a terminal can show it on one line, whatever it is: control characters are escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape", "replace").decode() for each in text)


def write_csv(output: Path | None, rows: Iterable[Sequence[str | float | None]]) -> None:
    """Rows to a file, which is there once it is whole, or to standard output; None and NaN are empty cells. OSError where the
    file can't be written."""
    if output is None:
        return _write(sys.stdout, rows, printable if sys.stdout.isatty() else safe_cell)
    with replacing(output) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        _write(text, rows, safe_cell)
        text.detach()  # which writes what is left


def _write(file: TextIO, rows: Iterable[Sequence[str | float | None]], shown: Callable[[str], str]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        cells = ("" if each is None or each != each else each for each in row)
        writer.writerow([shown(each) if isinstance(each, str) else each for each in cells])
