"""A table in a CSV file, as this project writes it or as people have it → rows, their numbers as Python reads them.

Commas, semicolons, tabs or bars; UTF-8, UTF-16 or a Western European code page; headings with spaces, capitals and units;
blank rows and rows of totals; decimal points or commas, thousands' separators, per cent signs. What can be meant in two ways
is refused, never guessed.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis.published import PUBLISHED_TABLES
from clap_ds.analysis.table import COLUMNS, COUNTS, LEAST, TEXTS, Row, Run, is_measurable, settings_of
from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.config.model_names import preset_of

_WHOLE_COLUMNS = {*COUNTS, "gpus_per_node"}
_WORDS = {
    "/": "per", "%": "percent", "je": "per", "pro": "per", "knoten": "nodes", "knotenzahl": "nodes", "effizienz": "efficiency",
    "modell": "model", "proben": "samples", "beispiele": "samples", "clips": "samples", "durchsatz": "throughput", "sec": "s",
    "second": "s", "node": "nodes", "nnodes": "nodes", "hosts": "nodes", "gpu": "gpus", "ngpus": "gpus", "rank": "gpus",
    "ranks": "gpus", "device": "gpus", "devices": "gpus", "preset": "model",
}  # fmt: skip
"""What words of headings mean here."""
_ALL = {"all", "total", "gesamt", "global", "overall", "aggregate"}
_FILLING = {"num", "number", "no", "n", "of", "anzahl", "count", "in", "over", *_ALL}
"""Words that say nothing more of a count of nodes or GPUs, or of a rate."""
_RATE = {
    "throughput",
    "samples",
    "per",
    "s",
    "gpus",
    "1",
    "mean",
    "average",
    "avg",
    "measured",
    "training",
    "rate",
    *_FILLING,
}
"""Words that a heading of a rate may have; any other may be another unit."""
_ALIASES = {
    "world_size": "gpus", "mfu": "mfu_percent", "mfu_percent_published": "mfu_percent",
    "mfu_published_percent": "mfu_percent", "mfu_percent_model": "mfu_model_percent",
    "efficiency": "scaling_efficiency_percent", "efficiency_percent": "scaling_efficiency_percent",
    "scaling_efficiency": "scaling_efficiency_percent",
}  # fmt: skip
_UNITS = {"ms": ("_s", 1e-3), "mib": ("_gib", 2**-10), "gb": ("_gib", 1e9 / 2**30)}
"""Units a heading may end in that are not this project's, and the factor."""
_AGGREGATE = re.compile(
    r"(grand )?(totals?|summe?|gesamt|mean|average|avg|mittel(wert)?|median|geomean)\b", re.IGNORECASE
)
_NO_VALUE = ("-", "–", "—", "n/a", "na", "none", "null")


def read_table(path: Path) -> list[Row]:
    """Rows of a table of this project or of `published/`; UserError, saying where, if it isn't as it should be."""
    found = _cells(path)
    if not found:
        raise UserError(f"{path}: a header and no rows")
    there = set(found[0][1])
    known = there | ({"nodes", "gpus"} if "gpus_per_node" in there and there & {"nodes", "gpus"} else set())
    known |= {"samples_per_s_per_gpu"} if "samples_per_s" in there else set()
    if missing := [column for column in COLUMNS[:3] if column not in known]:
        wanted = f"a table begins {','.join(COLUMNS[:3])},…, with rates in samples/s, of one GPU or all"
        near, has = did_you_mean(missing[0], there, most_listed=0), ", ".join(map(repr, found[0][1]))
        raise UserError(f"{path}: no column {', '.join(missing)}{near}; {wanted}; this one has {has}")
    return [_row(path, *cells) for cells in found]


def _row(path: Path, where: str, cells: Mapping[str, str]) -> Row:
    values = {
        column: _value(where, column, text)
        for column, text in cells.items()
        if text and column in (*COLUMNS, "gpus_per_node")
    }
    per_node, nodes, gpus = values.pop("gpus_per_node", 0), values.get("nodes", 0), values.get("gpus", 0)
    if per_node and not (nodes and gpus):
        if gpus % per_node:
            raise UserError(f"{where}: gpus is {gpus}, no multiple of {per_node} GPUs per node")
        values |= {"nodes": nodes or gpus // per_node, "gpus": gpus or nodes * per_node}
    if empty := [column for column in ("nodes", "gpus") if not values.get(column)]:
        raise UserError(f"{where}: {' and '.join(empty)} is empty")
    if facts := PUBLISHED_TABLES.get(path.stem):
        values = {**facts, "global_batch": facts["batch_per_gpu"] * values["gpus"], **values}
    elif "model" not in cells:
        values["model"] = path.stem
    if "samples_per_s" in values and "samples_per_s_per_gpu" not in values:
        values["samples_per_s_per_gpu"] = values["samples_per_s"] / values["gpus"]
    return Row(**values)


def _value(where: str, column: str, text: str) -> Any:
    if column in TEXTS:
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
    series_of: dict[Row, tuple[str, str]] = {}
    runs = []
    for number, row in enumerate(read_table(path)):
        # A scale that serves weak and strong scaling has a row in each; it was measured once. Equal rows of one are repeats.
        measured = replace(row, scaling="", variant=settings_of(row.variant), notes="", scaling_efficiency_percent=None,
                           scaling_efficiency_2sigma_percent=None, speedup=None)  # fmt: skip
        if series_of.setdefault(measured, (row.scaling, row.variant)) != (row.scaling, row.variant):
            continue
        rate, spread, total = row.rate, row.samples_per_s_per_gpu_2sigma, row.samples_per_s
        known: dict[str, Any] = {"time_to_target_s": None, "state": row.state or "completed"}
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


def _cells(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Of each row where it stands, as an error says it, and its texts by column. UserError, saying where, for what is no
    table or has a number that can be read in two ways."""
    rows = list(_rows(path))
    columns = [_column(heading) for heading in rows[0][1]]
    numbers = [
        _digits(cell)
        for _, cells in rows[1:]
        for (column, _), cell in zip(columns, cells, strict=False)
        if column not in TEXTS
    ]
    decimals = {mark for number in numbers for mark in _marks(number) if len(_marks(number)) == 1}
    found = []
    for where, cells in rows[1:]:
        row: dict[str, str] = {}
        for (column, factor), cell in zip(columns, cells, strict=False):
            if column not in TEXTS:
                cell = _plain(f"{where}: {column}", _digits(cell), decimals, column in _WHOLE_COLUMNS)
                with contextlib.suppress(ValueError):
                    cell = cell if factor == 1 else f"{float(cell) * factor:.12g}"
            row[column] = row.get(column) or cell
        found.append((where, row))
    return found


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The headings, and each row that has values and isn't one of totals, each with where it stands."""
    try:
        lines = _decode(path).splitlines()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    if declared := re.fullmatch(r"sep=(.)", first.strip(' "')):  # as Excel writes it
        lines[lines.index(first)] = ""
    delimiter = declared[1] if declared else max(",;\t|", key=first.count)
    reader, header = csv.reader(lines, delimiter=delimiter, skipinitialspace=True), None
    try:
        for row in reader:
            cells, where = [cell.strip() for cell in row], f"{path}, line {reader.line_num}"
            values = [cell for cell in cells if cell]
            if not values or values[0].startswith("#") or cells == header or (header and _AGGREGATE.match(values[0])):
                continue
            header = header or cells
            if any(cells[len(header) :]):
                count = f"{len(cells)} cells under {len(header)} headings"
                raise UserError(f"{where}: {count}; put numbers with a {delimiter!r} in quotes")
            yield where, cells
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV table ({error})") from None
    if header is None:
        raise UserError(f"{path}: empty file")


def _decode(path: Path) -> str:
    """Text by its byte order mark, by the zeros that UTF-16 has between its letters, or else one byte a letter."""
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    for first, encoding in enumerate(("utf-16-be", "utf-16-le")):
        if content[first::2].count(0) > len(content) / 4:
            return content.decode(encoding, errors="replace")
    if b"\0" in content:
        raise UserError(f"{path}: binary file, not a CSV table")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _column(heading: str) -> tuple[str, float]:
    """A heading as this project names columns, and the factor that its values need: "Step time [ms]" is step_time_s, 0.001."""
    plain = "_".join(re.findall(r"\w+", heading.casefold()))
    if plain in COLUMNS:
        return plain, 1.0
    words = [_WORDS.get(word, word) for word in re.findall(r"[^\W_]+|[/%]", heading.casefold())]
    telling = [word for word in words if word not in _FILLING]
    name = "_".join(telling)
    if name in ("nodes", "gpus", "gpus_per_nodes"):
        return name.replace("per_nodes", "per_node"), 1.0
    if "throughput" in words or "samples_per_s" in name:
        of_one = "per_gpus" in name
        is_rate = set(words) <= _RATE and (of_one or "gpus" not in words or not _ALL.isdisjoint(words))
        return ("samples_per_s" + "_per_gpu" * of_one if is_rate else heading), 1.0
    name = re.sub(r"(_percent|_s|_gib|_tflops)\1$", r"\1", "_".join(words))
    name = _ALIASES.get(name, name)
    for unit, (suffix, factor) in _UNITS.items():
        if name.endswith(f"_{unit}"):
            return name.removesuffix(f"_{unit}") + suffix, factor
    return name, 1.0


def _digits(cell: str) -> str:
    """A number without what separates thousands for sure, and without its per cent sign; other text as it is."""
    text = re.sub(r"(?<=\d)[\s'’](?=\d{3}\b)", "", cell.removesuffix("%").strip().replace("−", "-"))
    return text if _marks(text) else "" if cell.casefold() in _NO_VALUE else cell


def _marks(number: str) -> dict[str, str]:
    """A number as Python reads it, by each decimal mark that it can have; empty for what is no number."""
    found = {}
    for decimal, thousands in (".,", ",."):
        if re.fullmatch(rf"[-+]?(\d+|[1-9]\d{{0,2}}(\{thousands}\d{{3}})+)(\{decimal}\d*)?", number):
            found[decimal] = number.replace(thousands, "").replace(decimal, ".")
    return found


def _plain(where: str, number: str, decimals: set[str], is_whole: bool) -> str:
    """The number as Python reads it, given the decimal marks of the whole table; what isn't a number as it is."""
    readings = _marks(number)
    if len(set(readings.values())) < 2:
        return next(iter(readings.values()), number)
    if "," in number and len(decimals) != 1 and not is_whole:
        ways = " and ".join(readings.values())
        raise UserError(f"{where} is {number}, which can be {ways}; write a number without a thousands' comma")
    return readings["," if decimals == {","} else "."]
