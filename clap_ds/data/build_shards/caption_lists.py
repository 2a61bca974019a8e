"""Read the captions of audio files from a list or a folder.

A list becomes rows, `rows_of`, and each row an `Entry`: the path by the audio column or template,
captions by the caption columns, and all other columns as metadata. Rows of the same file are
merged.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from clap_ds.utils.errors import UserError, did_you_mean
from clap_ds.utils.files import (
    LONGEST_LINE,
    leads_outside,
    parse_json,
    read_bytes,
    read_object,
    refuse_duplicates,
)

_AUDIO_FORMATS = (
    "wav flac ogg oga mp3 mp2 opus aiff aif aifc au caf w64 m4a aac wma mp4 webm mka spx"
)
AUDIO_SUFFIXES = tuple(f".{name}" for name in _AUDIO_FORMATS.split())
LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
_PATH_COLUMNS = "path audio_path file filename file_name audio filepath file_path"
AUDIO_COLUMNS = tuple(_PATH_COLUMNS.split())
_CAPTION_COLUMN = re.compile(
    r"(caption|text|raw_text|sentence|description)s?[_ .]?\d*", re.IGNORECASE
)

MAX_FILE_BYTES = 2**30
"""Of a list or an audio file."""

Row = dict[str, Any]


@dataclass(slots=True)
class Entry:
    """An audio file: its captions, other metadata and, if unusable, why."""

    path: Path
    captions: list[str]
    more: Row = field(default_factory=dict)
    problem: str = ""
    # bytes, if the file was checked
    size: int = 0
    # of audio, if the file was checked and can be decoded
    seconds: float = 0.0

    def add(self, duplicates: Sequence[Entry]) -> None:
        """Merge the captions and metadata of other entries of the same sound, which may be many."""
        # A dictionary is a set that keeps its order.
        captions: dict[str, None] = {}
        # Each column's values by their JSON, because lists and objects can't be keys.
        columns: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry in (self, *duplicates):
            captions |= dict.fromkeys(entry.captions)
            for name in entry.more:
                columns[name] |= {json.dumps(value): value for value in values_of(entry.more, name)}
        self.captions = list(captions)
        for name, distinct in columns.items():
            values = list(distinct.values())
            # Unchanged columns keep their type, such as a list of one label.
            if len(values) > len(values_of(self.more, name)):
                self.more[name] = values if len(values) > 1 else values[0]


def values_of(row: Row, name: str) -> list[Any]:
    """Return a column's values: none, one, or several if merged rows differ."""
    value = row.get(name)
    if isinstance(value, list):
        return value
    return [] if value is None or value == "" else [value]


def add_columns(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("how to read a list (default: detected)").add_argument
    add(
        "--audio_column",
        metavar="NAME",
        help="read paths from this column, or a template such as '{id}_{start}.wav'",
    )
    add(
        "--caption_columns",
        nargs="+",
        metavar="NAME",
        help="read captions or class names from these columns",
    )
    add(
        "--multilabel_column",
        nargs="+",
        default=[],
        metavar="NAME",
        help=(
            "split these columns of several names, separated by commas, semicolons or "
            "bars, such as FSD50K's labels"
        ),
    )
    add(
        "--audio_root",
        type=Path,
        metavar="FOLDER",
        help="set the folder of relative paths (default: the list's)",
    )
    add(
        "--follow_links",
        action="store_true",
        help=(
            "follow links and '..' that lead out of that folder, or out of the folder "
            "SOURCE: their targets are packed, too"
        ),
    )


def read_entries(source: Path, options: Namespace) -> list[Entry]:
    """Read the entries of a folder or list by the command's `options`, merging rows of the same
    file."""
    # Absolute, because lists write the path of one file in several ways.
    read = _read_folder if source.is_dir() else _read_list
    entries = merge((os.path.abspath(entry.path), entry) for entry in read(source, options))
    for entry in entries:
        if not entry.captions and not entry.problem:
            entry.problem = "empty caption"
    return entries


def merge(named: Iterable[tuple[str, Entry]]) -> list[Entry]:
    """Merge entries of equal names into the first."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for name, entry in named:
        groups[name].append(entry)
    for entry, *duplicates in groups.values():
        if duplicates:
            entry.add(duplicates)
    return [group[0] for group in groups.values()]


def read_paths(source: Path) -> list[Path]:
    """Read audio paths from the lines of a .txt, or from a list's column of `AUDIO_COLUMNS`."""
    if source.suffix.lower() == ".txt":
        paths = [line.strip() for line in _read_text(source).split("\n")]
    else:
        rows, names = rows_of(source)
        column = _default_audio_column(names)
        if not column:
            raise UserError(
                f"{source}: no column named {', '.join(AUDIO_COLUMNS)}; there are "
                f"{', '.join(names)}"
            )
        paths = [path_in(row, column) for _, row in rows]
    return [source.parent / path for path in paths if path]


def rows_of(source: Path) -> tuple[list[tuple[int, Row]], list[str]]:
    """Read a list's rows, each with the number of its first line (in a JSON array, its own), and
    its column names."""
    suffix = source.suffix.lower()
    if suffix not in LIST_SUFFIXES:
        raise UserError(f"{source}: expected a folder, or a list in {', '.join(LIST_SUFFIXES)}")
    # WavCaps and the Hub name lists of both layouts .json.
    read_rows = _json_rows if suffix.startswith(".json") else _csv_rows
    rows = list(read_rows(source, _read_text(source)))
    if not rows:
        raise UserError(f"{source}: no rows found")
    names: dict[str, Any] = {}
    for _, row in rows:
        names |= row
    return rows, list(names)


def _read_text(source: Path) -> str:
    try:
        return read_bytes(source, MAX_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{source} can't be read: {error}; expected a list in UTF-8") from None


def _default_audio_column(names: Iterable[str]) -> str:
    """Return the first column of paths, or "" for none."""
    return next((name for name in names if name.lower().replace(" ", "_") in AUDIO_COLUMNS), "")


def _read_list(source: Path, options: Namespace) -> Iterator[Entry]:
    rows, names = rows_of(source)
    audio_column = _find_audio_column(source, names, options)
    folder = options.audio_root or source.parent
    for line, row in rows:
        path = path_in(row, audio_column)
        if not path:
            raise UserError(f"{source}:{line}: no path in {audio_column}")
        problem = ""
        # Absolute paths are in plain sight, and many published lists have them.
        if not Path(path).is_absolute():
            problem = _describe_outside(folder / path, folder, options)
        row = {name: row[name] for name in row if row[name] is not None and name != audio_column}
        # Rows of JSON may have different fields.
        caption_columns = options.caption_columns or find_caption_columns(row)
        captions, metadata = _split_row(row, caption_columns, options.multilabel_column)
        yield Entry(folder / path, captions, metadata, problem)


def _describe_outside(path: Path, folder: Path, options: Namespace) -> str:
    """Return why a file may not be packed: it is elsewhere, such as a private file of whoever
    builds the shards. Else empty."""
    if options.follow_links or "\0" in str(path) or not leads_outside(path, folder):
        return ""
    return (
        f"{path.name} leads out of {folder} by a link or '..': if you trust that, pass "
        "--follow_links"
    )


def _jsonl_rows(source: Path, text: str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, dict(parse_json(line, refuse_duplicates, allow_nan=True))
            except (ValueError, TypeError) as error:
                raise UserError(f"{source}:{number}: expected a JSON object: {error}") from None


def _json_rows(source: Path, text: str) -> Iterable[tuple[int, Row]]:
    """Read an object per line, or an array of objects: alone, or as the field `data` of WavCaps'
    lists."""
    try:
        content = parse_json(text, refuse_duplicates, allow_nan=True)
        # A single object is a list of one row.
        if isinstance(content, dict):
            content = content.get("data", [content])
        return enumerate([dict(row) for row in content], start=1)
    except (ValueError, TypeError) as error:
        # Else several objects in a row, which aren't one JSON text.
        if text.lstrip().startswith("["):
            raise UserError(f"{source}: expected a JSON array of objects: {error}") from None
        return _jsonl_rows(source, text)


def _csv_rows(source: Path, text: str) -> Iterator[tuple[int, Row]]:
    """Read rows separated by the most frequent of commas, tabs and semicolons in the heading."""
    csv.field_size_limit(LONGEST_LINE)
    lines = io.StringIO(text, newline="").readlines()
    # Excel's own line, which names the separator.
    if lines and lines[0].startswith("sep="):
        lines[0] = "\n"
    # Quoted headings may contain separators.
    heading = next(filter(str.strip, lines), "")
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", heading).count)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: list[str] = []
    # the row's first
    line = 1
    try:
        for cells in reader:
            if not names:
                # empty for blank lines
                names = _parse_headings(source, cells)
            # A row of blank cells, as spreadsheets export it, is none.
            elif any(cells):
                yield line, _parse_row(f"{source}:{line}", names, cells)
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{source}:{line}: quotes of a field don't match: {error}, line {reader.line_num}"
        ) from None


def _parse_headings(source: Path, cells: list[str]) -> list[str]:
    counts = Counter("".join(cell.split()).lower() for cell in cells)
    # Several columns may have no name.
    del counts[""]
    for name, count in counts.items():
        if count > 1:
            raise UserError(
                f"{source}: several columns are named {name!r}; expected one, and others "
                f"as {name}_2"
            )
    return [cell.strip() for cell in cells]


def _parse_row(where: str, names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        raise UserError(
            f"{where}: expected {len(names)} fields ({', '.join(names)}), found {len(cells)}"
        )
    row = {}
    for name, cell in zip(names, cells, strict=True):
        if name:
            row[name] = cell
        # Whole numbers are an index, as pandas writes it.
        elif cell and not cell.isdecimal():
            raise UserError(f"{where}: {cell!r} is in a column without a heading")
    return row


def _find_audio_column(source: Path, names: list[str], options: Namespace) -> str:
    """Return the column or template of paths. Raises UserError for a missing column."""
    audio_column: str = options.audio_column or _default_audio_column(names)
    caption_columns = options.caption_columns or find_caption_columns(names) or ["caption"]
    required = {
        "--audio_column": _columns_in(audio_column) or [audio_column or "path"],
        "--multilabel_column": options.multilabel_column,
        "--caption_columns": caption_columns,
    }
    for option, columns in required.items():
        for name in columns:
            if name not in names:
                raise UserError(
                    f"{source}: no column {name!r}; set {option}{did_you_mean(name, names)}"
                )
    return audio_column


def find_caption_columns(names: Iterable[str]) -> list[str]:
    """Return the columns named caption, caption_1, …, or without any those named text, description
    and the like."""
    columns = list(filter(_CAPTION_COLUMN.fullmatch, names))
    return [name for name in columns if name.lower().startswith("caption")] or columns


def _columns_in(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError as error:
        raise UserError(
            f"--audio_column {template!r}: expected columns in braces: {error}"
        ) from None


def path_in(row: Row, audio_column: str) -> str:
    """Return a row's path in a column, or by a template of columns."""
    # Missing fields of a template are empty.
    if "{" in audio_column:
        path: Any = audio_column.format_map(defaultdict(str, row))
    else:
        path = row.get(audio_column)
    return path.strip() if isinstance(path, str) else ""


def _split_row(
    row: Row, caption_columns: Iterable[str], multilabel_columns: Iterable[str]
) -> tuple[list[str], Row]:
    """Split a row into captions and metadata; class columns are both."""
    for name in multilabel_columns:
        cell = row.get(name)
        if isinstance(cell, str):
            row[name] = [label.strip() for label in re.split("[,;|]", cell) if label.strip()]
    texts: list[Any] = []
    for name in caption_columns:
        texts += values_of(row, name)
    captions = dict.fromkeys(in_words(text) for text in texts if isinstance(text, str))
    captions.pop("", None)
    # A set, because a JSON row may have a million fields.
    pure_captions = {name for name in caption_columns if _CAPTION_COLUMN.fullmatch(name)}
    metadata = {name: value for name, value in row.items() if name not in pure_captions}
    return list(captions), metadata


def in_words(name: str) -> str:
    """Convert a class name to caption words: `low_hum` becomes "low hum". Text with spaces is
    unchanged."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def audio_files_in(folder: Path) -> list[Path]:
    """List a folder's audio files recursively, sorted. Raises UserError for none, and OSError."""

    # os.walk skips folders that it can't read.
    def refuse(error: OSError) -> None:
        raise error

    paths = []
    try:
        for directory, _, names in os.walk(folder, onerror=refuse):
            files = [Path(directory, name) for name in names]
            paths += [path for path in files if path.suffix.lower() in AUDIO_SUFFIXES]
    except RecursionError:
        raise UserError(f"{folder}: folders are nested too deeply") from None
    if not paths:
        raise UserError(f"{folder}: no audio files ({', '.join(AUDIO_SUFFIXES)}) found")
    return sorted(paths)


def _read_folder(folder: Path, options: Namespace) -> Iterator[Entry]:
    """Read audio files with a .txt (one caption per line) or .json (field caption or text) of the
    same name."""
    for path in audio_files_in(folder):
        text_file = path.with_suffix(".txt")
        json_file = path.with_suffix(".json")
        try:
            for file in (path, text_file, json_file):
                if problem := _describe_outside(file, folder, options):
                    raise ValueError(problem)
            if text_file.is_file():
                row: Row = {"caption": read_bytes(text_file).decode("utf-8-sig").splitlines()}
            elif json_file.is_file():
                row = read_object(json_file, allow_nan=True)
            else:
                raise ValueError(f"expected {text_file.name} or {json_file.name} next to it")
            caption_columns = options.caption_columns or find_caption_columns(row)
            captions, metadata = _split_row(row, caption_columns, options.multilabel_column)
            yield Entry(path, captions, metadata)
        except (ValueError, OSError) as error:
            yield Entry(path, [], problem=f"captions can't be read: {error}")
