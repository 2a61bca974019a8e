"""Open shards from paths or any URL that fsspec supports (s3://, gs://, https://, hf://, …).

Remote tars are copied to a folder shared by the host's workers and runs. The next tar is fetched
while one is read.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, get_args

from clap_ds.config.schema import ShardData
from clap_ds.config.urls import is_remote
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.utils.files import open_regular
from clap_ds.utils.paths import cache_folder, make_private

CACHE_BYTES = 1e9 * float(ShardData.model_fields["cache_gb"].default)

Kind = Literal["encoded", "waveform", "mel"]
"""What shards contain: audio files in any supported format, 16-bit mono WAVs at the model's sample
rate, or the model's log-mel features as NumPy files, (frames, mel_bins) float16."""
KINDS: tuple[Kind, ...] = get_args(Kind)


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
    info = remote.info()
    name = hashlib.sha256(repr((shard, info)).encode()).hexdigest()[:32]
    copy = folder / f"{name}.tar"
    part = locks / f"{name}.part"
    with hold_lock(locks / f"{name}.lock"):
        with contextlib.suppress(FileNotFoundError):
            # Not by default, because the kernel's clock is coarser.
            now_ns = time.time_ns()
            os.utime(copy, ns=(now_ns, now_ns))
            return OpenFile(copy)
        remote.download("", part, max_bytes=limit(info.get("size")))
        # Before the rename, because other processes may delete the copy at once.
        file = OpenFile(part)
        part.replace(copy)
    return file


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock while the body runs, so that only one process per host fetches a file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Explicitly, because forked processes also hold it open.
            fcntl.flock(lock, fcntl.LOCK_UN)
