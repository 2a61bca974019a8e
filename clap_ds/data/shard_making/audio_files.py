"""Audio files before and while they go into shards: regular files only, each content once, and none whose end is missing.

Decoders take what is there of a file that was cut off, and files that are the same would meet in training and evaluation.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import soundfile
from tqdm import tqdm

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.shard_making.caption_lists import Entry

NOT_REGULAR = "isn't a regular file"
_PROBE = 65536  # bytes read from the start of files of the same size
_OF_A_STREAM = 0x7FFF0000  # sizes from here on stand in WAVs written to a pipe: sox 0x7FFFF000, ffmpeg 0xFFFFFFFF
_FRAMES_LOST = {"FLAC": 0, "MP3": 2 * 1152}  # what decoding may give less than the header states


def merge_same(entries: list[Entry], num_threads: int) -> list[Entry]:
    """Entries whose files hold the same become one: the first, which then has all captions and names the others.

    A path at which there is no regular file, also by a link, becomes a problem of its entry and is never opened. Files are read
    only where they are as long as another: their start, and whole where that is the same, too.
    """
    candidates = [entry for entry in entries if not entry.problem]
    groups: list[list[Entry]] = []
    with ThreadPoolExecutor(num_threads) as pool:
        for look in (_size, _start, _content):
            looked_at = tqdm(pool.map(look, candidates), "duplicates", len(candidates), unit="file", disable=None)
            alike: dict[Hashable, list[Entry]] = defaultdict(list)
            for entry, seen in zip(candidates, looked_at, strict=True):
                if not entry.problem:
                    alike[seen].append(entry)
            groups = [group for group in alike.values() if len(group) > 1]
            candidates = [entry for group in groups for entry in group]
    merged = set()
    for first, *others in groups:
        for other in others:
            first.add(other)
            first.others.append(other.path)
            merged.add(id(other))
    return [entry for entry in entries if id(entry) not in merged]


def _size(entry: Entry) -> Hashable:
    try:
        status = entry.path.stat()
        entry.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            entry.problem = NOT_REGULAR
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        entry.problem = f"audio file can't be read: {getattr(error, 'strerror', error)}"
    return entry.size


def _start(entry: Entry) -> Hashable:
    return _digest(entry, lambda file: hashlib.sha256(file.read(_PROBE)))


def _content(entry: Entry) -> Hashable:
    return _digest(entry, lambda file: hashlib.file_digest(file, "sha256"))


def _digest(entry: Entry, of: Callable[[io.BufferedReader], Any]) -> Hashable:
    try:
        with open_regular(entry.path) as file:
            return entry.size, of(file).digest()
    except BrokenItemError as error:
        entry.problem = str(error)
        return None


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """A file for reading; BrokenItemError where it can't be read, or isn't a regular file. Never waits for a pipe."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BrokenItemError(NOT_REGULAR)
            yield file
    except OSError as error:
        raise BrokenItemError(f"audio file can't be read: {error.strerror}") from None


def check_whole(content: bytes, file: soundfile.SoundFile, num_decoded: int) -> None:
    """BrokenItemError for a file whose end is missing: fewer frames decoded than the header of a FLAC or an MP3 states, less
    data than that of a WAV, AIFF or Wave64, an Ogg without its last page. An MP3 without a Xing or VBRI header states nothing.

    A WAV written to a pipe states a size of 0x7FFF0000 or more, and is taken to its end. So much as its header is long may be
    missing in any, since some programs count that in.
    """
    start, size = _data_of(content)
    there = len(content) - start
    if size == 0 < there:
        raise BrokenItemError(f"audio has a header that states 0 bytes, as if writing was interrupted; {there} follow")
    if size > len(content):
        raise BrokenItemError(f"audio breaks off: {there} of the {size} bytes that its header states are there")
    if content[:4] == b"OggS":
        last = content[content.rfind(b"OggS") :]
        lengths = last[27 : 27 + last[26]] if len(last) > 26 else b""
        if len(last) < 27 + len(lengths) + sum(lengths) or not last[5] & 4:
            raise BrokenItemError("audio breaks off: the page that ends an Ogg stream is missing")
    if num_decoded < file.frames - _FRAMES_LOST.get(file.format, file.frames):
        raise BrokenItemError(f"audio breaks off: {num_decoded} of {file.frames} samples could be decoded")


def _data_of(content: bytes) -> tuple[int, int]:
    """Where the data of a RIFF, RF64, AIFF or Wave64 file begins, and its bytes by the header; of others, all that is there."""
    kind, at = content[:4], 12
    if kind == b"riff":  # Wave64: a GUID, then the size of the whole file
        return 0, int.from_bytes(content[16:24], "little")
    order: Literal["little", "big"] = "big" if kind in (b"RIFX", b"FORM") else "little"
    while kind in (b"RIFF", b"RIFX", b"RF64", b"FORM") and at + 8 <= len(content):
        name, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], order)
        if name in (b"data", b"SSND"):
            if kind == b"RF64" and size == 0xFFFFFFFF:
                return at + 8, int.from_bytes(content[28:36], "little")  # in its first chunk, ds64
            return at + 8, size if size < _OF_A_STREAM else len(content) - at - 8
        at += 8 + size + size % 2
    return 0, len(content)
