"""A CSV file as people have it → cells under this project's column names, their numbers as Python reads them.

Commas, semicolons, tabs or bars; UTF-8, UTF-16 or a Western European code page; headers with spaces, capitals and units;
blank rows and rows of totals; decimal points or commas, thousands' separators, per cent signs. What can be meant in two ways
is refused, never guessed.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from clap_ds.config.errors import UserError

_ALIASES = {
    "node": "nodes", "nnodes": "nodes", "hosts": "nodes", "gpu": "gpus", "ngpus": "gpus", "ranks": "gpus", "world_size": "gpus",
    "devices": "gpus", "gpus_per_nodes": "gpus_per_node", "mfu": "mfu_percent", "mfu_percent_published": "mfu_percent",
    "mfu_published_percent": "mfu_percent", "mfu_percent_model": "mfu_model_percent",
    "efficiency": "scaling_efficiency_percent", "efficiency_percent": "scaling_efficiency_percent",
    "scaling_efficiency": "scaling_efficiency_percent", "preset": "model",
}  # fmt: skip
"""Beside these, words for a count are left out (`_COUNT`), and any rate is told by its words (`_rate`)."""
_COUNT = re.compile(r"^(num|number_of|no_of|n|anzahl|total)_(?=\w*(node|gpu|rank|host|device))|_(count|anzahl|total)$")
_RATE = re.compile(r"(?<![a-z])([km]?)_?(?:samples|clips)_per_(s|min|h)(?![a-z])")
_RATE_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "s": 1.0, "min": 1 / 60, "h": 1 / 3600}
_RATE_WORDS = {"throughput", "total", "all", "in", "of", "over", "global", "overall", "aggregate", "gpus", "ranks", "devices",
               "mean", "average", "avg", "measured", "training", "rate", "1", "per", "s"}  # fmt: skip
"""What a heading of a rate may say beside its unit; anything else may be another unit."""
_GERMAN = {"je": "per", "pro": "per", "knoten": "nodes", "knotenzahl": "nodes", "effizienz": "efficiency", "modell": "model",
           "proben": "samples", "beispiele": "samples", "durchsatz": "throughput", "gesamt": "total"}  # fmt: skip
_OF_ONE = re.compile(r"per_(gpu|rank|device)(?![a-z])")
_UNITS = {"ms": ("_s", 1e-3), "mib": ("_gib", 2**-10), "gb": ("_gib", 1e9 / 2**30)}
"""Units a header may end in that are not this project's, and the factor."""
_AGGREGATE = re.compile(r"(grand )?(totals?|sum|mean|average|avg|median|geomean)\b", re.IGNORECASE)
_NO_VALUE = ("-", "–", "—", "n/a", "na", "none", "null")


@dataclass(frozen=True)
class Cells:
    """A row: texts by column, and where it stands, as an error says it."""

    where: str
    texts: dict[str, str]


def read_cells(
    path: Path, known: Collection[str], text_columns: Collection[str], whole_columns: Collection[str]
) -> list[Cells]:
    """The rows of a table. UserError, saying where, for what is no table or has a number that can be read in two ways.

    Args:
        known: names of columns that are taken as they stand.
        text_columns: those that don't hold numbers.
        whole_columns: those that hold whole numbers, so that a comma in them is no decimal one.
    """
    try:
        text = _decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    if text is None:
        raise UserError(f"{path}: binary file, not a CSV table")
    if not text.strip():
        raise UserError(f"{path}: empty file")
    try:
        names, rows = _rows(path, text)
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV table ({error})") from None
    factors = [_unit(name, known) for name in names]
    columns = [name for name, _ in factors]
    as_texts = [column in text_columns for column in columns]
    cells = [cell for _, row in rows for cell, is_text in zip(row, as_texts, strict=False) if not is_text]
    readings = [_readings(_digits(cell)) for cell in cells]
    decimals = {mark for ways in readings for mark in ways if len(ways) == 1}
    found = []
    for line, row in rows:
        where = f"{path}, line {line}"
        texts: dict[str, str] = {}
        for (column, factor), cell in zip(factors, row, strict=False):
            if column not in text_columns:
                cell = _plain(f"{where}: {column}", _digits(cell), decimals, column in whole_columns)
                if factor != 1:
                    with contextlib.suppress(ValueError):
                        cell = f"{float(cell) * factor:.12g}"
            texts[column] = texts.get(column) or cell
        found.append(Cells(where, texts))
    return found


def _decode(content: bytes) -> str | None:
    """Text by its byte order mark, by the zeros that UTF-16 has between its letters, or else one byte a letter."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    for first, encoding in enumerate(("utf-16-be", "utf-16-le")):
        if content[first::2].count(0) > len(content) / 4:
            return content.decode(encoding, errors="replace")
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _rows(path: Path, text: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Names of the columns, and each row that has values with its line's number."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    if declared := re.fullmatch(r"sep=(.)", first.strip('\r\n "')):  # as Excel writes it
        lines[lines.index(first)] = ""
    delimiter = declared[1] if declared else max(",;\t|", key=first.count)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    header: list[str] | None = None
    rows = []
    for cells in reader:
        cells = [cell.strip() for cell in cells]
        values = [cell for cell in cells if cell]
        if not values or values[0].startswith("#"):
            continue
        if header is None:
            header = cells
        elif cells != header and not _AGGREGATE.match(values[0]):
            if any(cells[len(header) :]):
                expected = (
                    f"{len(cells)} cells under {len(header)} headings; put numbers with a {delimiter!r} in quotes"
                )
                raise UserError(f"{path}, line {reader.line_num}: {expected}")
            rows.append((reader.line_num, cells))
    return header or [], rows


def _unit(heading: str, known: Collection[str] = ()) -> tuple[str, float]:
    """A heading as this project names columns, and the factor that its values need: "Step time [ms]" is step_time_s, 0.001."""
    text = heading.casefold().replace("%", " percent ").replace("/", " per ").replace("#", " number of ")
    name = re.sub(r"\W+", "_", text).strip("_")
    name = re.sub(r"_per_(s|min|h)(ec|econd|ute|our)?(?![a-z])", r"_per_\1", name)
    name = re.sub(r"(_percent|_s|_gib|_tflops)\1$", r"\1", name).removesuffix("_1_per_s")
    name = "_".join(_GERMAN.get(word, word) for word in name.split("_"))
    if name in known:
        return name, 1.0
    if "throughput" in name or _RATE.search(name):
        return _rate(name) or (heading, 1.0)
    name = _COUNT.sub("", name)
    name, factor = _ALIASES.get(name, name), 1.0
    for unit, (suffix, scale) in _UNITS.items():
        if name.endswith(f"_{unit}"):
            name, factor = name.removesuffix(f"_{unit}") + suffix, scale
    return name, factor


def _rate(name: str) -> tuple[str, float] | None:
    """The column and factor of a heading's rate, samples/s where it names no unit; None where a word may be another unit."""
    found = _RATE.search(name)
    rest = _OF_ONE.sub("", _RATE.sub("", name))
    if not set(filter(None, rest.split("_"))) <= _RATE_WORDS:
        return None
    factor = math.prod(_RATE_FACTORS[part] for part in found.groups()) if found else 1.0
    return "samples_per_s" + "_per_gpu" * bool(_OF_ONE.search(name)), factor


def nearest(names: Collection[str], wanted: Collection[str]) -> str:
    """`; did you mean nodes by 'knotten'?`, of column names that are none of the known ones, and which of them may be a rate in
    another unit; empty where there is neither."""
    german = {word: _ALIASES.get(name, name) for word, name in _GERMAN.items()}
    meant = {**{name: name for name in wanted}, **german, **_ALIASES}
    near = {name: meant[close[0]] for name in names if (close := difflib.get_close_matches(name, meant, n=1))}
    found = [f"{column} by {name!r}" for name, column in near.items() if column in wanted]
    units = [
        repr(name) for name in names if re.search("throughput|durchsatz|(samples|clips) *(/|per)", name, re.IGNORECASE)
    ]
    return (f"; did you mean {' and '.join(found)}?" if found else "") + (
        f"; {', '.join(units)} is not in samples per s, min or h, of one GPU or all" if units else ""
    )


def _digits(cell: str) -> str:
    """A number without what separates thousands for sure, and without its per cent sign; other text as it is."""
    text = re.sub(r"(?<=\d)[\s'’](?=\d{3}\b)", "", cell.removesuffix("%").strip().replace("−", "-"))
    return text if _readings(text) else "" if cell.casefold() in _NO_VALUE else cell.strip()


def _readings(number: str) -> dict[str, str]:
    """A number as Python reads it, by each decimal mark that it can have; empty for what is no number."""
    found = {}
    for decimal, thousands in (".,", ",."):
        if re.fullmatch(rf"[-+]?(\d+|[1-9]\d{{0,2}}(\{thousands}\d{{3}})+)(\{decimal}\d*)?", number):
            found[decimal] = number.replace(thousands, "").replace(decimal, ".")
    return found


def _plain(where: str, number: str, decimals: set[str], is_whole: bool) -> str:
    """The number as Python reads it, given the decimal marks of the whole table; what isn't a number as it is."""
    readings = _readings(number)
    if len(set(readings.values())) < 2:
        return next(iter(readings.values()), number)
    if "," in number and len(decimals) != 1 and not is_whole:
        ways = " and ".join(readings.values())
        raise UserError(f"{where} is {number}, which can be {ways}; write a number without a thousands' comma")
    return readings["," if decimals == {","} else "."]
