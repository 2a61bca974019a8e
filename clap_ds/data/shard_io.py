"""Shards wherever they lie: a path, or any URL that fsspec has a file system for (s3://, gs://, https://, hf://, …).

Remote tars are copied whole to one folder on the host's disk, shared by its workers and runs, and read there, one while the
next is fetched. Credentials come from the environment alone: a URL would carry them into logs and records.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import fsspec

from clap_ds.config.files import open_regular
from clap_ds.config.paths import cache_folder
from clap_ds.config.schema import ShardData

FIRST_WAIT_S = 0.5  # after a failure; doubled after each of the next three
CACHE_BYTES = 1e9 * float(ShardData.model_fields["cache_gb"].default)

T = TypeVar("T")


class OpenFile:
    """A file that is closed with the last reference to it."""

    number = -1

    def __init__(self, path: str | Path) -> None:
        with open_regular(path) as file:
            self.number = os.dup(file.fileno())

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self.number, size, start)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def is_remote(shard: str) -> bool:
    return "://" in shard or "::" in shard


def check_url(url: str) -> None:
    """Raise ValueError for a URL with credentials, or of a protocol that fsspec doesn't know or has no package for."""
    for address in map(urlsplit, url.split("::")):
        if "@" in address.netloc and (address.password is not None or address.scheme in ("http", "https", "ftp")):
            why = "which would end up in logs and records; they are taken from the environment alone"
            raise ValueError(f"the {address.scheme} URL of {address.hostname} carries credentials, {why}")
        try:
            fsspec.get_filesystem_class(address.scheme)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{url}: {error}") from None


def again(attempt: Callable[[], T]) -> T:
    """Try up to five times. Raises at once what another attempt wouldn't change, such as FileNotFoundError."""
    for number in range(4):
        try:
            return attempt()
        except (PermissionError, IsADirectoryError, NotADirectoryError):
            raise
        except Exception as error:  # every file system's package has its own
            if is_absent(error):
                raise
            time.sleep(FIRST_WAIT_S * 2**number)
    return attempt()


def is_absent(error: Exception) -> bool:
    """Tell whether nothing is there. fsspec makes a FileNotFoundError of all that goes wrong with HTTP; its cause tells why."""
    cause = error.__cause__
    is_refused = getattr(cause, "status", None) == 403  # which object stores answer to those who mayn't list
    return isinstance(error, FileNotFoundError) and (is_refused or isinstance(cause, FileNotFoundError | None))


def open_shard(shard: str, cache_bytes: float = CACHE_BYTES) -> OpenFile:
    """Open a shard for reading; of a remote one its copy, fetched unless it is there. OSError where that fails. Of copies
    beyond `cache_bytes` the least recently used are deleted; what is open stays readable."""
    try:
        return _open_copy(shard, cache_bytes) if is_remote(shard) else OpenFile(shard)
    except OSError:
        raise
    except Exception as error:  # whatever the file system's package raises
        raise OSError(repr(error)) from error


def open_ahead(shards: Iterable[str], cache_bytes: float) -> Iterator[tuple[str, Callable[[], OpenFile]]]:
    """Give shards in order, each with what opens it as `open_shard` does, while the next is opened."""
    before: list[tuple[str, Callable[[], OpenFile]]] = []
    for shard in shards:
        opened: Future[OpenFile] = Future()  # of no executor, for whose threads a worker's end would wait
        threading.Thread(target=_open, args=(opened, shard, cache_bytes), daemon=True).start()
        yield from before
        before = [(shard, opened.result)]
    yield from before


def _open(opened: Future[OpenFile], shard: str, cache_bytes: float) -> None:
    try:
        opened.set_result(open_shard(shard, cache_bytes))
    except BaseException as error:  # whatever becomes of the thread, the reader doesn't wait for ever
        opened.set_exception(error)


def _open_copy(url: str, cache_bytes: float) -> OpenFile:
    """Open the copy of a shard, which is named by all that its file system says of it: one that has changed is fetched anew."""
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache(path)
    info = again(lambda: fs.info(path))
    folder = cache_folder() / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{hashlib.sha256(repr((url, info)).encode()).hexdigest()[:32]}.tar"
    part = copy.with_suffix(".part")
    with copy.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that one process of the host fetches it
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(copy, ns=(time.time_ns(),) * 2)  # the kernel's own time is coarser
                return OpenFile(copy)
            again(lambda: fs.get_file(path, str(part)))
            if info.get("size") not in (None, part.stat().st_size):
                raise OSError(f"broke off after {part.stat().st_size:,} bytes")
            file = OpenFile(part.replace(copy))
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too
    with contextlib.suppress(FileNotFoundError):  # where another process makes room, too
        copies = sorted((each.stat().st_mtime_ns, each.stat().st_size, each) for each in folder.glob("*.tar"))
        excess = sum(size for _, size, _ in copies) - cache_bytes
        for _, size, each in copies:
            if excess > 0:
                excess -= size
                each.unlink()  # its lock stays, as another process may be waiting for it
    return file
