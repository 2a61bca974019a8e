"""Copies of remote shards on a disk of the host, up to a bound in all, shared by its workers and runs.

A copy is named by its shard's URL, size and version, so that a shard that has changed is fetched anew. Readers hold a shared
lock on a copy for as long as they have it open, and whoever fetches one an exclusive lock until it is whole: what nobody has
locked may be taken away, the least recently used first. Where copying fails, for whatever reason, the shard is streamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import fsspec

from clap_ds.data.shard_files import again, is_remote, open_shard
from clap_ds.native.library import cache_directory

_COPIED_BYTES = 2**22
# What file systems call the properties that change with a file's content.
_VERSION = {"etag", "md5hash", "content-md5", "generation", "blob_id", "created"} | {
    *("mtime", "modify", "modified", "lastmodified", "last_modified", "last-modified"),
}


class ShardCache:
    """Copies in `directory`, of at most `max_bytes` together; `tell` is called with why some can't be had, once each."""

    def __init__(self, max_bytes: float, tell: Callable[[str], None], directory: Path | None = None) -> None:
        self._max_bytes, self._tell = max_bytes, tell
        self._directory = directory or cache_directory() / "shards"
        self._told: set[str] = set()

    def copies(self, shards: Iterable[str]) -> Iterator[tuple[str, IO[bytes] | None]]:
        """Shards in order, each with its copy, open for reading; None for local ones and for those to be streamed. While one
        is read, the next is fetched."""
        before: tuple[str, Callable[[], IO[bytes] | None]] | None = None
        for shard in shards:
            following = shard, self._start(shard)
            if before:
                yield before[0], before[1]()
            before = following
        if before:
            yield before[0], before[1]()

    def _start(self, shard: str) -> Callable[[], IO[bytes] | None]:
        if not is_remote(shard):
            return lambda: None
        fetched: queue.SimpleQueue[IO[bytes] | None] = queue.SimpleQueue()

        def fetch() -> None:
            copy = None
            try:
                copy = self.open(shard)
            finally:
                fetched.put(copy)  # whatever becomes of the thread, the reader doesn't wait for ever

        threading.Thread(target=fetch, daemon=True).start()
        return fetched.get

    def open(self, url: str) -> IO[bytes] | None:
        """A remote shard's copy, fetched unless it is there; None where that can't be."""
        try:
            fs, path = fsspec.url_to_fs(url)
            fs.invalidate_cache(path)
            info = again(lambda: fs.info(path))
            if (size := info.get("size")) is None:
                raise OSError("its size isn't known")
            version = sorted((name, str(value)) for name, value in info.items() if name.lower() in _VERSION)
            copy = self._directory / f"{hashlib.sha256(repr((url, size, version)).encode()).hexdigest()[:32]}.tar"
            if size > self._max_bytes:
                raise OSError(f"larger than all of it may be, {self._max_bytes / 1e9:g} GB")
            return _open(copy) or self._fetch(url, copy, size)
        except Exception as error:  # whatever the file system's package raises
            reason = str(error) if isinstance(error, OSError) and not error.errno else repr(error)
            if reason not in self._told:
                self._told.add(reason)
                self._tell(f"{url} is streamed, not kept in {self._directory} (clap.data.cache_gb): {reason}")
            return None

    def _fetch(self, url: str, copy: Path, size: int) -> IO[bytes] | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = self._directory / "lock"
        unfinished = copy.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            with contextlib.ExitStack() as stack:
                with _locked(lock):
                    if found := _open(copy):
                        return found
                    self._make_room(size)
                    file = stack.enter_context(_locked(unfinished))
                    os.posix_fallocate(file.fileno(), 0, size)
                with open_shard(url) as stream:
                    shutil.copyfileobj(stream, file, _COPIED_BYTES)
                if file.tell() != size:
                    raise OSError(f"{file.tell():,} of {size:,} bytes came")
                file.flush()
                os.fsync(file.fileno())
                with _locked(lock):  # nobody counts meanwhile
                    unfinished.replace(copy)
        finally:
            unfinished.unlink(missing_ok=True)
        return _open(copy)

    def _make_room(self, size: int) -> None:
        """Called with the folder locked."""
        found = []
        for path in [*self._directory.glob("*.tar"), *self._directory.glob("*.part")]:
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(each for _, each, _ in found) + size - self._max_bytes
        for _, each, path in sorted(found):
            if excess > 0 and _remove(path):
                excess -= each
        if excess > 0:
            raise OSError(f"all of its {self._max_bytes / 1e9:g} GB are in use")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A file to be written, locked by this process alone."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too


def _open(copy: Path) -> IO[bytes] | None:
    try:
        file = copy.open("rb")
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)  # until the last duplicate of its descriptor is closed
    os.utime(file.fileno(), ns=(time.time_ns(),) * 2)  # the kernel's own time is coarser
    return file


def _remove(path: Path) -> bool:
    """Delete a file, unless somebody uses it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True
