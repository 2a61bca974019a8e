"""Read the captions of audio files from a list or a folder."""

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

AUDIO_SUFFIXES = tuple(
    f".{name}"
    for name in "wav flac ogg oga mp3 mp2 opus aiff aif aifc au caf w64 m4a aac wma mp4 webm mka spx".split()  # noqa: SIM905
)
LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
AUDIO_COLUMNS = (
    "path",
    "audio_path",
    "file",
    "filename",
    "file_name",
    "audio",
    "filepath",
    "file_path",
)
_CAPTION_COLUMN = re.compile(
    r"(caption|text|raw_text|sentence|description)s?[_ .]?\d*", re.IGNORECASE
)

MOST_OF_A_FILE = 2**30
"""Bytes of a list or an audio file."""

Row = dict[str, Any]


@dataclass(slots=True)
class Entry:
    """Describe an audio file: its captions, other metadata and, if unusable, why."""

    path: Path
    captions: list[str]
    more: Row = field(default_factory=dict)
    problem: str = ""
    size: int = 0  # bytes, if the file was checked

    def add(self, others: Sequence[Entry]) -> None:
        """Merge the captions and metadata of other entries of the same sound, which may be many."""
        entries = [self, *others]
        self.captions = list(
            dict.fromkeys(caption for entry in entries for caption in entry.captions)
        )
        columns: dict[str, dict[str, Any]] = defaultdict(dict)  # values by their JSON
        for entry in entries:
            for name in entry.more:
                columns[name] |= {json.dumps(value): value for value in values_of(entry.more, name)}
        for name, values in columns.items():
            if len(values) > len(values_of(self.more, name)):
                self.more[name] = (
                    [*values.values()] if len(values) > 1 else next(iter(values.values()))
                )


def values_of(row: Row, name: str) -> list[Any]:
    """Return a column's values: none, one, or several if merged rows differ."""
    value = row.get(name)
    return value if isinstance(value, list) else [] if value is None or value == "" else [value]


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
    more = "split these columns of several names, separated by commas, semicolons or bars, such as FSD50K's labels"
    add("--multilabel_column", nargs="+", default=[], metavar="NAME", help=more)
    add(
        "--audio_root",
        type=Path,
        metavar="FOLDER",
        help="set the folder of relative paths (default: the list's)",
    )
    more = "follow links and '..' that lead out of that folder, or out of the folder SOURCE: their targets are packed, too"
    add("--follow_links", action="store_true", help=more)


def read_entries(source: Path, options: Namespace) -> list[Entry]:
    """Read the entries of a folder or list by the command's `options`, merging rows of the same
    file."""
    read = _read_folder if source.is_dir() else _read_list
    entries = merge((os.path.abspath(entry.path), entry) for entry in read(source, options))
    for entry in entries:
        if not entry.captions:
            entry.problem = entry.problem or "empty caption"
    return entries


def merge(named: Iterable[tuple[str, Entry]]) -> list[Entry]:
    """Merge entries of equal names into the first."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for name, entry in named:
        groups[name].append(entry)
    for first, *others in groups.values():
        if others:
            first.add(others)
    return [first for first, *_ in groups.values()]


def read_paths(source: Path) -> list[Path]:
    """Read audio paths from the lines of a .txt, or from a list's column of `AUDIO_COLUMNS`."""
    if source.suffix.lower() == ".txt":
        paths = _text_of(source).split("\n")
    else:
        rows, names = rows_of(source)
        audio = next(filter(is_of_audio, names), None)
        if audio is None:
            raise UserError(
                f"{source}: no column named {', '.join(AUDIO_COLUMNS)}; there are {', '.join(names)}"
            )
        paths = [path_in(row, audio) for _, row in rows]
    return [source.parent / path.strip() for path in paths if path.strip()]


def rows_of(source: Path) -> tuple[list[tuple[int, Row]], list[str]]:
    """Read a list's rows, each with the number of its first line (in a JSON array, its own), and
    its column names."""
    suffix = source.suffix.lower()
    if suffix not in LIST_SUFFIXES:
        raise UserError(f"{source}: expected a folder, or a list in {', '.join(LIST_SUFFIXES)}")
    rows = list((_json_rows if suffix.startswith(".json") else _csv_rows)(source, _text_of(source)))
    if not rows:
        raise UserError(f"{source}: no rows found")
    return rows, list(dict.fromkeys(name for _, row in rows for name in row))


def _text_of(source: Path) -> str:
    try:
        return read_bytes(source, MOST_OF_A_FILE).decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{source} can't be read: {error}; expected a list in UTF-8") from None


def is_of_audio(column: str) -> bool:
    return column.lower().replace(" ", "_") in AUDIO_COLUMNS


def _read_list(source: Path, options: Namespace) -> Iterator[Entry]:
    rows, names = rows_of(source)
    audio = _find_audio_column(source, names, options)
    folder = options.audio_root or source.parent
    for line, row in rows:
        if not (path := path_in(row, audio)):
            raise UserError(f"{source}:{line}: no path in {audio}")
        # Absolute paths are in plain sight, and many published lists have them.
        problem = "" if Path(path).is_absolute() else _outside(folder / path, folder, options)
        more = {name: value for name, value in row.items() if value is not None and name != audio}
        captions = options.caption_columns or find_caption_columns(
            more
        )  # rows of JSON may have other fields
        texts, others = _divided(more, captions, options.multilabel_column)
        yield Entry(folder / path, texts, others, problem)


def _outside(path: Path, folder: Path, options: Namespace) -> str:
    """Return why a file may not be packed: it is elsewhere, such as a private file of whoever
    builds the shards. Else empty."""
    if options.follow_links or "\0" in str(path) or not leads_outside(path, folder):
        return ""
    return f"{path.name} leads out of {folder} by a link or '..': if you trust that, pass --follow_links"


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
        if isinstance(content, dict):
            content = content.get("data", [content])
        return enumerate([dict(row) for row in content], start=1)
    except (ValueError, TypeError) as error:
        if text.lstrip().startswith("["):
            raise UserError(f"{source}: expected a JSON array of objects: {error}") from None
        return _jsonl_rows(source, text)


def _csv_rows(source: Path, text: str) -> Iterator[tuple[int, Row]]:
    """Read rows separated by the most frequent of commas, tabs and semicolons in the first line."""
    csv.field_size_limit(LONGEST_LINE)
    lines = io.StringIO(text, newline="").readlines()
    if lines and lines[0].startswith("sep="):  # Excel's own
        lines[0] = "\n"
    header = next(filter(str.strip, lines), "")
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", header).count)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: list[str] = []
    line = 1  # the row's first
    try:
        for cells in reader:
            if not names:
                names = _headings(source, cells)  # empty for blank lines
            elif any(cells):
                yield line, _row_of(f"{source}:{line}", names, cells)
            line = reader.line_num + 1
    except csv.Error as error:
        complete = rf' *+(?:"(?:[^"]|"")*+"|[^ "{delimiter}\r\n][^{delimiter}\r\n]*+)?{delimiter}'
        from_wrong_field = re.sub(rf"\A(?:{complete})*+", "", "".join(lines[line - 1 :]))
        line = len(lines) + 1 - len(io.StringIO(from_wrong_field, newline="").readlines())
        raise UserError(
            f"{source}:{line}: quotes of a field don't match: {error}, line {reader.line_num}"
        ) from None


def _headings(source: Path, cells: list[str]) -> list[str]:
    plain = ["".join(cell.split()).lower() for cell in cells]
    name, count = Counter(filter(None, plain)).most_common(1)[0] if any(plain) else ("", 0)
    if count > 1:
        raise UserError(
            f"{source}: several columns are named {name!r}; expected one, and others as {name}_2"
        )
    return [cell.strip() for cell in cells]


def _row_of(place: str, names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        raise UserError(
            f"{place}: expected {len(names)} fields ({', '.join(names)}), found {len(cells)}"
        )
    row = defaultdict[str, str](str)
    for name, cell in zip(names, cells, strict=True):
        row[name] += cell  # several columns may have no name
    unnamed = row.pop("", "")
    if unnamed and not unnamed.isdecimal():  # an index, as pandas writes it
        raise UserError(f"{place}: {unnamed!r} is in a column without a heading")
    return row


def _find_audio_column(source: Path, names: list[str], options: Namespace) -> str:
    """Return the column or template of paths. Raises UserError for a missing column."""
    audio = options.audio_column or next(filter(is_of_audio, names), "")
    for option, columns in (
        ("--audio_column", _columns_in(audio) or [audio or "path"]),
        ("--multilabel_column", options.multilabel_column),
        (
            "--caption_columns",
            options.caption_columns or find_caption_columns(names) or ["caption"],
        ),
    ):
        if missing := [name for name in columns if name not in names]:
            raise UserError(
                f"{source}: no column {missing[0]!r}; set {option}{did_you_mean(missing[0], names)}"
            )
    return audio


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


def path_in(row: Row, audio: str) -> str:
    """Return a row's path in a column, or by a template of columns."""
    path = audio.format_map(defaultdict(str, row)) if "{" in audio else row.get(audio)
    return path.strip() if isinstance(path, str) else ""


def _divided(row: Row, columns: Sequence[str], lists: Iterable[str]) -> tuple[list[str], Row]:
    """Split a row into captions and metadata; class columns are both. Text in columns of `lists` is
    split into a list."""
    for name in row.keys() & set(lists):
        if isinstance(cell := row[name], str):
            row[name] = [part.strip() for part in re.split("[,;|]", cell) if part.strip()]
    texts = [text for name in columns for text in values_of(row, name) if isinstance(text, str)]
    known = {*columns}  # a list of others may have a million
    more = {
        name: value
        for name, value in row.items()
        if name not in known or not _CAPTION_COLUMN.fullmatch(name)
    }
    return list(dict.fromkeys(filter(None, map(in_words, texts)))), more


def in_words(name: str) -> str:
    """Convert a class name to caption words: `low_hum` becomes "low hum". Text with spaces is
    unchanged."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def audio_files_in(folder: Path) -> list[Path]:
    """List a folder's audio files recursively, sorted. Raises UserError for none, and OSError."""

    def refuse(error: OSError) -> None:
        raise error

    found = (Path(at, name) for at, _, names in os.walk(folder, onerror=refuse) for name in names)
    try:
        paths = sorted(path for path in found if path.suffix.lower() in AUDIO_SUFFIXES)
    except RecursionError:
        raise UserError(f"{folder}: folders are nested too deeply") from None
    if not paths:
        raise UserError(f"{folder}: no audio files ({', '.join(AUDIO_SUFFIXES)}) found")
    return paths


def _read_folder(folder: Path, options: Namespace) -> Iterator[Entry]:
    """Read audio files with a .txt (one caption per line) or .json (field caption or text) of the
    same name."""
    for path in audio_files_in(folder):
        text, described = (path.with_suffix(suffix) for suffix in (".txt", ".json"))
        try:
            for file in (path, text, described):
                if problem := _outside(file, folder, options):
                    raise ValueError(problem)
            if text.is_file():
                row: Row = {"caption": read_bytes(text).decode("utf-8-sig").splitlines()}
            elif described.is_file():
                row = read_object(described, allow_nan=True)
            else:
                raise ValueError(f"expected {text.name} or {described.name} next to it")
            columns = options.caption_columns or find_caption_columns(row)
            yield Entry(path, *_divided(row, columns, options.multilabel_column))
        except (ValueError, OSError) as error:
            yield Entry(path, [], problem=f"captions can't be read: {error}")
