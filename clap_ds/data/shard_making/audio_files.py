"""Audio files before and while they go into shards: regular files only, each content once, and none whose end is missing."""

from __future__ import annotations

import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import soundfile
from tqdm import tqdm

from clap_ds.config.files import open_regular
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.shard_making.caption_lists import MOST_OF_A_FILE, Entry

_MIDDLE_BYTES = 2**12
_FRAMES_LOST = 2 * 1152  # what decoding an MP3 may give less than its header states


def look_at(entries: list[Entry], num_threads: int) -> None:
    """Give entries their files' sizes, problems and digests. Read whole are those alone of which another has the same size and
    the same middle."""
    with ThreadPoolExecutor(num_threads) as pool:
        list(tqdm(pool.map(_look, entries), "files", len(entries), unit="file", disable=None))
        for most in (_MIDDLE_BYTES, MOST_OF_A_FILE):
            number_of = Counter(entry.digest for entry in entries if not entry.problem)
            alike = [entry for entry in entries if not entry.problem and number_of[entry.digest] > 1]
            list(tqdm(pool.map(partial(_hash, most=most), alike), "duplicates", len(alike), unit="file", disable=None))


def merge(entries: list[Entry]) -> list[Entry]:
    """Keep of entries whose files hold the same the first alone, which then has all captions and names the others."""
    first_of: dict[object, Entry] = {}
    for entry in entries:
        if (first := first_of.setdefault(id(entry) if entry.problem else entry.digest, entry)) is not entry:
            first.add(entry)
            first.others.append(entry.path)
    return list(first_of.values())


def _look(entry: Entry) -> None:
    try:
        entry.size = entry.path.stat().st_size
        if not entry.path.is_file():
            entry.problem = entry.problem or "isn't a regular file"
        entry.digest = str(entry.size)
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        entry.problem = entry.problem or f"audio file can't be read: {error}"


def _hash(entry: Entry, most: int) -> None:
    try:
        with open_regular(entry.path) as file:
            file.seek(max(0, entry.size - most) // 2)
            entry.digest = f"{entry.size} {hashlib.sha256(file.read(most)).hexdigest()}"
    except OSError as error:
        entry.problem = f"audio file can't be read: {error}"


def check_whole(file: soundfile.SoundFile, num_decoded: int) -> None:
    """Raise BrokenItemError for a FLAC or an MP3 of which fewer frames could be decoded than its header states."""
    if file.format in ("FLAC", "MP3") and num_decoded < file.frames - _FRAMES_LOST:
        raise BrokenItemError(f"audio breaks off: {num_decoded} of {file.frames} samples could be decoded")
