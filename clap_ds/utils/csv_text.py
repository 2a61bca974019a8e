"""Write CSV to a file or to standard output."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from clap_ds.utils.errors import escape
from clap_ds.utils.files import write_atomically

# Spreadsheets compute a cell that begins with one of these.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def guard_formula(cell: str | float | None) -> str | float | None:
    """Return a cell with an apostrophe before text that a spreadsheet would compute. Numbers stay
    numbers."""
    if not isinstance(cell, str) or not cell.lstrip("'").startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def unguard_formula(cell: str) -> str:
    """Return a cell as it was before `guard_formula`."""
    is_guarded = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA_STARTS)
    return cell[1:] if is_guarded else cell


def write_csv(output: Path | None, rows: Iterable[Sequence[str | float | None]]) -> None:
    """Write rows to a file, atomically, or to standard output; NaN becomes an empty cell, and
    formulas text. Raises OSError."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        # Only NaN differs from itself.
        writer.writerow("" if cell != cell else guard_formula(cell) for cell in row)
    text = file.getvalue()
    if output is not None:
        write_atomically(output, text)
    elif sys.stdout.isatty():
        sys.stdout.write(escape(text, "\n"))
    else:
        sys.stdout.write(text)
