"""Audio files before and while they go into shards: regular files only, each content once, and none whose end is missing."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import soundfile
from tqdm import tqdm

from clap_ds.config.files import open_regular, parse_json, read_bytes, write_atomically
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.shard_making.caption_lists import MOST_OF_A_FILE, Entry

_OF_A_STREAM = 0x7FFF0000  # sizes from here on stand in WAVs written to a pipe: sox 0x7FFFF000, ffmpeg 0xFFFFFFFF
_FRAMES_LOST = 2 * 1152  # what decoding an MP3 may give less than its header states


def find_same(entries: list[Entry], num_threads: int, saved: Path | None) -> list[list[Entry]]:
    """Group entries whose files hold the same. Entries are given their sizes and problems.

    Files are read only where they are as long as another. Where `save_same` has `saved` all this of as many entries, no file
    is looked at.
    """
    if saved and saved.is_file():
        seen, same = parse_json(read_bytes(saved, MOST_OF_A_FILE))
        if len(seen) == len(entries):
            for entry, (size, problem) in zip(entries, seen, strict=True):
                entry.size, entry.problem = size, problem
            return [[entries[number] for number in group] for group in same]
    groups = [[entry for entry in entries if not entry.problem]]
    with ThreadPoolExecutor(num_threads) as pool:
        for look in (_size, _digest):
            candidates = [entry for group in groups for entry in group]
            looked_at = tqdm(pool.map(look, candidates), "duplicates", len(candidates), unit="file", disable=None)
            alike: dict[Hashable, list[Entry]] = defaultdict(list)
            for entry, seen in zip(candidates, looked_at, strict=True):
                if not entry.problem:
                    alike[seen].append(entry)
            groups = [group for group in alike.values() if len(group) > 1]
    return groups


def save_same(path: Path, entries: list[Entry], same: list[list[Entry]]) -> None:
    """Write what `find_same` found of these entries."""
    numbers = {id(entry): number for number, entry in enumerate(entries)}
    seen = [(entry.size, entry.problem) for entry in entries]
    write_atomically(path, json.dumps([seen, [[numbers[id(entry)] for entry in group] for group in same]]))


def merge(entries: list[Entry], same: list[list[Entry]]) -> list[Entry]:
    """Keep of each group the first entry alone, which then has all captions and names the others."""
    merged = set()
    for first, *others in same:
        for other in others:
            first.add(other)
            first.others.append(other.path)
            merged.add(id(other))
    return [entry for entry in entries if id(entry) not in merged]


def _size(entry: Entry) -> Hashable:
    try:
        entry.size = entry.path.stat().st_size
        if not entry.path.is_file():
            entry.problem = "isn't a regular file"
        elif entry.size > MOST_OF_A_FILE:
            entry.problem = f"has more than {MOST_OF_A_FILE:,} bytes"
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        entry.problem = f"audio file can't be read: {error}"
    return entry.size


def _digest(entry: Entry) -> Hashable:
    try:
        with open_regular(entry.path) as file:
            return entry.size, hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        entry.problem = f"audio file can't be read: {error}"
        return None


def check_whole(content: bytes, file: soundfile.SoundFile, num_decoded: int) -> None:
    """Raise BrokenItemError for a file whose end is missing: shorter than the header of a WAV or an AIFF states, or fewer
    frames decoded than that of a FLAC or an MP3. A WAV from a pipe states no size, and is taken to its end."""
    order: Literal["little", "big"] = "big" if content[:4] == b"FORM" else "little"
    stated = int.from_bytes(content[4:8], order) if content[:4] in (b"RIFF", b"FORM") else 0
    if len(content) < stated < _OF_A_STREAM:
        raise BrokenItemError(f"audio breaks off: {len(content)} of {stated} bytes are there")
    if file.format in ("FLAC", "MP3") and num_decoded < file.frames - _FRAMES_LOST:
        raise BrokenItemError(f"audio breaks off: {num_decoded} of {file.frames} samples could be decoded")
