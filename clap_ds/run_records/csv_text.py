"""Write CSV to a file or to standard output."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from clap_ds.config.errors import printable
from clap_ds.config.files import write_atomically


def write_csv(output: Path | None, rows: Iterable[Sequence[str | float]]) -> None:
    """Write rows to a file, atomically, or to standard output; NaN becomes an empty cell. Raises OSError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(["" if cell != cell else cell for cell in row] for row in rows)
    if output is not None:
        write_atomically(output, text.getvalue())
    else:
        sys.stdout.write(printable(text.getvalue(), "\n") if sys.stdout.isatty() else text.getvalue())
