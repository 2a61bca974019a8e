"""Tabulate the stragglers of runs (`run_records/stragglers.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clap_ds.analysis.figure import Blocks
from clap_ds.analysis.read_run import read_json
from clap_ds.analysis.table import markdown_table
from clap_ds.run_records.metrics_schema import Straggler


def blocks(runs: Sequence[Path]) -> Blocks:
    """Yield a table of the ranks that were slow at the end of their run, if any."""
    names, rows = list(Straggler.__annotations__), []
    for run in runs:
        for slow in read_json(run, "summary").get("stragglers") or ():
            rows.append([run.name, *(str(slow.get(name, "")) for name in names)])
    yield from [markdown_table(["run", *(name.replace("_", " ") for name in names)], rows)] * bool(rows)
