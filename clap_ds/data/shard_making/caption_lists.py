"""Audio files with their captions, as people have them: a CSV, a JSONL, or a folder with a caption file beside each audio file.

What can't be used is kept with the reason, so that a build can list it. Audio is not looked at here.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError
from clap_ds.data.shard_making.csv_rows import AUDIO_SUFFIXES, Row, csv_rows

AUDIO_COLUMNS = ("path", "audio_path", "file", "filename", "file_name", "audio", "wav", "filepath", "file_path")
_CAPTION_COLUMN = re.compile(r"(caption|text|raw_text|sentence|description)s?[_ ]?\d*", re.IGNORECASE)
_CLASS_COLUMN = re.compile(
    r"(category|class|class[_ ]?name|label|tag|kind|genre|species)(e?s)?|categories", re.IGNORECASE
)
_COLUMN_IN_NAME = re.compile(r"\{([^{}]+)\}")  # where --audio_column puts names together
_CSV_SUFFIXES, _JSONL_SUFFIXES = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson")
DIVIDING_OPTIONS = ("split_column", "group_column", "stratify_column")
REMEDY = (
    "In a CSV, a field with a delimiter or a line break goes into double quotes, with each of its own doubled, and every row"
    " has a field for each column; --delimiter names another delimiter. To leave such rows out: --lenient"
)
_MOST_LISTED = 10  # rows in a message

RowCheck = Callable[[Row], str | None]


@dataclass(slots=True)
class Entry:
    """One audio file of a data set: its captions, everything else that is said of it, and why it can't be used, if so."""

    path: Path  # of a row that can't be read: the list's, with its line
    captions: list[str]
    more: Row = field(default_factory=dict)
    problem: str | None = None
    malformed: bool = False  # the row, not the audio file
    size: int = 0  # bytes, where the file was looked at
    others: list[Path] = field(default_factory=list)  # files that hold the same

    def __post_init__(self) -> None:
        if not self.captions and self.problem is None:
            self.problem = "empty caption"

    def add(self, other: Entry) -> None:
        """Take in what is said of the same sound elsewhere: further captions, and further values of what else is said."""
        self.captions = list(dict.fromkeys([*self.captions, *other.captions]))
        self.problem = None if self.captions else self.problem
        for name, value in other.more.items():
            known = values_of(self.more, name)
            if new := [each for each in values_of(other.more, name) if each not in known]:
                self.more[name] = [*known, *new] if known else value


def values_of(row: Row, name: str) -> list[Any]:
    """What a column says: nothing, a value, or several where rows of the same sound differ."""
    value = row.get(name)
    return value if isinstance(value, list) else [] if value is None or value == "" else [value]


def read_entries(source: Path, options: Namespace, problem_with: RowCheck = lambda row: None) -> list[Entry]:
    """The audio files of a folder, CSV (.csv, .tsv, .txt) or JSONL (.jsonl, .ndjson), each once; rows of the same path are one
    entry with all their captions.

    Args:
        options: how to read them, as in the command's help (`audio_column`, `caption_columns`, `delimiter`, `encoding`,
            `audio_root`), whether malformed rows are to be left out (`lenient`) and the columns that rows are divided by.
        problem_with: says why a row can't be used, too.

    Raises:
        UserError: a source that is missing, empty, of another kind, in another encoding, or lacks a column; malformed rows.
    """
    entries = list((_read_folder if source.is_dir() else _read_list)(source, options, problem_with))
    malformed = [f"{entry.path}: {entry.problem}" for entry in entries if entry.malformed]
    if malformed and not options.lenient:
        found = f"{source}: {len(malformed)} of {len(entries)} rows can't be used:"
        others = [f"and {len(malformed) - _MOST_LISTED} more"] if len(malformed) > _MOST_LISTED else []
        raise UserError("\n".join([found, *malformed[:_MOST_LISTED], *others, REMEDY]))
    merged: dict[Path, Entry] = {}
    for entry in entries:
        if (first := merged.setdefault(entry.path, entry)) is not entry:
            first.add(entry)
    return list(merged.values())


def _read_list(source: Path, options: Namespace, problem_with: RowCheck) -> Iterator[Entry]:
    suffix = source.suffix.lower()
    if not source.is_file():
        raise UserError(f"{source}: {'not a regular file' if source.exists() else 'no such file or folder'}")
    if suffix not in (*_CSV_SUFFIXES, *_JSONL_SUFFIXES):
        raise UserError(f"{source}: expected a folder, or a list in .csv, .tsv or .jsonl")
    text = _decode(source, options.encoding)
    rows = list(_jsonl_rows(text) if suffix in _JSONL_SUFFIXES else csv_rows(source, text, options.delimiter))
    if not rows:
        raise UserError(f"{source}: no rows in it")
    names = list(dict.fromkeys(name for _, row in rows if not isinstance(row, str) for name in row))
    audio, captions = _columns(source, names, options) if names else ("", [])
    for line, row in rows:
        place = Path(f"{source}:{line}")
        problem = row if isinstance(row, str) else problem_with(row)
        if problem or isinstance(row, str):
            yield Entry(place, [], problem=problem, malformed=True)
        elif path := _path_in(row, audio):
            root = options.audio_root or source.parent
            yield Entry(root / path, _captions(row, captions), _more(row, [audio, *captions], options))
        else:
            yield Entry(place, [], problem=f"no path in {audio}")


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


def _jsonl_rows(text: str) -> Iterator[tuple[int, Row | str]]:
    """Rows with their lines, or what is wrong with one."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield number, f"not valid JSON: {error.msg}"
            else:
                yield number, row if isinstance(row, dict) else "expected an object, as in each line of a JSONL"


def _columns(source: Path, names: list[str], options: Namespace) -> tuple[str, list[str]]:
    """The column of paths, or how they are put together from columns, and the columns of captions."""
    there = f"there are {', '.join(filter(None, names))}"
    audio = options.audio_column or next((name for name in names if name.lower() in AUDIO_COLUMNS), None)
    captions = options.caption_columns or list(filter(_CAPTION_COLUMN.fullmatch, names))
    if audio is None:
        how = f"name it by --audio_column, or how it is made of columns, such as '{{{names[0]}}}.wav'"
        raise UserError(f"{source}: no column of audio files (named {', '.join(AUDIO_COLUMNS)}); {there}; {how}")
    if not captions:
        how = "name them by --caption_columns; a column of classes makes captions, too"
        raise UserError(f"{source}: no column of captions (named caption, text, description, …); {there}; {how}")
    of_audio = _COLUMN_IN_NAME.findall(audio) or [audio]
    wanted = dict.fromkeys(captions, "--caption_columns") | dict.fromkeys(of_audio, "--audio_column")
    wanted |= {name: f"--{option}" for option in DIVIDING_OPTIONS if (name := getattr(options, option))}
    for name, option in wanted.items():
        if name not in names:
            raise UserError(f"{source}: no column {name!r}; {there}; name another by {option}")
    return audio, captions


def _path_in(row: Row, audio: str) -> str:
    path = row.get(audio)
    if _COLUMN_IN_NAME.search(audio):
        path = _COLUMN_IN_NAME.sub(lambda column: str(row.get(column[1], "")), audio)
    return path.strip() if isinstance(path, str) else ""


def _captions(row: Row, columns: list[str]) -> list[str]:
    """The texts in columns, also in lists, without empty ones and repetitions; names of classes as words."""
    texts = []
    for name in columns:
        for text in filter(lambda value: isinstance(value, str), values_of(row, name)):
            texts.append((text.replace("_", " ") if _CLASS_COLUMN.fullmatch(name) else text).strip())
    return list(dict.fromkeys(filter(None, texts)))


def _more(row: Row, used: list[str], options: Namespace) -> Row:
    """What else is said: classes that captions are made of, and columns that rows are divided by, too."""
    divided_by = [getattr(options, option) for option in DIVIDING_OPTIONS]
    left_out = [name for name in used if not _CLASS_COLUMN.fullmatch(name) and name not in divided_by]
    return {name: value for name, value in row.items() if name not in left_out and value is not None}


def _read_folder(folder: Path, options: Namespace, problem_with: RowCheck) -> Iterator[Entry]:
    """Audio files with a .txt (a caption in each line) or .json (field caption or text) of the same name."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in AUDIO_SUFFIXES]
    if not paths:
        raise UserError(f"{folder}: no audio files ({', '.join(AUDIO_SUFFIXES)}) in it")
    for path in paths:
        text, described = path.with_suffix(".txt"), path.with_suffix(".json")
        row: Any = {}
        try:
            if text.is_file():
                row, columns = {"caption": _decode(text, options.encoding).splitlines()}, ["caption"]
            elif described.is_file():
                row = json.loads(_decode(described, options.encoding))
                if not isinstance(row, dict):
                    raise UserError("expected an object")
                columns = options.caption_columns or list(filter(_CAPTION_COLUMN.fullmatch, row))
            else:
                raise UserError(f"no caption file ({text.name} or {described.name}) beside it")
        except (json.JSONDecodeError, UserError) as error:
            yield Entry(path, [], problem=f"captions can't be read: {error}")
            continue
        problem = problem_with(row)
        yield Entry(path, _captions(row, columns), _more(row, columns, options), problem, malformed=problem is not None)
