"""Rows of a CSV with their lines, and what is wrong with those that aren't as long as its first line.

Python's reader alone drops fields that are too many, and takes lines into a field whose quote is never closed (pandas' too, and
it doesn't tell lines). Which columns hold what is left to `caption_lists`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError

Row = dict[str, Any]

AUDIO_SUFFIXES = tuple(f".{name}" for name in "wav flac ogg mp3 opus aiff aif au caf w64 m4a aac wma".split())  # noqa: SIM905
_DELIMITERS = ",;\t|"
_MOST_QUOTED = 100  # characters of a row, in a message


def csv_rows(source: Path, text: str, delimiter: str | None) -> Iterator[tuple[int, Row | str]]:
    """Rows with the lines they begin in: values by column, or what is wrong with a row. Empty rows are left out.

    A row has as many fields as the first line has columns; empty ones at the end don't count on either side. A quoted field may
    go over several lines, unless one of them, read alone, is a row with the name of an audio file: then a quote isn't closed.

    Args:
        delimiter: None takes the one that is most frequent in the first line.

    Raises:
        UserError: no line of column names, one that can't be read, or a name that stands twice.
    """
    lines = list(io.StringIO(text, newline=""))
    at = next((number for number, line in enumerate(lines) if line.strip()), None)
    if at is None:
        raise UserError(f"{source}: empty; expected a line of column names")
    delimiter = delimiter or max(_DELIMITERS, key=lines[at].count)
    csv.field_size_limit(2**31 - 1)
    names: list[str] = []
    while at < len(lines):
        first = at
        num_lines, fields = _read_row(lines, first, delimiter, len(names))
        at += num_lines
        if not names:
            if isinstance(fields, str):
                raise UserError(f"{source}:{first + 1}: {fields}; expected a line of column names")
            names = [name.strip() for name in _without_empty_end(fields, 0)]
            if twice := next((name for name in names if name and names.count(name) > 1), None):
                raise UserError(f"{source}: two columns are named {twice!r}; give each a name of its own")
        elif isinstance(fields, str):
            yield first + 1, fields
        elif any(field.strip() for field in fields):
            fields = _without_empty_end(fields, len(names))
            if len(fields) == len(names):
                yield first + 1, {name: field for name, field in zip(names, fields, strict=True) if name}
            else:
                found = f"{len(fields)} field(s), expected {len(names)} ({', '.join(names)})"
                yield first + 1, f"{found}: {_shown(delimiter.join(fields))}"


def _read_row(lines: list[str], first: int, delimiter: str, num_columns: int) -> tuple[int, list[str] | str]:
    """How many lines the row that begins in line `first` takes, and its fields or what is wrong with it: then it takes one."""

    def lines_of_row() -> Iterator[str]:
        for number in range(first, len(lines)):
            if number > first and _is_row(lines[number], delimiter, num_columns):
                raise csv.Error(f"no closing quote before line {number + 1}")
            yield lines[number]

    reader = csv.reader(lines_of_row(), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        fields = next(reader)
        return reader.line_num, fields
    except csv.Error as error:
        return 1, f"its quotes don't match ({error}): {_shown(lines[first])}"


def _is_row(line: str, delimiter: str, num_columns: int) -> bool:
    fields = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    return len(fields) == num_columns and any(field.strip().lower().endswith(AUDIO_SUFFIXES) for field in fields)


def _without_empty_end(fields: list[str], fewest: int) -> list[str]:
    while len(fields) > fewest and not fields[-1].strip():
        fields = fields[:-1]
    return fields


def _shown(row: str) -> str:
    return repr(row.strip()[:_MOST_QUOTED])
