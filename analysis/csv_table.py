"""Read runs from CSV tables, written by this project or published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.published import PUBLISHED_TABLES
from clap_ds.analysis.table import COLUMNS, COUNTS, TEXTS, Run, checked
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular
from clap_ds.config.model_names import preset_of


def read_table_runs(path: Path) -> list[Run]:
    """Read the rows of a table of this project or of `published/` as runs. Efficiency and MFU are recomputed from them.

    Columns may be separated by semicolons; commas are then decimal commas. UserError names the wrong row or column.
    """
    import pandas as pd

    try:
        with open_regular(path) as file:
            start = file.readline()
            file.seek(0)
            semicolons = b";" in start and b"," not in start
            types = str if semicolons else dict.fromkeys(TEXTS, str)
            frame = pd.read_csv(
                file, sep=";" if semicolons else ",", dtype=types, keep_default_na=False, na_values=[""]
            ).rename(columns={"text_tokens": "context_length"})  # of older tables
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8 ({error})") from None
    if missing := [name for name in COLUMNS[:3] if name not in frame]:
        raise UserError(f"{path}: no column {', '.join(missing)}; found {', '.join(map(str, frame))}")
    if frame.empty or not isinstance(frame.index, pd.RangeIndex):
        raise UserError(f"{path}: {'a header and no rows' if frame.empty else 'rows have more cells than the header'}")
    runs = []
    for number, row in enumerate(frame.to_dict("records"), start=1):
        where = f"{path}, row {number}"
        cells = {name: _number(where, name, cell) for name, cell in row.items()} if semicolons else row
        runs.append(_run(path, where, cells))
    return runs


def _number(where: str, column: Any, cell: Any) -> Any:
    """Return the number in a cell of a semicolon-separated table, or the cell itself if it is text."""
    if column in TEXTS or not isinstance(cell, str):
        return cell
    if re.fullmatch(r"\d{1,3}[.,]\d{3}", cell.strip()):
        digits = cell.strip().replace(",", ".")
        raise UserError(
            f"{where}: {column} {cell} is ambiguous: {digits} or {digits.replace('.', '')}? Write {digits}0 for the first"
        )
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return cell


def _run(path: Path, where: str, cells: Mapping[Any, Any]) -> Run:
    facts = PUBLISHED_TABLES.get(path.stem, {})
    values = {**facts, **{name: value for name, value in cells.items() if name in COLUMNS and value == value}}
    values["model"] = preset_of(values.get("model", path.stem))
    run = checked(Run(**{"state": "completed", **values}, source=str(path), kind="table"), where)
    if not (run.nodes and run.gpus):
        raise UserError(f"{where}: nodes or gpus is empty")
    known: dict[str, Any] = {name: int(count) for name in COUNTS if (count := getattr(run, name)) is not None}
    rate, half = run.rate, run.samples_per_s_per_gpu_2sigma
    if rate and run.samples_per_s:
        known["samples_per_s_per_gpu"] = rate = _middle(rate, run.samples_per_s, run.gpus)
    if rate and half is not None:
        known["interval"] = (rate - half, rate + half)
    return replace(run, **known)


def _middle(rate: float, total: float, gpus: int) -> float:
    """Return the rate per GPU: if the columns for one and for all GPUs agree, the middle of what their last digits allow."""
    half, of_total = (0.5 * 10.0 ** -len(f"{number:.12g}".partition(".")[2]) for number in (rate, total))
    low, high = max(rate - half, (total - of_total) / gpus), min(rate + half, (total + of_total) / gpus)
    return (low + high) / 2 if low <= high else rate
