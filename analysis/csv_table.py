"""A table in a CSV file, as this project writes it, as published, or as Excel saves it → rows.

Commas, semicolons or tabs; UTF-8 or UTF-16; blank rows; decimal points or commas, thousands' separators, per cent
signs. A number that can be meant in two ways is refused, never guessed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clap_ds.analysis.published import PUBLISHED_TABLES
from clap_ds.analysis.table import COLUMNS, COUNTS, LEAST, TEXTS, Row, Run, is_measurable
from clap_ds.config.errors import UserError
from clap_ds.config.files import read_bytes
from clap_ds.config.model_names import preset_of
from clap_ds.record.csv_text import FORMULA

_POINT = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d*)?(e[-+]?\d+)?")
_COMMA = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d*)?")
"""Numbers by their decimal mark, the other one between thousands."""


def read_table(path: Path) -> list[Row]:
    """Rows of a table of this project or of `published/`; UserError, saying where, if it isn't as it should be."""
    lines = _lines(path)
    if not lines:
        raise UserError(f"{path}: empty file")
    columns = [_column(heading) for heading in lines[0][1]]
    if len(lines) == 1:
        raise UserError(f"{path}: a header and no rows")
    wanted = COLUMNS[:3]
    if missing := [
        name for name in wanted if name not in columns and not (name == wanted[2] and "samples_per_s" in columns)
    ]:
        begins = f"a table begins {','.join(wanted)},…, with rates in samples/s"
        raise UserError(
            f"{path}: no column {', '.join(missing)}; {begins}; this one has {', '.join(map(repr, columns))}"
        )
    rows = [(where, dict(zip(columns, cells, strict=False))) for where, cells in lines[1:]]
    marks = {mark for _, cells in rows for name, cell in cells.items() if name not in TEXTS and (mark := _mark(cell))}
    return [_row(path, where, cells, marks) for where, cells in rows]


def _lines(path: Path) -> list[tuple[str, list[str]]]:
    """The cells of each line that has any, with where it stands."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    text = content.decode(encoding, errors="replace")
    if "\0" in text:
        raise UserError(f"{path}: binary file, not a CSV table")
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=first.count)
    reader, found = csv.reader(lines, delimiter=delimiter, skipinitialspace=True), []
    try:
        for row in reader:
            cells, where = [cell.strip() for cell in row], f"{path}, line {reader.line_num}"
            if not any(cells):
                continue
            found.append((where, cells))
            if any(cells[len(found[0][1]) :]):
                count = f"{len(cells)} cells under {len(found[0][1])} headings"
                raise UserError(f"{where}: {count}; put numbers with a {delimiter!r} in quotes")
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV table ({error})") from None
    return found


def _column(heading: str) -> str:
    """A heading as this project names columns: `samples/s/GPU` is samples_per_s_per_gpu, `MFU (%)` mfu_percent."""
    return "_".join(re.findall(r"\w+", heading.casefold().replace("/", " per ").replace("%", " percent ")))


def _row(path: Path, where: str, cells: Mapping[str, str], marks: Collection[str]) -> Row:
    values = {
        name: _value(f"{where}: {name}", name, text, marks) for name, text in cells.items() if text and name in COLUMNS
    }
    if empty := [name for name in ("nodes", "gpus") if not values.get(name)]:
        raise UserError(f"{where}: {' and '.join(empty)} is empty")
    if facts := PUBLISHED_TABLES.get(path.stem):
        values = {**facts, "global_batch": facts["batch_per_gpu"] * values["gpus"], **values}
    elif "model" not in cells:
        values["model"] = path.stem
    if "samples_per_s" in values:
        values.setdefault("samples_per_s_per_gpu", values["samples_per_s"] / values["gpus"])
    return Row(**values)


def _value(where: str, column: str, text: str, marks: Collection[str]) -> Any:
    if column in TEXTS:
        text = text[1:] if text.startswith("'") and text[1:].startswith(FORMULA) else text
        return preset_of(text) if column == "model" else text
    try:
        value = float(_plain(where, text, marks))
    except ValueError:
        raise UserError(f"{where} is {text!r}; expected a number") from None
    may_be_zero = column != "samples_per_s" and ("sigma" in column or column.endswith(("_percent", "_s", "repeats")))
    if not (is_measurable(value) or (may_be_zero and 0 <= value < LEAST)):
        raise UserError(f"{where} is {text}; expected a number above zero that can be measured")
    if column in COUNTS and value != int(value):
        raise UserError(f"{where} is {text}; expected a whole number")
    return int(value) if column in COUNTS else value


def _mark(cell: str) -> str:
    """The decimal mark that a number must have, as it makes no sense with the other; empty where both do, or none."""
    point, comma = (pattern.fullmatch(cell.removesuffix("%").strip()) for pattern in (_POINT, _COMMA))
    return "" if bool(point) == bool(comma) else "." if point else ","


def _plain(where: str, cell: str, marks: Collection[str]) -> str:
    """A cell's number as Python reads it, given the decimal marks of the whole table."""
    number = cell.removesuffix("%").strip()
    if "," in number and len(marks) != 1:
        raise UserError(f"{where} is {cell}, which can be read in two ways; write a number without a thousands' comma")
    if "," in marks and len(marks) == 1:
        return number.replace(".", "").replace(",", ".")
    return number.replace(",", "")


def read_table_runs(path: Path) -> list[Run]:
    """The rows of a table as runs, so that its efficiencies and MFU can be worked out again; errors as of `read_table`."""
    runs = []
    for number, row in enumerate(read_table(path)):
        rate, spread, total = row.rate, row.samples_per_s_per_gpu_2sigma, row.samples_per_s
        known: dict[str, Any] = {"state": row.state or "completed"}
        if rate and total:
            # Both columns round one number: where they agree, the middle of what both allow is nearer to it than either.
            rate, agree = _middle(rate, total / row.gpus, row.gpus)
            known |= {"samples_per_s_per_gpu": rate, "samples_per_s": total if agree else None}
        if rate and spread is not None and spread < rate:
            known |= {"interval": (rate - spread, rate + spread), "uncertainty_from": row.uncertainty_from or "table"}
        runs.append(Run(**{**vars(row), **known}, source=str(path), kind="table", identity=f"row {number}"))
    return runs


def _middle(rate: float, of_all: float, gpus: int) -> tuple[float, bool]:
    """A rate from its two columns, of one GPU and of all GPUs by their number, and whether they agree."""
    halves = _half_digit(rate), _half_digit(of_all * gpus) / gpus
    low, high = max(rate - halves[0], of_all - halves[1]), min(rate + halves[0], of_all + halves[1])
    return ((low + high) / 2, True) if low <= high else (rate, False)


def _half_digit(number: float) -> float:
    """Half a unit of the last decimal that a number is printed with: 0.05 of 97.3."""
    return 0.5 * 10.0 ** -len(f"{number:.12g}".partition(".")[2])
