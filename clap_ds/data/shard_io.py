"""Open shards from paths or any URL that fsspec supports (s3://, gs://, https://, hf://, …).

Remote tars are copied to a folder shared by the host's workers and runs. The next tar is fetched
while one is read. Credentials come only from the environment: in a URL, they would appear in logs
and records.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

import fsspec

from clap_ds.config.schema import ShardData
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.utils.files import RefusedFileError, open_regular
from clap_ds.utils.paths import cache_folder, make_private

# before the first retry; doubled before each of the other three
FIRST_WAIT_S = 0.5
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PERMANENT = (*NO_SPACE, errno.ELOOP, errno.ENAMETOOLONG)
CACHE_BYTES = 1e9 * float(ShardData.model_fields["cache_gb"].default)

Kind = Literal["encoded", "waveform", "mel"]
"""What shards contain: audio files in any supported format, 16-bit mono WAVs at the model's sample
rate, or the model's log-mel features as NumPy files, (frames, mel_bins) float16."""
KINDS: tuple[Kind, ...] = get_args(Kind)

T = TypeVar("T")


class OpenFile:
    """A file that stays open until the last reference is gone."""

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
    """Raise ValueError for a URL that contains credentials or that fsspec can't open."""
    for address in map(urlsplit, url.split("::")):
        # Of other schemes, a user alone is the name of a container.
        has_secret = address.password is not None or address.scheme in ("http", "https", "ftp")
        if "@" in address.netloc and has_secret:
            raise ValueError(
                f"the {address.scheme} URL of {address.hostname} contains credentials, "
                "which would appear in logs and records; set them in the environment"
            )
        try:
            fsspec.get_filesystem_class(address.scheme)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{url}: {error}") from None


def retry(attempt: Callable[[], T]) -> T:
    """Try up to five times. Permanent errors, such as FileNotFoundError, are raised immediately."""
    for number in range(4):
        try:
            return attempt()
        except (PermissionError, IsADirectoryError, NotADirectoryError, RefusedFileError):
            raise
        # Each file system package has its own types.
        except Exception as error:
            if is_absent(error) or getattr(error, "errno", None) in PERMANENT:
                raise
            time.sleep(FIRST_WAIT_S * 2**number)
    return attempt()


def is_absent(error: Exception) -> bool:
    """Return whether a file is missing. fsspec raises FileNotFoundError for all HTTP errors, so
    check its cause."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    # 403 is object stores' answer without permission to list.
    is_refused = getattr(cause, "status", None) == 403
    return is_refused or isinstance(cause, FileNotFoundError | None)


def open_shard(shard: str, cache_bytes: float = CACHE_BYTES) -> OpenFile:
    """Open a shard for reading, fetching a remote one unless it is cached. Raises OSError.
    The least recently used copies beyond `cache_bytes` are deleted; open ones stay readable."""
    try:
        return _open_copy(shard, cache_bytes) if is_remote(shard) else OpenFile(shard)
    except OSError:
        raise
    # any error of the file system package
    except Exception as error:
        raise OSError(repr(error)) from error


def open_ahead(
    shards: Iterable[str], open_file: Callable[[str], OpenFile]
) -> Iterator[tuple[str, Callable[[], OpenFile]]]:
    """Yield shards in order, each with a function that returns it opened, while `open_file` opens
    the next."""
    previous: tuple[str, Callable[[], OpenFile]] | None = None
    for shard in shards:
        opened: Future[OpenFile] = Future()
        # No executor, because exiting workers would wait for its threads.
        threading.Thread(target=_open, args=(opened, shard, open_file), daemon=True).start()
        if previous:
            yield previous
        previous = shard, opened.result
    if previous:
        yield previous


def _open(opened: Future[OpenFile], shard: str, open_file: Callable[[str], OpenFile]) -> None:
    try:
        opened.set_result(open_file(shard))
    # of any type, so that the reader never waits forever
    except BaseException as error:
        opened.set_exception(error)


def _open_copy(url: str, cache_bytes: float) -> OpenFile:
    # Here, because it imports torch.
    from webdataset.cache import LRUCleanup

    folder = cache_folder("shards")
    # A copy is renamed from there, so both are on one disk.
    locks = make_private(folder.with_name("shard_locks"))
    # A larger shard is possible if its size is known; then it is deleted once read.
    file = open_copy(url, folder, locks, lambda size: size or cache_bytes)
    LRUCleanup(folder, cache_bytes, keyfn=os.path.getmtime, interval=None).cleanup()
    return file


def open_copy(
    shard: str, folder: Path, locks: Path, limit: Callable[[int | None], float]
) -> OpenFile:
    """Open a shard's copy, named by a hash of the source's info so that changed shards are fetched
    again. `limit` returns the most bytes to copy, given the source's size if that is known."""
    remote = RemoteFiles(shard)
    info = retry(remote.info)
    name = hashlib.sha256(repr((shard, info)).encode()).hexdigest()[:32]
    copy = folder / f"{name}.tar"
    part = locks / f"{name}.part"
    with (locks / f"{name}.lock").open("w") as lock:
        # So that only one process per host fetches it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with contextlib.suppress(FileNotFoundError):
                # Not by default, because the kernel's clock is coarser.
                now_ns = time.time_ns()
                os.utime(copy, ns=(now_ns, now_ns))
                return OpenFile(copy)
            retry(lambda: remote.download("", part, max_bytes=limit(info.get("size"))))
            # Before the rename, because other processes may delete the copy at once.
            file = OpenFile(part)
            part.replace(copy)
        finally:
            # Explicitly, because forked processes also hold it open.
            fcntl.flock(lock, fcntl.LOCK_UN)
    return file
