"""Read runs from CSV tables, written by this project or published."""

from __future__ import annotations

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
            semicolons = b";" in file.readline()
            file.seek(0)
            separators = {"sep": ";", "decimal": ","} if semicolons else {}
            types = dict.fromkeys(TEXTS, str)
            frame = pd.read_csv(file, dtype=types, keep_default_na=False, na_values=[""], **separators)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8 ({error})") from None
    frame = frame.rename(columns={"text_tokens": "context_length"})  # of older tables
    if missing := [name for name in COLUMNS[:3] if name not in frame]:
        raise UserError(f"{path}: no column {', '.join(missing)}; found {', '.join(map(str, frame))}")
    if frame.empty or not isinstance(frame.index, pd.RangeIndex):
        raise UserError(f"{path}: {'a header and no rows' if frame.empty else 'rows have more cells than the header'}")
    return [_run(path, f"{path}, row {number}", row) for number, row in enumerate(frame.to_dict("records"), start=1)]


def _run(path: Path, where: str, cells: Mapping[Any, Any]) -> Run:
    values = {"state": "completed", "model": path.stem, **PUBLISHED_TABLES.get(path.stem, {})}
    values |= {name: value for name, value in cells.items() if name in COLUMNS and value == value}
    values["model"] = preset_of(values["model"])
    run = checked(Run(**values, source=str(path), kind="table"), where)
    if not (run.nodes and run.gpus):
        raise UserError(f"{where}: nodes or gpus is empty")
    known: dict[str, Any] = {name: int(count) for name in COUNTS if (count := getattr(run, name)) is not None}
    if run.rate and run.samples_per_s:
        known["samples_per_s_per_gpu"] = _middle(run.rate, run.samples_per_s, run.gpus)
    return replace(run, **known)


def _middle(rate: float, total: float, gpus: int) -> float:
    """Return the rate per GPU: if the columns for one and for all GPUs agree, the middle of what their last digits allow."""
    half, of_total = (0.5 * 10.0 ** -len(f"{number:.12g}".partition(".")[2]) for number in (rate, total))
    low, high = max(rate - half, (total - of_total) / gpus), min(rate + half, (total + of_total) / gpus)
    return (low + high) / 2 if low <= high else rate
