"""The scaling table: its columns, and reading and writing it as CSV and Markdown.

A table's first columns are those of `published/*.csv`, so each can stand in for the other. An absent value is an
empty cell (CSV) or a dash (Markdown); zero, negative or non-finite rates are refused on reading and can't be written.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.published import PublishedTable, rate_bounds, read_facts, rounding_bounds
from clap_ds.analysis.runs import BREAKDOWN_PARTS, InputError, Run


@dataclass(frozen=True)
class Row:
    """One scale of one series (a model on a kind of GPU, weak or strong scaling). Field order is column order."""

    nodes: int
    gpus: int
    samples_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    mfu_percent: float | None = None
    """In the published convention."""
    scaling_efficiency_percent: float | None = None
    samples_per_s_per_gpu_2sigma: float | None = None
    scaling_efficiency_2sigma_percent: float | None = None
    uncertainty_from: str = ""
    repeats: int = 0
    """Runs with a rate."""
    speedup: float | None = None
    mfu_model_percent: float | None = None
    """By the FLOPs of the work really done."""
    model: str = ""
    scaling: str = ""
    """`weak` (same batch per GPU), `strong` (same global batch), or empty where neither can be told."""
    device: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    """Dense peak of one GPU, where known."""
    text_tokens: int | None = None
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
    time_to_target_s: float | None = None
    """Median of the training runs that reached their target, between the ends of its interval."""
    time_to_target_low_s: float | None = None
    time_to_target_high_s: float | None = None
    state: str = ""
    notes: str = ""

    @property
    def series(self) -> tuple[str, str, str, str, int | None]:
        return self.model, self.scaling, self.device, self.precision, self.text_tokens

    @property
    def breakdown_s(self) -> dict[str, float]:
        values = {part: getattr(self, f"{part}_s") for part in BREAKDOWN_PARTS}
        return {part: value for part, value in values.items() if value is not None}


_INT_COLUMNS = {"nodes", "gpus", "repeats", "text_tokens", "batch_per_gpu", "global_batch"}
_TEXT_COLUMNS = {"uncertainty_from", "model", "scaling", "device", "precision", "state", "notes"}
COLUMNS = tuple(column.name for column in fields(Row))


def series_title(row: Row) -> str:
    """A series in words: model, GPU, precision, caption length, kind of scaling."""
    parts = [row.model.replace("_", "-") or "model not stated", row.device, row.precision]
    parts += [
        f"{row.text_tokens} text tokens" if row.text_tokens else "",
        f"{row.scaling} scaling" if row.scaling else "",
    ]
    return ", ".join(part for part in parts if part)


def significant(value: float, least_decimals: int = 0) -> str:
    """A positive number with at least four significant digits and `least_decimals` decimals, without exponent."""
    assert math.isfinite(value), value
    if value == 0:
        return "0"
    decimals = max(least_decimals, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def format_cell(column: str, value: Any) -> str:
    """A cell's text in CSV; empty for None."""
    if value is None:
        return ""
    if column in _INT_COLUMNS or column in _TEXT_COLUMNS:
        return str(value)
    assert math.isfinite(value), (column, value)
    if column.endswith("_2sigma_percent"):
        return f"{value:.2f}"
    if column.endswith("_percent"):
        return f"{value:.1f}"
    if column in ("speedup", "memory_peak_gib"):
        return f"{value:.2f}"
    return significant(value, 1 if column == "samples_per_s_per_gpu" else 0)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    with _open_output(path) as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([format_cell(column, getattr(row, column)) for column in COLUMNS] for row in rows)


def _open_output(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror})") from error


def write_text(path: Path, text: str) -> None:
    with _open_output(path) as output:
        output.write(text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table padded to read well in a terminal too; cells to the right, empty ones as dashes."""
    cells = [[cell or "–" for cell in row] for row in rows]
    widths = [max(len(line[index]) for line in [header, *cells]) for index in range(len(header))]
    lines = [header, ["-" * (width - 1) + ":" for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def read_table(path: Path) -> list[Row]:
    """Rows of a table of this project or of `published/`.

    Raises:
        InputError: not a CSV table, a column missing, or a cell that isn't what its column holds; says which row.
    """
    facts = read_facts(path)
    rows = [_row(path, number, cells, facts) for number, cells in _records(path)]
    if not rows:
        raise InputError(f"{path}: a header and no rows")
    return rows


def _records(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line number, cells by column) of a table's rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: binary file, not a CSV table") from error
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror})") from error
    if not text.strip():
        raise InputError(f"{path}: empty file")
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or []
    missing = [column for column in ("nodes", "gpus", "samples_per_s_per_gpu") if column not in header]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; a table begins nodes,gpus,samples_per_s_per_gpu,…")
    return [(reader.line_num, {name: (cell or "").strip() for name, cell in cells.items() if name}) for cells in reader]


def _row(path: Path, line: int, cells: dict[str, str], facts: PublishedTable | None) -> Row:
    values: dict[str, Any] = {}
    for column in COLUMNS:
        text = cells.get(column, "")
        if text:
            values[column] = text if column in _TEXT_COLUMNS else _number(path, line, column, text)
    for column in ("nodes", "gpus"):
        if column not in values:
            raise InputError(f"{path}, line {line}: {column} is empty")
    if facts is not None:
        batch = facts.micro_batch_per_gpu
        known = {
            "device": facts.device_name,
            "precision": facts.precision,
            "batch_per_gpu": batch,
            "model": facts.model,
        }
        known |= {"peak_tflops": facts.peak_tflops, "global_batch": batch * values["gpus"]}
        known |= {"scaling": "weak", "state": "published"}
        values = known | values
    elif "model" not in cells:
        values["model"] = path.stem
    return Row(**values)


def _number(path: Path, line: int, column: str, text: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{path}, line {line}: {column} is {text!r}; expected a number") from None
    least_allowed = 0.0 if "sigma" in column or column.endswith(("_percent", "_s", "repeats")) else None
    is_rate = column.startswith("samples_per_s") and "sigma" not in column
    if not math.isfinite(value) or value < 0 or (value == 0 and (is_rate or least_allowed is None)):
        raise InputError(f"{path}, line {line}: {column} is {text}; expected a finite number above zero")
    if column in _INT_COLUMNS:
        if value != int(value):
            raise InputError(f"{path}, line {line}: {column} is {text}; expected a whole number")
        return int(value)
    return value


def read_table_runs(path: Path) -> list[Run]:
    """The rows of a table as runs, so that its efficiencies and MFU can be worked out again."""
    records = _records(path)
    runs = []
    seen = set()
    for row, (_, cells) in zip(read_table(path), records, strict=True):
        # A scale that serves weak and strong scaling has a row in each; it was measured once.
        identity = replace(row, scaling="", scaling_efficiency_percent=None, speedup=None, notes="")
        identity = replace(identity, scaling_efficiency_2sigma_percent=None)
        if identity in seen:
            continue
        seen.add(identity)
        rate, spread, total = row.samples_per_s_per_gpu, row.samples_per_s_per_gpu_2sigma, row.samples_per_s
        if rate is not None and total is not None:
            # Both columns round one number: the middle of what agrees with both is nearer to it than either.
            low, high = rate_bounds(cells["samples_per_s_per_gpu"], cells["samples_per_s"], row.gpus)
            total_low, total_high = rounding_bounds(cells["samples_per_s"])
            total = total if low * row.gpus <= total_high and total_low <= high * row.gpus else None
            rate = (low + high) / 2
        has_spread = rate is not None and spread is not None and spread < rate
        runs.append(
            Run(
                source=str(path),
                kind="table",
                state=row.state or "completed",
                model=row.model or None,
                device_name=row.device or None,
                precision=row.precision or None,
                text_tokens=row.text_tokens,
                num_nodes=row.nodes,
                num_gpus=row.gpus,
                micro_batch_per_gpu=row.batch_per_gpu,
                rate=rate,
                total_rate=total,
                rate_low=rate - spread if has_spread and rate and spread is not None else None,
                rate_high=rate + spread if has_spread and rate and spread is not None else None,
                interval_from=row.uncertainty_from or ("table" if has_spread else ""),
                step_time_s=row.step_time_s,
                slowest_rank_step_time_s=row.slowest_rank_step_time_s,
                data_wait_percent=row.data_wait_percent,
                memory_peak_bytes=row.memory_peak_gib and row.memory_peak_gib * 1024**3,
                breakdown_s=row.breakdown_s,
                mfu_model_percent=row.mfu_model_percent,
                peak_tflops=row.peak_tflops,
                claims={} if "scaling" in cells else cells,
                notes=(row.notes,) if row.notes else (),
            )
        )
    return runs
