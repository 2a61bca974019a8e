"""Measured runs and the scaling table's rows, and reading and writing them as CSV and Markdown.

A table's first columns are those of `published/*.csv`, so each can stand in for the other. An absent value is an
empty cell (CSV) or a dash (Markdown); zero, negative or non-finite rates are refused on reading and can't be written.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from clap_ds.analysis.csv_cells import nearest, read_cells
from clap_ds.analysis.published import PUBLISHED_TABLES, rate_bounds, rounding_bounds
from clap_ds.config.errors import UserError
from clap_ds.config.model_names import preset_of
from clap_ds.record.schema import STEP_PHASES


@dataclass(frozen=True)
class Row:
    """One scale of one series (a model on a kind of GPU, weak or strong scaling). Field order is column order.

    What is not known is None, an empty text or, for counts of nodes and GPUs, 0; never NaN.
    """

    nodes: int = 0
    gpus: int = 0
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
    engine_samples_per_s_per_gpu: float | None = None
    """By DeepSpeed's timer, which leaves out the wait for data."""
    achieved_tflops: float | None = None
    """Of one GPU, by the FLOPs of the work really done."""
    mfu_model_percent: float | None = None
    """By the FLOPs of the work really done."""
    model: str = ""
    scaling: str = ""
    """`weak` (same batch per GPU), `strong` (same global batch), or empty where neither can be told."""
    device: str = ""
    precision: str = ""
    peak_tflops: float | None = None
    """Dense peak of one GPU."""
    text_tokens: int | None = None
    variant: str = ""
    """What its runs have that others in the same table haven't: `gradient_sync=deepspeed, batch per GPU 64`."""
    micro_batch: int | None = None
    """Samples of one GPU in one forward pass."""
    batch_per_gpu: int | None = None
    """Samples each GPU contributes to one optimiser step."""
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
    """Joined by semicolons."""

    @property
    def rate(self) -> float | None:
        return self.samples_per_s_per_gpu

    @property
    def series(self) -> tuple[str, str, str, str, int | None, str]:
        return self.model, self.scaling, self.device, self.precision, self.text_tokens, self.variant

    @property
    def title(self) -> str:
        """The series in words."""
        tokens = f"{self.text_tokens} text tokens" if self.text_tokens else ""
        scaling = f"{self.scaling} scaling" if self.scaling else ""
        return ", ".join(filter(None, (self.model_name, self.device, self.precision, tokens, self.variant, scaling)))

    @property
    def scale(self) -> str:
        """`2 nodes, 8 GPUs`."""
        return f"{count_of(self.nodes, 'node')}, {self.gpus} {self.unit}"

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
        value, error = getattr(self, column), getattr(self, spread) if spread else None
        if (
            column == "samples_per_s_per_gpu_2sigma" and value and self.rate
        ):  # two decimals more, as tables are read again
            value = round(value, 2 + len(self.cell("samples_per_s_per_gpu").partition(".")[2]))
        text = format_cell(column, value)
        decimals = max(len(text.partition(".")[2]), 2 * spread.endswith("_percent"))
        return f"{text} ± {error:.{decimals}f}" if text and error is not None else text

    def cells(self, *columns: str) -> list[str]:
        return [self.cell(column) for column in columns]


BATCHES = ("batch per GPU", "global batch")
"""What the parts of `variant` begin with that say no setting, but which batch a series keeps constant."""


def settings_of(variant: str) -> str:
    """A variant without the batch that its series keeps constant."""
    return ", ".join(part for part in variant.split(", ") if not part.startswith(BATCHES))


@dataclass(frozen=True)
class Run(Row):
    """One measured run, or a row read from a table, before repeats are combined."""

    source: str = ""
    kind: Literal["record", "log", "table"] = "record"
    error: str = ""
    interval: tuple[float, float] | None = None
    """Of the rate; `uncertainty_from` says what it is."""
    windows: tuple[float, ...] = ()
    """Samples/s/GPU of each."""
    window_s: tuple[float, ...] = ()
    """Seconds of each, or in proportion to them; the rate is all samples over all of them."""
    accumulation: int = 1
    """Micro-batches per optimiser step."""
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    finished: str = ""
    directory: str = ""
    """The run directory that a log names."""
    identity: str = ""
    """What two copies of a log, or of a table's row, have in common, beside all that is known of it."""

    @property
    def name(self) -> str:
        return Path(self.source).name

    def name_among(self, runs: Iterable[Run]) -> str:
        """The last parts of its path, as many as tell it from the others'."""
        own = Path(self.source).parts
        others = {Path(run.source).parts for run in runs} - {own}
        counts = (count for count in range(1, len(own)) if all(parts[-count:] != own[-count:] for parts in others))
        return str(Path(*own[-next(counts, len(own)) :]))

    @property
    def interval_label(self) -> str:
        """What `interval` is, in short: `96.9 % interval`."""
        return self.uncertainty_from.partition(" of ")[0] or "interval"


@dataclass(frozen=True)
class Scale(Row):
    """A row with the runs it was made of, repeats of each other."""

    runs: tuple[Run, ...] = ()
    """Those that count: with a rate, and completed where any did."""


LEAST, MOST = 1e-12, 1e15
"""Of anything that is measured here, in the units of its field."""


def is_measurable(value: float) -> bool:
    """Whether a rate, time or count can be this; what is beyond (or not finite) is a damaged file's."""
    return LEAST <= value <= MOST


COLUMNS = tuple(column.name for column in fields(Row))
_INT_COLUMNS = {"nodes", "gpus", "repeats", "text_tokens", "micro_batch", "batch_per_gpu", "global_batch"}
_WHOLE_COLUMNS = _INT_COLUMNS | {"gpus_per_node"}
_TEXT_COLUMNS = {"uncertainty_from", "model", "scaling", "device", "precision", "variant", "state", "notes"}
_Row = TypeVar("_Row", bound=Row)


def by_series(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Rows of each series, in order."""
    return [[row for row in rows if row.series == series] for series in dict.fromkeys(row.series for row in rows)]


def choose_series(rows: Sequence[_Row], name: str | None, where: object) -> list[_Row]:
    """The rows of the one series there is, or of the one whose model or title is, or has in it, `name`, in any case and with
    hyphens or underscores. UserError, naming `where` and the series there are, where that is none or several."""
    series = by_series(rows)
    plain = (name or "").casefold().replace("_", "-")
    titles = [members[0].title.casefold().replace("_", "-") for members in series]
    exact = [members for members, title in zip(series, titles, strict=True) if plain in (title, title.split(",")[0])]
    found = exact or [members for members, title in zip(series, titles, strict=True) if plain in title]
    if len(found) == 1:
        return found[0]
    there = "; ".join(members[0].title for members in series)
    if not name:
        raise UserError(f"{where}: holds {len(series)} series; choose one with --series NAME: {there}")
    raise UserError(f"{where}: --series {name} is in the titles of {len(found)} of its series; there are: {there}")


def count_of(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def unit(*devices: str) -> str:
    """What ranks run on: "GPUs", or "ranks" where one of the devices is a CPU."""
    return "ranks" if re.search(r"\b(cpu|processor|xeon|epyc|neoverse)\b", " ".join(devices), re.IGNORECASE) else "GPUs"


def significant(value: float, least_decimals: int = 0) -> str:
    """A number with at least four significant digits and `least_decimals` decimals, without exponent."""
    assert math.isfinite(value), value
    if value == 0:
        return "0"
    return f"{value:.{max(least_decimals, 3 - math.floor(math.log10(abs(value))))}f}"


def format_cell(column: str, value: Any) -> str:
    """A cell's text in CSV; empty for None."""
    if value is None:
        return ""
    if column in _INT_COLUMNS or column in _TEXT_COLUMNS:
        return str(value)
    assert math.isfinite(value), (column, value)
    if column in ("speedup", "memory_peak_gib") or column.endswith("_2sigma_percent"):
        return f"{value:.2f}"
    if column.endswith("_percent"):
        return f"{value:.1f}"
    return significant(value, 1 if column == "samples_per_s_per_gpu" else 0)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table padded to read well in a terminal too; cells to the right, empty ones as dashes."""
    cells = [[cell or "–" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * (width - 1) + ":" for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *(row.cells(*COLUMNS) for row in rows)])


ABOVE_ALL = 2.0
"""Points above 100 % efficiency that are put down to chance where no ± is known."""


def in_doubt(percent: float, error: float | None) -> bool:
    """Whether an efficiency is above 100 % by more than its ±, so that its baseline's rate is in doubt."""
    return percent - 100 > (ABOVE_ALL if error is None else error)


def read_table(path: Path) -> list[Row]:
    """Rows of a table of this project or of `published/`; UserError, saying where, if it isn't as it should be."""
    return [row for row, _ in _read(path)]


def _read(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """Rows, and their cells as printed."""
    found = read_cells(path, COLUMNS, _TEXT_COLUMNS, _WHOLE_COLUMNS)
    if not found:
        raise UserError(f"{path}: a header and no rows")
    there = set(found[0].texts)
    known = there | ({"nodes", "gpus"} if "gpus_per_node" in there and there & {"nodes", "gpus"} else set())
    known |= {"samples_per_s_per_gpu"} if "samples_per_s" in there else set()
    if missing := [column for column in COLUMNS[:3] if column not in known]:
        near = nearest(there - set(COLUMNS), missing)
        raise UserError(f"{path}: no column {', '.join(missing)}; a table begins {','.join(COLUMNS[:3])},…{near}")
    for cells in found:
        _derive(cells.where, cells.texts)
    return [(_row(path, cells.where, cells.texts), cells.texts) for cells in found]


def _derive(where: str, cells: dict[str, str]) -> None:
    """Fill nodes from GPUs and GPUs from nodes, where a row has but one of them and the GPUs per node."""
    names = ("gpus_per_node", "nodes", "gpus")
    per_node, nodes, gpus = (_value(where, name, cells[name]) if cells.get(name) else 0 for name in names)
    if per_node and nodes and not gpus:
        cells["gpus"] = str(nodes * per_node)
    elif per_node and gpus and not nodes:
        if gpus % per_node:
            raise UserError(f"{where}: gpus is {gpus}, no multiple of {per_node} GPUs per node")
        cells["nodes"] = str(gpus // per_node)


def _row(path: Path, where: str, cells: Mapping[str, str]) -> Row:
    values = {column: _value(where, column, text) for column in COLUMNS if (text := cells.get(column))}
    if empty := [column for column in ("nodes", "gpus") if column not in values]:
        raise UserError(f"{where}: {' and '.join(empty)} is empty")
    if facts := PUBLISHED_TABLES.get(path.stem):
        values = {**facts, "global_batch": facts["batch_per_gpu"] * values["gpus"], **values}
    elif "model" not in cells:
        values["model"] = path.stem
    if "samples_per_s" in values and "samples_per_s_per_gpu" not in values:
        values["samples_per_s_per_gpu"] = values["samples_per_s"] / values["gpus"]
    return Row(**values)


def _value(where: str, column: str, text: str) -> Any:
    if column in _TEXT_COLUMNS:
        return preset_of(text) if column == "model" else text
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {column} is {text!r}; expected a number") from None
    may_be_zero = column != "samples_per_s" and ("sigma" in column or column.endswith(("_percent", "_s", "repeats")))
    if not (is_measurable(value) or (may_be_zero and 0 <= value < LEAST)):
        raise UserError(f"{where}: {column} is {text}; expected a number above zero that can be measured")
    if column in _WHOLE_COLUMNS and value != int(value):
        raise UserError(f"{where}: {column} is {text}; expected a whole number")
    return int(value) if column in _WHOLE_COLUMNS else value


def read_table_runs(path: Path) -> list[Run]:
    """The rows of a table as runs, so that its efficiencies and MFU can be worked out again; errors as of `read_table`."""
    runs: dict[tuple[Row, int], Run] = {}
    again: Counter[tuple[Row, str, str]] = Counter()
    for row, cells in _read(path):
        # A scale that serves weak and strong scaling has a row in each; it was measured once. Equal rows of one are repeats.
        identity = replace(row, scaling="", variant=settings_of(row.variant), notes="", scaling_efficiency_percent=None,
                           scaling_efficiency_2sigma_percent=None, speedup=None)  # fmt: skip
        rate, spread, total = row.samples_per_s_per_gpu, row.samples_per_s_per_gpu_2sigma, row.samples_per_s
        if rate is not None and total is not None:
            # Both columns round one number: the middle of what agrees with both is nearer to it than either.
            low, high = rate_bounds(cells.get("samples_per_s_per_gpu", ""), cells["samples_per_s"], row.gpus)
            total_low, total_high = rounding_bounds(cells["samples_per_s"])
            total = total if low * row.gpus <= total_high and total_low <= high * row.gpus else None
            rate = (low + high) / 2
        known: dict[str, Any] = {"samples_per_s_per_gpu": rate, "samples_per_s": total, "time_to_target_s": None,
                                 "state": row.state or "completed"}  # fmt: skip
        if rate is not None and spread is not None and spread < rate:
            known |= {"interval": (rate - spread, rate + spread), "uncertainty_from": row.uncertainty_from or "table"}
        again[identity, row.scaling, row.variant] += 1
        count = again[identity, row.scaling, row.variant]
        run = Run(**{**vars(row), **known}, source=str(path), kind="table", identity=f"row {count} of its kind")
        runs.setdefault((identity, count), run)
    return list(runs.values())
