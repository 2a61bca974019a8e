"""Rows of the scaling table: written as CSV and Markdown, and read from CSV.

The first columns are those of `published/*.csv`, renamed by `FORMER_COLUMNS`. A missing value is an
empty cell in CSV, and a dash in Markdown.
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
from clap_ds.config.model_names import find_preset
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils import csv_text
from clap_ds.utils.csv_text import unguard_formula
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
    # Half the 95% interval by Student's t, like all columns of this ending.
    samples_per_s_per_gpu_ci95: float | None = None
    # Set if both scales of the ratio were repeated.
    scaling_efficiency_percent_ci95: float | None = None
    uncertainty_from: str = ""
    repeats: int = 0
    # Nodes of the scale that efficiencies and speed-up are relative to.
    baseline_nodes: int | None = None
    speedup: float | None = None
    deepspeed_samples_per_s_per_gpu: float | None = None
    achieved_tflops: float | None = None
    # MFU by executed FLOPs.
    mfu_model_percent: float | None = None
    model: str = ""
    # `weak` (same batch per GPU), `strong` (same global batch), or empty if unknown.
    scaling: str = ""
    device: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    context_length: int | None = None
    # How its runs differ from others in the table: `gradient_sync=deepspeed, batch per GPU 64`.
    variant: str = ""
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
    feature_wait_s: float | None = None
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
    def relative_ci95(self) -> float | None:
        """The ± of the rate relative to it."""
        # Unknown, unless it was repeated.
        if self.samples_per_s_per_gpu_ci95 is None or not self.rate:
            return None
        return self.samples_per_s_per_gpu_ci95 / self.rate

    @property
    def series(self) -> tuple[object, ...]:
        names = ("model", "scaling", "device", "precision", "context_length", "variant")
        return tuple(getattr(self, name) for name in names)

    @property
    def title(self) -> str:
        title = join_texts(self.model_name, self.device, self.precision)
        if self.context_length:
            title += f", {self.context_length} text tokens"
        title = join_texts(title, self.variant)
        if self.scaling:
            title += f", {self.scaling} scaling"
        return plain_text(title)

    @property
    def scale(self) -> str:
        """`2 nodes, 8 GPUs`."""
        return f"{count_of(self.nodes, 'node')}, {count_of(self.gpus, self.unit)}"

    @property
    def unit(self) -> str:
        return name_unit(self.device)

    @property
    def model_name(self) -> str:
        return self.model.replace("_", "-") or "model not stated"

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds per step by `STEP_PHASES` in an instrumented pass, without unmeasured parts."""
        seconds = {part: getattr(self, f"{part}_s") for part in STEP_PHASES}
        return {part: value for part, value in seconds.items() if value is not None}

    def cell(self, column: str) -> str:
        """Return a column's text, with its ± to as many decimals; empty for None."""
        text = format_cell(column, getattr(self, column))
        error = getattr(self, f"{column}_ci95", None)
        if not text or error is None:
            return text
        # A ± has as many decimals as its value.
        decimals = len(text.partition(".")[2])
        if column.endswith("_percent"):
            decimals = max(decimals, 2)
        return f"{text} ± {error:.{decimals}f}"


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
    # Half of the rate's last digit, relative to it. Repeats can't show that they differ by less.
    rounding: float = 1e-6
    # The run directory that a log names.
    directory: str = ""

    @property
    def name(self) -> str:
        return Path(self.source).name

    @property
    def default_model(self) -> str:
        """Its `model` if its source doesn't state one."""
        return Path(self.source).stem if self.kind == "table" else ""


@dataclass(frozen=True)
class Scale(Row):
    # The runs that count: those with a rate, and if any completed, only completed ones.
    runs: tuple[Run, ...] = ()


# Columns of published and former tables → their names here.
FORMER_COLUMNS = {
    "mfu_percent": "mfu_published_percent",
    "samples_per_s_per_gpu_2sigma": "samples_per_s_per_gpu_ci95",
    "scaling_efficiency_2sigma_percent": "scaling_efficiency_percent_ci95",
    "engine_samples_per_s_per_gpu": "deepspeed_samples_per_s_per_gpu",
}
# Columns of one GPU → of all GPUs.
_TOTALS = {"samples_per_s_per_gpu": "samples_per_s", "batch_per_gpu": "global_batch"}
# Note of a run whose rate DeepSpeed's timer measured.
BY_TIMER = "by DeepSpeed's timer"
# `unknown`: a log without a launcher's last line; its rate counts.
GOOD_STATES = ("completed", "published", "unknown")
ENERGY_COLUMNS = ("joules_per_sample", "energy_kwh")
# Upper limit of all measured values, in the units of their fields.
MAX_VALUE = 1e15
# `float | None` → float. Annotations are texts in this file.
_TYPES = {column.name: str(column.type).partition(" ")[0] for column in fields(Row)}
COLUMNS = tuple(_TYPES)
_EXPECTED = {"str": "text", "int": "a whole number", "float": "a nonnegative number"}
_Row = TypeVar("_Row", bound=Row)


def check_types(row: _Row, source: str) -> _Row:
    """Return the row. UserError if a value isn't of its column's type: text, a count, or a
    nonnegative number."""
    for name, type_name in _TYPES.items():
        value = getattr(row, name)
        # NaN fails this comparison.
        is_number = isinstance(value, int | float) and 0 <= value < MAX_VALUE
        is_valid = {
            "str": isinstance(value, str),
            "int": is_number and value == int(value),
            "float": is_number,
        }
        if value is not None and not is_valid[type_name]:
            raise UserError(f"{source}: {name} is {value!r}; expected {_EXPECTED[type_name]}")
    return row


def group_by_series(rows: Sequence[_Row]) -> list[list[_Row]]:
    members = defaultdict[object, list[_Row]](list)
    for row in rows:
        members[row.series].append(row)
    return [*members.values()]


def join_texts(*texts: str, by: str = ", ") -> str:
    """Join the texts that aren't empty."""
    return by.join(filter(None, texts))


def add_note(row: _Row, note: str) -> _Row:
    return replace(row, notes=join_texts(row.notes, note, by="; "))


def describe_baseline(rows: Sequence[Row]) -> str:
    """Return `relative to 2 nodes` for the rows of one series; empty if the baseline is one
    node."""
    nodes = next((row.baseline_nodes for row in rows if row.baseline_nodes), 1)
    return "" if nodes == 1 else f"relative to {count_of(nodes, 'node')}"


def name_unit(device: str) -> str:
    """Return what a rank runs on: "GPU", or "rank" if its device is a CPU."""
    is_cpu = re.search(r"\b(cpu|processor|xeon|epyc|neoverse)\b", device, re.IGNORECASE)
    return "rank" if is_cpu else "GPU"


def significant(value: float, least_decimals: int = 0) -> str:
    """Format a number with at least four significant digits and `least_decimals` decimals, without
    exponent."""
    if not value:
        return "0"
    # For 12.34, the logarithm rounds down to 1, which leaves two decimals.
    decimals = max(least_decimals, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def format_cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if _TYPES[column] != "float":
        return str(value)
    if column.endswith("_percent"):
        return f"{value:.1f}"
    if column in ("speedup", "memory_peak_gib"):
        return f"{value:.2f}"
    return significant(value, 1 if column == "samples_per_s_per_gpu" else 0)


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, right-aligned for terminals, with dashes for empty cells and without
    empty columns; empty without rows."""
    columns = []
    for name, *cells in zip(header, *rows, strict=True):
        texts = [plain_text(cell) for cell in cells]
        if any(texts):
            columns.append([name, *(text or "–" for text in texts)])
    if not columns:
        return ""
    widths = [max(map(len, column)) for column in columns]
    lines = [*zip(*columns, strict=True)]
    # The colon aligns a column to the right.
    lines.insert(1, tuple("-" * (width - 1) + ":" for width in widths))
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def plain_text(text: str) -> str:
    """Neutralize pictures, links and markup in untrusted text of records and logs, for Markdown and
    HTML. It may not begin a line there."""
    text = printable(text.replace("\n", " ")).replace("](", "] (").translate(_NOT_MARKUP)
    return _TAG_START.sub("‹", text)


# Characters that look alike.
_NOT_MARKUP = str.maketrans("|`*~", "¦'∗∼")
_TAG_START = re.compile(r"<(?=[a-zA-Z/!?])")


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    lines: list[Sequence[str | float | None]] = [COLUMNS]
    for row in rows:
        values = [getattr(row, column) for column in COLUMNS]
        # More digits than any measurement has.
        lines.append([f"{v:.7g}" if isinstance(v, float) else v for v in values])
    csv_text.write_csv(path, lines)


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
    (names, *rows), separator = _read_cells(path)
    header = [FORMER_COLUMNS.get(name, name) for name in map(str.strip, names)]
    if missing := [name for name in COLUMNS[:3] if name not in header]:
        problem = f"no column {', '.join(missing)}; found {', '.join(header)}"
        raise UserError(f"{path}: not a CSV table of runs: {problem}")
    if repeated := [name for name in COLUMNS if header.count(name) > 1]:
        raise UserError(f"{path}: column {repeated[0]} appears twice")
    if not rows:
        raise UserError(f"{path}: a header and no rows")
    runs = []
    for number, row in enumerate(rows, start=1):
        source = f"{path}, row {number}"
        if separator == ";":
            source += " (with semicolons, numbers have decimal commas)"
        # Spreadsheets end short rows with empty cells.
        if any(row[len(header) :]):
            raise UserError(f"{source}: more cells than the header")
        values = {}
        for name, cell in zip(header, row, strict=False):
            if name in COLUMNS and cell:
                values[name] = _parse_cell(cell, name, separator)
        runs.append(_make_run(path, source, values))
    return runs


def _read_cells(path: Path) -> tuple[list[list[str]], str]:
    """Return the rows that aren't blank, at least one, and the separator."""
    try:
        content = read_bytes(path)
        text = io.StringIO(content.decode(find_encoding(content)), newline=None)
        # Excel may begin with `sep=;`.
        lines = [line for line in text if not line.lstrip('"').startswith("sep=")]
        header_line = next(filter(str.strip, lines), "")
        separator = next((mark for mark in ";\t" if mark in header_line), ",")
        rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
        return [row for row in rows if any(row)] or [[]], separator
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8 ({error})") from None


def _parse_cell(cell: str, column: str, separator: str) -> str | float:
    """Return a number, or the text if the cell is none."""
    if _TYPES[column] == "str":
        return unguard_formula(cell)
    # With semicolons, 623,75 is a number.
    number = cell.translate(str.maketrans(",.", ".,")) if separator == ";" else cell
    try:
        return float(number)
    except ValueError:
        return cell


def _make_run(path: Path, source: str, cells: Mapping[Any, Any]) -> Run:
    values = {"state": "completed", "model": path.stem, **PUBLISHED_TABLES.get(path.stem, {})}
    values |= cells
    values["model"] = find_preset(values["model"])
    run = check_types(Run(**values, source=str(path), kind="table"), source)
    if not (run.nodes and run.gpus):
        raise UserError(f"{source}: nodes or gpus is empty")
    # Cells are read as floats.
    counts: dict[str, Any] = {}
    for name, value in vars(run).items():
        if _TYPES.get(name) == "int" and value is not None:
            counts[name] = int(value)
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
            columns = f"{total_name} {total:.12g} contradicts {name} {value:.12g}"
            run = add_note(run, f"{columns} on {run.gpus} GPUs, which is used")
        elif name == "samples_per_s_per_gpu":
            run = replace(run, samples_per_s_per_gpu=(low + high) / 2)
    return run


def half_digit(number: float) -> float:
    """Return half of a printed number's last digit: 0.05 for 600.1."""
    return 0.5 * 10.0 ** -len(f"{number:.12g}".partition(".")[2])
