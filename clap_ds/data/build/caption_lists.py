"""Audio files with their captions, as people have them: a CSV, a JSONL, or a folder with a caption file beside each audio file.

What can't be used is kept with the reason, so that a build can list it. Audio is not looked at here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError

AUDIO_SUFFIXES = (
    ".wav",
    ".flac",
    ".ogg",
    ".mp3",
    ".opus",
    ".aiff",
    ".aif",
    ".au",
    ".caf",
    ".w64",
    ".m4a",
    ".aac",
    ".wma",
)
AUDIO_COLUMNS = ("path", "audio_path", "file", "filename", "file_name", "audio", "wav", "filepath", "file_path")
_CAPTION_COLUMN = re.compile(r"(caption|text|raw_text|sentence|description)s?[_ ]?\d*", re.IGNORECASE)
_DELIMITERS = ",;\t|"


@dataclass(slots=True)
class Entry:
    """One audio file of a data set.

    Attributes:
        path: of the audio file.
        captions: at least one, unless there is a problem.
        more: everything else that is said of it.
        problem: why it can't be used.
    """

    path: Path
    captions: list[str]
    more: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ListOptions:
    """How to read a list. None: found out.

    Attributes:
        audio_column, caption_columns: of a CSV, or fields of a JSONL.
        delimiter: of a CSV.
        encoding: of the list and of caption files.
        audio_root: folder that the list's paths are relative to; None: the list's.
    """

    audio_column: str | None = None
    caption_columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    audio_root: Path | None = None


def read_entries(source: Path, options: ListOptions) -> list[Entry]:
    """The audio files of a folder, CSV (.csv, .tsv, .txt) or JSONL (.jsonl, .ndjson), each once; rows of the same file are one
    entry with all their captions.

    Raises:
        UserError: the source is missing, empty, of another kind, in another encoding, or lacks a column.
    """
    if source.is_dir():
        entries = list(_read_folder(source, options))
        if not entries:
            raise UserError(f"{source}: no audio files ({', '.join(AUDIO_SUFFIXES)}) in it")
        return entries
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    suffix = source.suffix.lower()
    if suffix not in (".csv", ".tsv", ".txt", ".jsonl", ".ndjson"):
        raise UserError(f"{source}: expected a folder, or a list in .csv, .tsv or .jsonl")
    text = _decode(source, options.encoding)
    rows = list(_jsonl_rows(source, text) if suffix in (".jsonl", ".ndjson") else _csv_rows(source, text, options))
    if not rows:
        raise UserError(f"{source}: no rows in it")
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    audio, captions = _columns(source, names, options)
    root = options.audio_root or source.parent
    return _merge(_entry_of(line, row, root, audio, captions) for line, row in rows)


def _decode(path: Path, encoding: str | None) -> str:
    content = path.read_bytes()
    guessed = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding or guessed)
    except LookupError:
        raise UserError(f"--encoding: Python knows no encoding {encoding!r}") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} isn't {encoding or 'UTF-8'}; name the file's encoding by"
            " --encoding, such as cp1252"
        ) from None


Row = tuple[int, dict[str, Any]]  # with its line


def _csv_rows(source: Path, text: str, options: ListOptions) -> Iterator[Row]:
    header = text.split("\n", 1)[0]
    delimiter = options.delimiter or max(_DELIMITERS, key=header.count)
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    if reader.fieldnames is None:
        raise UserError(f"{source}: empty; expected a line of column names")
    reader.fieldnames = [name.strip() for name in reader.fieldnames]
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if name is not None}


def _jsonl_rows(source: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{source}:{number}: not valid JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise UserError(f"{source}:{number}: expected an object in each line")
            yield number, row


def _columns(source: Path, names: list[str], options: ListOptions) -> tuple[str, list[str]]:
    """The column of paths, and those of captions."""
    audio = options.audio_column or next((name for name in names if name.lower() in AUDIO_COLUMNS), None)
    if audio is None or audio not in names:
        raise UserError(
            f"{source}: no column {audio or 'of audio files'!r}; there are {', '.join(names)}; name it by --audio_column"
        )
    captions = list(options.caption_columns or [name for name in names if _CAPTION_COLUMN.fullmatch(name)])
    missing = [name for name in captions if name not in names]
    if missing or not captions:
        raise UserError(
            f"{source}: no column {missing[0] if missing else 'of captions'!r}; there are {', '.join(names)};"
            " name them by --caption_columns"
        )
    return audio, captions


def _entry_of(line: int, row: dict[str, Any], root: Path, audio: str, captions: list[str]) -> Entry:
    path = row.get(audio)
    if not isinstance(path, str) or not path.strip():
        return Entry(root / f"line {line}", [], problem=f"no path in {audio}")
    more = {name: value for name, value in row.items() if name != audio and name not in captions and value is not None}
    return _checked(Entry(root / path.strip(), _texts(row.get(name) for name in captions), more))


def _texts(values: Iterable[Any]) -> list[str]:
    """The captions in values that are texts or lists of them, without empty ones and repetitions."""
    flat = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(text.strip() for text in flat if isinstance(text, str) and text.strip()))


def _checked(entry: Entry) -> Entry:
    if not entry.captions and entry.problem is None:
        entry.problem = "empty caption"
    return entry


def _merge(entries: Iterable[Entry]) -> list[Entry]:
    merged: dict[Path, Entry] = {}
    for entry in entries:
        first = merged.setdefault(entry.path, entry)
        if first is not entry:
            first.captions = list(dict.fromkeys([*first.captions, *entry.captions]))
            first.problem = None if first.captions else first.problem
    return list(merged.values())


def _read_folder(folder: Path, options: ListOptions) -> Iterator[Entry]:
    """Audio files with a .txt (a caption in each line) or .json (field caption or text) of the same name."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in AUDIO_SUFFIXES or not path.is_file():
            continue
        text, description = path.with_suffix(".txt"), path.with_suffix(".json")
        try:
            if text.is_file():
                yield _checked(Entry(path, _texts(_decode(text, options.encoding).splitlines())))
            elif description.is_file():
                yield _checked(_described(path, json.loads(_decode(description, options.encoding)), options))
            else:
                yield Entry(path, [], problem=f"no caption file ({text.name} or {description.name}) beside it")
        except (json.JSONDecodeError, UserError) as error:
            yield Entry(path, [], problem=f"its caption file can't be read: {error}")


def _described(path: Path, content: Any, options: ListOptions) -> Entry:
    if not isinstance(content, dict):
        return Entry(path, [], problem="its json is no object")
    columns = options.caption_columns or [name for name in content if _CAPTION_COLUMN.fullmatch(name)]
    more = {name: value for name, value in content.items() if name not in columns}
    return Entry(path, _texts(content.get(name) for name in columns), more)
