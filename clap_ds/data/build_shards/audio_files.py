"""Check audio files for shards: regular files only, each content once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from clap_ds.config.files import open_regular, parse_json, read_bytes, write_atomically
from clap_ds.data.build_shards.caption_lists import MOST_OF_A_FILE, Entry


def look_at(entries: list[Entry], num_threads: int, saved: Path | None) -> None:
    """Set the entries' sizes, problems and, if another file is as long, digests, from `saved` or the files."""
    if saved and saved.is_file() and len(seen := parse_json(read_bytes(saved, MOST_OF_A_FILE))) == len(entries):
        for entry, found in zip(entries, seen, strict=True):
            entry.size, entry.problem, entry.digest = found
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(tqdm(pool.map(_look, entries), "files", len(entries), unit="file", disable=None))
        number_of = Counter(entry.size for entry in entries if not entry.problem)
        alike = [entry for entry in entries if not entry.problem and number_of[entry.size] > 1]
        list(tqdm(pool.map(_hash, alike), "duplicates", len(alike), unit="file", disable=None))


def save_looks(path: Path, entries: list[Entry]) -> None:
    write_atomically(path, json.dumps([(entry.size, entry.problem, entry.digest) for entry in entries]))


def merge(entries: list[Entry]) -> list[Entry]:
    """Merge entries of identical files into the first, which then has all captions and lists the others."""
    first_of: dict[object, Entry] = {}
    for entry in entries:
        if (first := first_of.setdefault(entry.digest or id(entry), entry)) is not entry:
            first.add(entry)
            first.others.append(entry.path)
    return list(first_of.values())


def _look(entry: Entry) -> None:
    try:
        entry.size = entry.path.stat().st_size
        if not entry.path.is_file():
            entry.problem = entry.problem or "isn't a regular file"
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        entry.problem = entry.problem or f"audio file can't be read: {error}"


def _hash(entry: Entry) -> None:
    try:
        with open_regular(entry.path) as file:
            entry.digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        entry.problem = f"audio file can't be read: {error}"
