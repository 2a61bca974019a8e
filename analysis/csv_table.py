"""A table in a CSV file, as this project writes it or as published → rows.

Commas, semicolons or tabs, decimal points, per cent signs. A number with a comma can be meant in two ways: it is refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clap_ds.analysis.published import PUBLISHED_TABLES
from clap_ds.analysis.table import COLUMNS, COUNTS, LEAST, OF_TABLE, TEXTS, Row, Run, is_measurable
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular
from clap_ds.config.model_names import preset_of

_WITH_COMMA = re.compile(r"[-+]?[\d.]*\d,\d[\d.,]*")
WANTED = COLUMNS[:3]


def read_table(path: Path) -> list[Row]:
    """Rows of a table of this project or of `published/`; UserError, saying where, if it isn't as it should be."""
    lines = _lines(path)
    if not lines:
        raise UserError(f"{path}: empty file")
    headings = next(iter(lines.values()))
    columns = [_column(heading) for heading in headings]
    if len(lines) == 1:
        raise UserError(f"{path}: a header and no rows")
    known = {*columns} | ({WANTED[2]} if "samples_per_s" in columns else set())
    if missing := [name for name in WANTED if name not in known]:
        begins = f"a table begins {','.join(WANTED)},…, with rates in samples/s"
        raise UserError(f"{path}: no column {', '.join(missing)}; {begins}; this one has {', '.join(headings)}")
    return [
        _row(path, f"{path}, line {line}", dict(zip(columns, cells, strict=True)))
        for line, cells in list(lines.items())[1:]
    ]


def _lines(path: Path) -> dict[int, list[str]]:
    """The cells of each line that has any, by its number."""
    import pandas as pd

    form: Any = {"sep": None, "engine": "python", "header": None, "dtype": str, "keep_default_na": False}
    form |= {"encoding": "utf-8-sig", "skip_blank_lines": False}
    try:
        with open_regular(path) as file:
            frame = pd.read_csv(file, **form)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{path}: {'empty file' if not path.stat().st_size else f'no CSV table in UTF-8 ({error})'}"
        ) from None
    rows = {int(line) + 1: [cell.strip() for cell in cells] for line, *cells in frame.fillna("").itertuples()}
    return {line: cells for line, cells in rows.items() if any(cells)}


def _column(heading: str) -> str:
    """A heading as this project names columns: `samples/s/GPU` is samples_per_s_per_gpu, `MFU (%)` mfu_percent."""
    return "_".join(re.findall(r"\w+", heading.casefold().replace("/", " per ").replace("%", " percent ")))


def _row(path: Path, where: str, cells: Mapping[str, str]) -> Row:
    for name, text in cells.items():
        if name not in TEXTS and _WITH_COMMA.fullmatch(text.removesuffix("%").strip()):
            expected = "expected a decimal point and no thousands separator"
            raise UserError(f"{where}: {name} is {text!r}, which can be read in two ways; {expected}")
    values = {name: _value(f"{where}: {name}", name, text) for name, text in cells.items() if text and name in COLUMNS}
    if empty := [name for name in ("nodes", "gpus") if not values.get(name)]:
        raise UserError(f"{where}: {' and '.join(empty)} is empty")
    if facts := PUBLISHED_TABLES.get(path.stem):
        values = {**facts, "global_batch": facts["batch_per_gpu"] * values["gpus"], **values}
    elif "model" not in cells:
        values["model"] = path.stem
    if "samples_per_s" in values:
        values.setdefault("samples_per_s_per_gpu", values["samples_per_s"] / values["gpus"])
    return Row(**values)


def _value(where: str, column: str, text: str) -> Any:
    if column in TEXTS:
        return preset_of(text) if column == "model" else text
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UserError(f"{where} is {text!r}; expected a number") from None
    may_be_zero = column != "samples_per_s" and ("sigma" in column or column.endswith(("_percent", "_s", "repeats")))
    if not (is_measurable(value) or (may_be_zero and 0 <= value < LEAST)):
        raise UserError(f"{where} is {text}; expected a number above zero that can be measured")
    if column in COUNTS and value != int(value):
        raise UserError(f"{where} is {text}; expected a whole number")
    return int(value) if column in COUNTS else value


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
            known |= {"interval": (rate - spread, rate + spread), "uncertainty_from": row.uncertainty_from or OF_TABLE}
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
