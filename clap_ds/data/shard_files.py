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
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import fsspec

from clap_ds.config.files import open_regular
from clap_ds.config.places import cache_folder
from clap_ds.config.sections import ShardData

ATTEMPTS, FIRST_WAIT_S = 5, 0.5  # the wait is doubled after each failure
CACHE_BYTES = 1e9 * float(ShardData.model_fields["cache_gb"].default)
# What file systems call the properties that change with a file's content.
_VERSION = {"etag", "md5hash", "content-md5", "generation", "blob_id", "created"} | {
    *("mtime", "modify", "modified", "lastmodified", "last_modified", "last-modified"),
}

T = TypeVar("T")


class OpenFile:
    """A file that is closed with the last reference to it."""

    def __init__(self, path: str | Path) -> None:
        self.number = -1
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
    for protocol in (part.split("://")[0] for part in url.split("::")):
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise ValueError(f"{url}: there is no protocol {protocol!r}") from None
        except ImportError as error:
            raise ValueError(f"{url}: the package for {protocol}:// is not installed: {error}") from None


def problem_with(url: str) -> str | None:
    """Say what stands in the way of reading a remote file, found without reading it."""
    try:
        fs, path = fsspec.url_to_fs(url)
        info = again(lambda: fs.info(path))
    except FileNotFoundError:
        return "is not there"
    except Exception as error:  # whatever the file system's package raises
        return f"can't be reached: {str(error) or repr(error)}"
    return "is empty" if info.get("size") == 0 else None


def again(attempt: Callable[[], T]) -> T:
    """Try up to `ATTEMPTS` times. Raises at once what another attempt wouldn't change, such as FileNotFoundError or
    PermissionError; OSError where it failed every time."""
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except (PermissionError, ImportError, IsADirectoryError, NotADirectoryError):
            raise
        except Exception as error:  # every file system's package has its own
            # fsspec says of everything that goes wrong with HTTP that a file isn't found, and aiohttp's errors say why.
            last = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        status, said = getattr(last, "status", 0), f"{type(last).__name__}: {last}"
        if isinstance(last, FileNotFoundError) or status in (404, 410):
            raise FileNotFoundError(said)
        if status in (400, 401, 403, 451):
            raise PermissionError(said)
        if number < ATTEMPTS - 1:
            time.sleep(FIRST_WAIT_S * 2**number)
    raise OSError(f"failed {ATTEMPTS} times, at last with {said}")


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
    """Give shards in order, each with what opens it as `open_shard` does; while a remote one is read, the next is fetched."""
    before: list[tuple[str, Callable[[], OpenFile]]] = []
    for shard in shards:
        opened: Future[OpenFile] = Future()
        if is_remote(shard):  # in no executor, for whose threads a worker's end would wait
            threading.Thread(target=_fetch, args=(opened, shard, cache_bytes), daemon=True).start()
        yield from before
        before = [(shard, opened.result if is_remote(shard) else partial(OpenFile, shard))]
    yield from before


def _fetch(opened: Future[OpenFile], shard: str, cache_bytes: float) -> None:
    try:
        opened.set_result(open_shard(shard, cache_bytes))
    except BaseException as error:  # whatever becomes of the thread, the reader doesn't wait for ever
        opened.set_exception(error)


def _open_copy(url: str, cache_bytes: float) -> OpenFile:
    """Open the copy that is named by a shard's URL, size and version, so that one that has changed is fetched anew."""
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache(path)
    info = again(lambda: fs.info(path))
    version = sorted((name, str(value)) for name, value in info.items() if name.lower() in _VERSION)
    folder = cache_folder() / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    named = hashlib.sha256(repr((url, info.get("size"), version)).encode()).hexdigest()[:32]
    copy, unfinished = folder / f"{named}.tar", folder / f"{named}.part"
    with copy.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that one process of the host fetches it
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(copy, ns=(time.time_ns(),) * 2)  # the kernel's own time is coarser
                return OpenFile(copy)
            again(lambda: fs.get_file(path, str(unfinished)))
            file, came = OpenFile(unfinished), unfinished.stat().st_size
            if info.get("size") not in (None, came):
                raise OSError(f"{came:,} of {info['size']:,} bytes came")
            os.replace(unfinished, copy)
        finally:
            unfinished.unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too
    _make_room(folder, cache_bytes)
    return file


def _make_room(folder: Path, cache_bytes: float) -> None:
    copies: list[tuple[int, int, Path]] = []
    for path in folder.glob("*.tar"):
        with contextlib.suppress(FileNotFoundError):
            copies.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    excess = sum(size for _, size, _ in copies) - cache_bytes
    for _, size, path in sorted(copies):
        if excess > 0:
            excess -= size
            path.unlink(missing_ok=True)  # its lock stays, as another process may be waiting for it
