"""Measured runs and rows of the scaling table, written as CSV and Markdown, and read from CSV, this
project's or published.

The first columns are those of `published/*.csv`, under `FORMER_COLUMNS`. A missing value is an
empty cell (CSV) or a dash (Markdown).
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from clap_ds.analysis.published import PUBLISHED_TABLES
from clap_ds.config.model_names import preset_of
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils import csv_text
from clap_ds.utils.csv_text import unguarded
from clap_ds.utils.errors import UserError, count_of, printable
from clap_ds.utils.files import read_bytes


@dataclass(frozen=True)
class Row:
    """One scale of one series. Field order is column order. Unknown values are None, "" or, for
    nodes and GPUs, 0."""

    nodes: int = 0
    gpus: int = 0
    samples_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    mfu_published_percent: float | None = None
    scaling_efficiency_percent: float | None = None
    samples_per_s_per_gpu_ci95: float | None = None
    """Half the 95% interval by Student's t, like all columns of this ending."""
    scaling_efficiency_percent_ci95: float | None = None
    """Set if both scales of the ratio were repeated."""
    uncertainty_from: str = ""
    repeats: int = 0
    baseline_nodes: int | None = None
    """Nodes of the scale that efficiencies and speed-up are relative to."""
    speedup: float | None = None
    deepspeed_samples_per_s_per_gpu: float | None = None
    achieved_tflops: float | None = None
    mfu_model_percent: float | None = None
    """MFU by executed FLOPs."""
    model: str = ""
    scaling: str = ""
    """`weak` (same batch per GPU), `strong` (same global batch), or empty if unknown."""
    device: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    context_length: int | None = None
    variant: str = ""
    """How its runs differ from others in the table: `gradient_sync=deepspeed, batch per GPU 64`."""
    micro_batch: int | None = None
    batch_per_gpu: int | None = None
    global_batch: int | None = None
    step_time_s: float | None = None
    slowest_rank_step_time_s: float | None = None
    exposed_communication_percent: float | None = None
    data_wait_percent: float | None = None
    memory_peak_gib: float | None = None
    joules_per_sample: float | None = None
    energy_kwh: float | None = None
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
        """The ± of the rate relative to it."""
        half = self.samples_per_s_per_gpu_ci95
        return None if half is None or not self.rate else half / self.rate

    @property
    def series(self) -> tuple[object, ...]:
        return (
            self.model,
            self.scaling,
            self.device,
            self.precision,
            self.context_length,
            self.variant,
        )

    @property
    def title(self) -> str:
        tokens = f"{self.context_length} text tokens" if self.context_length else ""
        scaling = self.scaling and f"{self.scaling} scaling"
        parts = self.model_name, self.device, self.precision, tokens, self.variant, scaling
        return plain_text(", ".join(filter(None, parts)))

    @property
    def scale(self) -> str:
        """`2 nodes, 8 GPUs`."""
        return f"{count_of(self.nodes, 'node')}, {count_of(self.gpus, self.unit)}"

    @property
    def unit(self) -> str:
        return unit(self.device)

    @property
    def model_name(self) -> str:
        return self.model.replace("_", "-") or "model not stated"

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds per step by `STEP_PHASES` in an instrumented pass, without unmeasured parts."""
        return {
            part: value for part in STEP_PHASES if (value := getattr(self, f"{part}_s")) is not None
        }

    def cell(self, column: str) -> str:
        """Return a column's text, with its ± to as many decimals; empty for None."""
        text = format_cell(column, getattr(self, column))
        error = getattr(self, f"{column}_ci95", None)
        decimals = max(len(text.partition(".")[2]), 2 * column.endswith("_percent"))
        return f"{text} ± {error:.{decimals}f}" if text and error is not None else text


@dataclass(frozen=True)
class Run(Row):
    """One measured run, or a row read from a table, before repeats are combined."""

    source: str = ""
    kind: Literal["record", "log", "table"] = "record"
    error: str = ""
    windows: tuple[float, ...] = ()
    accumulation: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    finished: str = ""
    rounding: float = 1e-6
    """Half of the rate's last digit, relative to it. Repeats can't show that they differ by
    less."""
    directory: str = ""
    """The run directory that a log names."""

    @property
    def name(self) -> str:
        return Path(self.source).name

    @property
    def default_model(self) -> str:
        """Its `model` if its source doesn't state one."""
        return Path(self.source).stem if self.kind == "table" else ""


@dataclass(frozen=True)
class Scale(Row):
    runs: tuple[Run, ...] = ()
    """The runs that count: those with a rate, and if any completed, only completed ones."""


FORMER_COLUMNS = {
    "mfu_percent": "mfu_published_percent",
    "samples_per_s_per_gpu_2sigma": "samples_per_s_per_gpu_ci95",
    "scaling_efficiency_2sigma_percent": "scaling_efficiency_percent_ci95",
    "engine_samples_per_s_per_gpu": "deepspeed_samples_per_s_per_gpu",
}
"""Columns of published and former tables → their names here."""
_TOTALS = {"samples_per_s_per_gpu": "samples_per_s", "batch_per_gpu": "global_batch"}
"""Columns of one GPU → of all GPUs."""
ENERGY = ("joules_per_sample", "energy_kwh")
MOST = 1e15
"""Upper limit of all measured values, in the units of their fields."""
_KINDS = {column.name: str(column.type).partition(" ")[0] for column in fields(Row)}
COLUMNS = tuple(_KINDS)
COUNTS, TEXTS = (
    {name for name, kind in _KINDS.items() if kind == wanted} for wanted in ("int", "str")
)
_EXPECTED = {"str": "text", "int": "a whole number", "float": "a nonnegative number"}
_Row = TypeVar("_Row", bound=Row)


def checked(row: _Row, where: str) -> _Row:
    """Return the row. UserError if a value is not of its column's type: text, a count, or a
    nonnegative number."""
    for name, kind in _KINDS.items():
        value = getattr(row, name)
        is_number = (
            isinstance(value, int | float)
            and 0 <= value < MOST
            and (kind == "float" or value == int(value))
        )
        if not (value is None or (isinstance(value, str) if kind == "str" else is_number)):
            raise UserError(f"{where}: {name} is {value!r}; expected {_EXPECTED[kind]}")
    return row


def by_series(rows: Sequence[_Row]) -> list[list[_Row]]:
    members = defaultdict[object, list[_Row]](list)
    for row in rows:
        members[row.series].append(row)
    return [*members.values()]


def noted(row: _Row, note: str) -> _Row:
    return replace(row, notes="; ".join(filter(None, [row.notes, note])))


def relative_to(rows: Sequence[Row]) -> str:
    """Return `relative to 2 nodes` for the rows of one series; empty if the baseline is one
    node."""
    nodes = next((row.baseline_nodes for row in rows if row.baseline_nodes), 1)
    return "" if nodes == 1 else f"relative to {count_of(nodes, 'node')}"


def unit(device: str) -> str:
    """Return what a rank runs on: "GPU", or "rank" if its device is a CPU."""
    return (
        "rank"
        if re.search(r"\b(cpu|processor|xeon|epyc|neoverse)\b", device, re.IGNORECASE)
        else "GPU"
    )


def significant(value: float, least_decimals: int = 0) -> str:
    """Format a number with at least four significant digits and `least_decimals` decimals, without
    exponent."""
    return (
        f"{value:.{max(least_decimals, 3 - math.floor(math.log10(abs(value))))}f}" if value else "0"
    )


def format_cell(column: str, value: Any) -> str:
    if value is None or _KINDS[column] != "float":
        return "" if value is None else str(value)
    if column.endswith("_percent") or column in ("speedup", "memory_peak_gib"):
        return f"{value:.1f}" if column.endswith("_percent") else f"{value:.2f}"
    return significant(value, 1 if column == "samples_per_s_per_gpu" else 0)


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, right-aligned for terminals, with dashes for empty cells and without
    empty columns; empty without rows."""
    columns = [[name, *map(plain_text, cells)] for name, *cells in zip(header, *rows, strict=True)]
    columns = [[cell or "–" for cell in column] for column in columns if any(column[1:])]
    if not columns:
        return ""
    widths = [max(map(len, column)) for column in columns]
    first, *others = zip(*columns, strict=True)
    lines = [first, ["-" * (width - 1) + ":" for width in widths], *others]
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def plain_text(text: str) -> str:
    """Neutralize pictures, links and markup in untrusted text of records and logs, for Markdown and
    HTML. It may not begin a line there."""
    text = printable(text.replace("\n", " ")).replace("](", "] (").translate(_NOT_MARKUP)
    return _TAG_START.sub("‹", text)


_NOT_MARKUP = str.maketrans("|`*~", "¦'∗∼")
_TAG_START = re.compile(r"<(?=[a-zA-Z/!?])")


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    cells = ([_csv_cell(getattr(row, column)) for column in COLUMNS] for row in rows)
    csv_text.write_csv(path, [COLUMNS, *cells])


def _csv_cell(value: str | float | None) -> str | float | None:
    return f"{value:.7g}" if isinstance(value, float) else value


def find_encoding(start: bytes) -> str:
    """Return the encoding by the mark at a file's start: UTF-16, as PowerShell writes it, or else
    UTF-8."""
    is_utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if is_utf16 else "utf-8-sig"


def read_table_runs(path: Path) -> list[Run]:
    """Read the rows of a table of this project or of `published/` as runs. Efficiency and MFU are
    recomputed from them.

    Columns are separated by commas, tabs or semicolons; with semicolons, commas are decimal commas.
    UserError names the wrong row or column.
    """
    try:
        content = read_bytes(path)
        text = io.StringIO(content.decode(find_encoding(content)), newline=None)
        lines = [line for line in text if not line.lstrip('"').startswith("sep=")]  # Excel's own
        header_line = next(filter(str.strip, lines), "")
        separator = next((mark for mark in ";\t" if mark in header_line), ",")
        table = [
            row for row in csv.reader(lines, delimiter=separator, skipinitialspace=True) if any(row)
        ]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8 ({error})") from None
    names = table[0] if table else []
    header = [FORMER_COLUMNS.get(name, name) for name in map(str.strip, names)]
    if missing := [name for name in COLUMNS[:3] if name not in header]:
        raise UserError(
            f"{path}: not a CSV table of runs: no column {', '.join(missing)}; found {', '.join(header)}"
        )
    if repeated := [name for name in COLUMNS if header.count(name) > 1]:
        raise UserError(f"{path}: column {repeated[0]} appears twice")
    if len(table) == 1:
        raise UserError(f"{path}: a header and no rows")
    runs = []
    for number, row in enumerate(table[1:], start=1):
        where = f"{path}, row {number}"
        if separator == ";":
            where += " (with semicolons, numbers have decimal commas)"
        if any(row[len(header) :]):
            raise UserError(f"{where}: more cells than the header")
        cells = zip(header, row, strict=False)
        known = {
            name: _parse_cell(cell, name, separator)
            for name, cell in cells
            if name in COLUMNS and cell
        }
        runs.append(_run(path, where, known))
    return runs


def _parse_cell(cell: str, column: str, separator: str) -> str | float:
    """Return a number, or the text if the cell is none."""
    number = cell.translate(str.maketrans(",.", ".,")) if separator == ";" else cell
    try:
        return unguarded(cell) if column in TEXTS else float(number)
    except ValueError:
        return cell


def _run(path: Path, where: str, cells: Mapping[Any, Any]) -> Run:
    values = {"state": "completed", "model": path.stem, **PUBLISHED_TABLES.get(path.stem, {})}
    values |= cells
    values["model"] = preset_of(values["model"])
    run = checked(Run(**values, source=str(path), kind="table"), where)
    if not (run.nodes and run.gpus):
        raise UserError(f"{where}: nodes or gpus is empty")
    counts: dict[str, Any] = {
        name: int(count) for name in COUNTS if (count := getattr(run, name)) is not None
    }
    run = replace(run, **counts)
    if run.rate:
        run = replace(run, rounding=half_digit(run.rate) / run.rate)
    for name, total_name in _TOTALS.items():
        value = getattr(run, name)
        total = getattr(run, total_name)
        if not (value and total):
            continue
        # What the last digits of both columns allow.
        low = max(value - half_digit(value), (total - half_digit(total)) / run.gpus)
        high = min(value + half_digit(value), (total + half_digit(total)) / run.gpus)
        if low > high:
            run = noted(
                run,
                f"{total_name} {total:.12g} contradicts {name} {value:.12g} on {run.gpus} GPUs, which is used",
            )
        elif name == "samples_per_s_per_gpu":
            run = replace(run, samples_per_s_per_gpu=(low + high) / 2)
    return run


def half_digit(number: float) -> float:
    return 0.5 * 10.0 ** -len(f"{number:.12g}".partition(".")[2])
