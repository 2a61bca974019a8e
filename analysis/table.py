"""Measured runs and the rows of the scaling table, written as CSV and Markdown; `csv_table.py` reads them.

A table's first columns are those of `published/*.csv`, so each can stand in for the other. An absent value is an
empty cell (CSV) or a dash (Markdown).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from clap_ds.config.errors import UserError, printable
from clap_ds.run_records.metrics_schema import STEP_PHASES


@dataclass(frozen=True)
class Row:
    """One scale of one series. Field order is column order. What is not known is None, "" or, for nodes and GPUs, 0."""

    nodes: int = 0
    gpus: int = 0
    samples_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    mfu_percent: float | None = None
    scaling_efficiency_percent: float | None = None
    samples_per_s_per_gpu_2sigma: float | None = None
    scaling_efficiency_2sigma_percent: float | None = None
    """Where both scales of the ratio were repeated."""
    uncertainty_from: str = ""
    repeats: int = 0
    baseline_nodes: int | None = None
    """Of the scale that efficiencies and speed-up are relative to."""
    speedup: float | None = None
    engine_samples_per_s_per_gpu: float | None = None
    engine_efficiency_percent: float | None = None
    achieved_tflops: float | None = None
    mfu_model_percent: float | None = None
    """By the FLOPs of the work really done."""
    model: str = ""
    scaling: str = ""
    """`weak` (same batch per GPU), `strong` (same global batch), or empty where neither can be told."""
    device: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    context_length: int | None = None
    variant: str = ""
    """What its runs have that others in the same table haven't: `gradient_sync=deepspeed, batch per GPU 64`."""
    micro_batch: int | None = None
    batch_per_gpu: int | None = None
    global_batch: int | None = None
    step_time_s: float | None = None
    slowest_rank_step_time_s: float | None = None
    exposed_communication_percent: float | None = None
    data_wait_percent: float | None = None
    memory_peak_gib: float | None = None
    data_wait_s: float | None = None
    forward_s: float | None = None
    loss_s: float | None = None
    backward_s: float | None = None
    exposed_communication_s: float | None = None
    optimizer_s: float | None = None
    state: str = ""
    notes: str = ""

    @property
    def rate(self) -> float | None:
        return self.samples_per_s_per_gpu

    @property
    def relative_half(self) -> float | None:
        """The ± of the rate as a share of it."""
        half = self.samples_per_s_per_gpu_2sigma
        return None if half is None or not self.rate else half / self.rate

    @property
    def series(self) -> tuple[str, str, str, str, int | None, str]:
        return self.model, self.scaling, self.device, self.precision, self.context_length, self.variant

    @property
    def title(self) -> str:
        tokens = f"{self.context_length} text tokens" if self.context_length else ""
        scaling = f"{self.scaling} scaling" if self.scaling else ""
        parts = self.model_name, self.device, self.precision, tokens, self.variant, scaling
        return plain_text(", ".join(filter(None, parts)))

    @property
    def scale(self) -> str:
        """`2 nodes, 8 GPUs`."""
        return f"{count_of(self.nodes, 'node')}, {count_of(self.gpus, self.unit.removesuffix('s'))}"

    @property
    def unit(self) -> str:
        return unit(self.device)

    @property
    def model_name(self) -> str:
        return self.model.replace("_", "-") or "model not stated"

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds a step by `STEP_PHASES`, of an instrumented pass; parts not measured are absent."""
        values = {part: getattr(self, f"{part}_s") for part in STEP_PHASES}
        return {part: value for part, value in values.items() if value is not None}

    def cell(self, column: str, spread: str = "") -> str:
        """A column's text, with that of its uncertainty's column after it, to as many decimals; empty for None."""
        text, error = format_cell(column, getattr(self, column)), getattr(self, spread) if spread else None
        decimals = max(len(text.partition(".")[2]), 2 * spread.endswith("_percent"))
        return f"{text} ± {error:.{decimals}f}" if text and error is not None else text


@dataclass(frozen=True)
class Run(Row):
    """One measured run, or a row read from a table, before repeats are combined."""

    source: str = ""
    kind: Literal["record", "log", "table"] = "record"
    error: str = ""
    interval: tuple[float, float] | None = None
    """The range of a run's windows, or the rate of a table's row less and plus its ±."""
    windows: tuple[float, ...] = ()
    accumulation: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    finished: str = ""
    directory: str = ""
    """The run directory that a log names."""

    @property
    def name(self) -> str:
        return Path(self.source).name


@dataclass(frozen=True)
class Scale(Row):
    runs: tuple[Run, ...] = ()
    """Those that count: with a rate, and completed where any did."""


MOST = 1e15
"""Of anything that is measured here, in the units of its field."""
COLUMNS = tuple(column.name for column in fields(Row))
COUNTS = {
    "nodes",
    "gpus",
    "repeats",
    "baseline_nodes",
    "context_length",
    "micro_batch",
    "batch_per_gpu",
    "global_batch",
}
TEXTS = {"uncertainty_from", "model", "scaling", "device", "precision", "variant", "state", "notes"}
_Row = TypeVar("_Row", bound=Row)


def checked(row: _Row, where: str) -> _Row:
    """A row that was read; UserError for what is not of its column: text, a count, or a number from zero on."""
    for name in COLUMNS:
        value, is_text, is_count = getattr(row, name), name in TEXTS, name in COUNTS
        is_number = isinstance(value, int | float) and 0 <= value < MOST and (value == int(value) or not is_count)
        if not (value is None or (isinstance(value, str) if is_text else is_number)):
            expected = "text" if is_text else "a whole number" if is_count else "a number from zero on"
            raise UserError(f"{where}: {name} is {value!r}; expected {expected}")
    return row


def by_series(rows: Sequence[_Row]) -> list[list[_Row]]:
    return [[row for row in rows if row.series == series] for series in dict.fromkeys(row.series for row in rows)]


def noted(row: _Row, note: str) -> _Row:
    return replace(row, notes="; ".join(dict.fromkeys(filter(None, [*row.notes.split("; "), note]))))


def relative_to(rows: Sequence[Row]) -> str:
    """`relative to 2 nodes`, of rows of one series; empty where they are so to one node."""
    nodes = next((row.baseline_nodes for row in rows if row.baseline_nodes), 1)
    return "" if nodes == 1 else f"relative to {count_of(nodes, 'node')}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def unit(*devices: str) -> str:
    """What ranks run on: "GPUs", or "ranks" where one of the devices is a CPU."""
    return "ranks" if re.search(r"\b(cpu|processor|xeon|epyc|neoverse)\b", " ".join(devices), re.IGNORECASE) else "GPUs"


def significant(value: float, least_decimals: int = 0) -> str:
    """A number with at least four significant digits and `least_decimals` decimals, without exponent."""
    return f"{value:.{max(least_decimals, 3 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def format_cell(column: str, value: Any) -> str:
    if value is None or column in COUNTS or column in TEXTS:
        return "" if value is None else str(value)
    if column.endswith("_percent") or column in ("speedup", "memory_peak_gib"):
        return f"{value:.1f}" if column.endswith("_percent") else f"{value:.2f}"
    return significant(value, 1 if column == "samples_per_s_per_gpu" else 0)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table padded to read well in a terminal too; cells to the right, empty ones as dashes."""
    cells = [[plain_text(cell) or "–" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * (width - 1) + ":" for width in widths], *cells]
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def plain_text(text: str) -> str:
    """Text of a record or a log, which anybody may have written, as Markdown that is no picture, link or markup."""
    text = printable(text.replace("\n", " ")).replace("](", "] (").replace("|", "¦").replace("`", "'")
    return re.sub(r"<(?=[a-zA-Z/!?])", "‹", text)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    import pandas as pd

    cells = [[getattr(row, column) for column in COLUMNS] for row in rows]
    pd.DataFrame(cells, columns=list(COLUMNS)).to_csv(path, index=False, float_format="%.7g")
