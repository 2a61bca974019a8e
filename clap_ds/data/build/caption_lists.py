"""Audio files with their captions, as people have them: a CSV, a JSONL, or a folder with a caption file beside each audio file.

What can't be used is kept with the reason, so that a build can list it. Audio is not looked at here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError

AUDIO_SUFFIXES = tuple(f".{name}" for name in "wav flac ogg mp3 opus aiff aif au caf w64 m4a aac wma".split())  # noqa: SIM905
AUDIO_COLUMNS = ("path", "audio_path", "file", "filename", "file_name", "audio", "wav", "filepath", "file_path")
_CAPTION_COLUMN = re.compile(r"(caption|text|raw_text|sentence|description)s?[_ ]?\d*", re.IGNORECASE)
_DELIMITERS = ",;\t|"

Row = dict[str, Any]


@dataclass(slots=True)
class Entry:
    """One audio file of a data set: its captions, everything else that is said of it, and why it can't be used, if so."""

    path: Path
    captions: list[str]
    more: Row = field(default_factory=dict)
    problem: str | None = None

    def __post_init__(self) -> None:
        if not self.captions and self.problem is None:
            self.problem = "empty caption"


def read_entries(source: Path, options: Namespace) -> list[Entry]:
    """The audio files of a folder, CSV (.csv, .tsv, .txt) or JSONL (.jsonl, .ndjson), each once; rows of the same file are one
    entry with all their captions.

    `options` say how to read them, as in the command's help (`audio_column`, `caption_columns`, `delimiter`, `encoding`,
    `audio_root`). UserError for a source that is missing, empty, of another kind, in another encoding, or lacks a column.
    """
    if source.is_dir():
        if entries := list(_read_folder(source, options)):
            return entries
        raise UserError(f"{source}: no audio files ({', '.join(AUDIO_SUFFIXES)}) in it")
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    suffix = source.suffix.lower()
    if suffix not in (".csv", ".tsv", ".txt", ".jsonl", ".ndjson"):
        raise UserError(f"{source}: expected a folder, or a list in .csv, .tsv or .jsonl")
    text = _decode(source, options.encoding)
    rows = list(_jsonl_rows(source, text) if suffix in (".jsonl", ".ndjson") else _csv_rows(source, text, options))
    if not rows:
        raise UserError(f"{source}: no rows in it")
    audio, captions = _columns(source, list(dict.fromkeys(name for _, row in rows for name in row)), options)
    merged: dict[Path, Entry] = {}
    for line, row in rows:
        entry = _entry_of(line, row, options.audio_root or source.parent, audio, captions)
        first = merged.setdefault(entry.path, entry)
        if first is not entry:
            first.captions = list(dict.fromkeys([*first.captions, *entry.captions]))
            first.problem = None if first.captions else first.problem
    return list(merged.values())


def _decode(path: Path, encoding: str | None) -> str:
    try:
        content = path.read_bytes()
        guessed = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        return content.decode(encoding or guessed)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except LookupError:
        raise UserError(f"--encoding: Python knows no encoding {encoding!r}") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        found = f"byte 0x{content[error.start]:02x} isn't {encoding or 'UTF-8'}"
        raise UserError(f"{path}:{line}: {found}; name the file's encoding by --encoding, such as cp1252") from None


def _csv_rows(source: Path, text: str, options: Namespace) -> Iterator[tuple[int, Row]]:
    """Rows with their lines."""
    delimiter = options.delimiter or max(_DELIMITERS, key=text.split("\n", 1)[0].count)
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    if reader.fieldnames is None:
        raise UserError(f"{source}: empty; expected a line of column names")
    reader.fieldnames = [name.strip() for name in reader.fieldnames]
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if name is not None}


def _jsonl_rows(source: Path, text: str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{source}:{number}: not valid JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise UserError(f"{source}:{number}: expected an object in each line")
            yield number, row


def _columns(source: Path, names: list[str], options: Namespace) -> tuple[str, list[str]]:
    """The column of paths, and those of captions."""
    audio = options.audio_column or next((name for name in names if name.lower() in AUDIO_COLUMNS), "of audio files")
    captions = options.caption_columns or list(filter(_CAPTION_COLUMN.fullmatch, names)) or ["of captions"]
    for column in (audio, *captions):
        if column not in names:
            option = "it by --audio_column" if column == audio else "them by --caption_columns"
            raise UserError(f"{source}: no column {column!r}; there are {', '.join(names)}; name {option}")
    return audio, captions


def _entry_of(line: int, row: Row, root: Path, audio: str, captions: list[str]) -> Entry:
    path = row.get(audio)
    if not isinstance(path, str) or not path.strip():
        return Entry(root / f"line {line}", [], problem=f"no path in {audio}")
    more = {name: value for name, value in row.items() if name not in (audio, *captions) and value is not None}
    return Entry(root / path.strip(), _texts(row.get(name) for name in captions), more)


def _texts(values: Iterable[Any]) -> list[str]:
    """The captions in values that are texts or lists of them, without empty ones and repetitions."""
    flat = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(text.strip() for text in flat if isinstance(text, str) and text.strip()))


def _read_folder(folder: Path, options: Namespace) -> Iterator[Entry]:
    """Audio files with a .txt (a caption in each line) or .json (field caption or text) of the same name."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in AUDIO_SUFFIXES or not path.is_file():
            continue
        text, described = path.with_suffix(".txt"), path.with_suffix(".json")
        try:
            if text.is_file():
                yield Entry(path, _texts(_decode(text, options.encoding).splitlines()))
            elif described.is_file():
                content = json.loads(_decode(described, options.encoding))
                if not isinstance(content, dict):
                    raise UserError("expected an object")
                columns = options.caption_columns or list(filter(_CAPTION_COLUMN.fullmatch, content))
                more = {name: value for name, value in content.items() if name not in columns}
                yield Entry(path, _texts(map(content.get, columns)), more)
            else:
                yield Entry(path, [], problem=f"no caption file ({text.name} or {described.name}) beside it")
        except (json.JSONDecodeError, UserError) as error:
            yield Entry(path, [], problem=f"its caption file can't be read: {error}")
