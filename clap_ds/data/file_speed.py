"""How fast the file system gives shards' bytes when nothing is decoded: from its disks (cold), and from memory (warm)."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from clap_ds.data.shard_files import is_remote, open_shard

MOST_BYTES, MOST_FILES = 2e9, 64
"""Read in one measurement: the beginnings of files at even distances in the list."""
_CHUNK = 4 * 2**20


class Part(NamedTuple):
    """The first `size` bytes of a shard."""

    shard: str
    size: int


def choose_parts(shards: Sequence[str]) -> list[Part]:
    """What of the shards is read to measure."""
    chosen = [shards[k * len(shards) // MOST_FILES] for k in range(MOST_FILES)] if len(shards) > MOST_FILES else shards
    return [Part(shard, int(MOST_BYTES / len(chosen))) for shard in chosen]


def drop(parts: Sequence[Part]) -> bool | None:
    """Have the kernel forget local files' pages, which needs no privilege; whether it has, or None where that can't be told."""
    told: set[bool | None] = {_drop(part.shard) for part in parts if not is_remote(part.shard)}
    return False if False in told else None if None in told else True


def _drop(path: str) -> bool | None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)  # what isn't on the disk yet would stay
        size = os.fstat(file).st_size
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or the kernel reads ahead of what is asked about below
        for _ in range(3):  # it leaves a page that is in use just then
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            if not any(_is_in_memory(file, offset) for offset in range(0, size, max(2**16, size // 16))):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # what was asked about
                return True
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise
    finally:
        os.close(file)


def _is_in_memory(file: int, offset: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def read(parts: Sequence[Part], num_readers: int, seconds: float) -> tuple[float, list[Part]]:
    """Read parts in so many threads, for `seconds` at most: bytes per second, and how far each part was read."""
    begun = time.perf_counter()

    def one(part: Part) -> Part:
        buffer, done = memoryview(bytearray(min(_CHUNK, part.size))), 0
        with open_shard(part.shard) as file:
            while done < part.size and time.perf_counter() - begun < seconds:
                count: int = file.readinto(buffer[: part.size - done])  # type: ignore[attr-defined]
                if not count:
                    break
                done += count
        return Part(part.shard, done)

    with ThreadPoolExecutor(num_readers) as threads:
        read = [part for part in threads.map(one, parts) if part.size]
    return sum(part.size for part in read) / (time.perf_counter() - begun), read
