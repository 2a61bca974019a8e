"""Opens shards wherever they lie: a path, or any URL that fsspec has a file system for (s3://, gs://, https://, hf://, …).

Remote tars are streamed, a thread reading ahead; a read that fails is tried again from where it stopped. Packages for a
protocol (s3fs, gcsfs, aiohttp, …) and credentials are the user's, the latter from the environment alone: a URL would carry them
into logs and records.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar, cast
from urllib.parse import urlsplit

import fsspec

ATTEMPTS, FIRST_WAIT_S = 5, 0.5  # the wait is doubled after each failure
_STREAM_BUFFER_BYTES, _HEADER_BUFFER_BYTES = 2**20, 2**16
_BUFFERS_AHEAD, _LONGEST_WAIT_S = 16, 1.0
_LOCAL_BUFFER_BYTES = 2**13  # some file systems would have it be megabytes, which each jump to a header would read

T = TypeVar("T")


def is_remote(shard: str) -> bool:
    return "://" in shard or "::" in shard


def check_url(url: str) -> None:
    """ValueError for a URL with credentials, of a protocol fsspec doesn't know, or of one whose package isn't installed."""
    for address in map(urlsplit, url.split("::")):
        if "@" in address.netloc and (address.password is not None or address.scheme in ("http", "https", "ftp")):
            why = "which would end up in logs and records; they are taken from the environment alone"
            raise ValueError(f"the {address.scheme} URL of {address.hostname} carries credentials, {why}")
    for protocol in (part.split("://")[0] for part in url.split("::")):
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise ValueError(f"{url}: there is no protocol {protocol!r} (of fsspec's)") from None
        except ImportError as error:
            raise ValueError(f"{url}: the package for {protocol}:// is not installed: {error}") from None


def match(pattern: str) -> list[str]:
    """URLs that a URL with wildcards stands for, in order."""
    fs, path = fsspec.url_to_fs(pattern)
    return sorted(str(fs.unstrip_protocol(found)) for found in fs.glob(path))


def problem_with(url: str) -> str | None:
    """What stands in the way of reading a remote file, found without reading it."""
    try:
        fs, path = fsspec.url_to_fs(url)
        info = again(lambda: fs.info(path))
    except Exception as error:  # whatever the file system's package raises
        cause = _behind(error)
        if _is_missing(cause):
            return "is not there"
        is_told = isinstance(cause, PermissionError) and cause.__cause__  # by `again`
        return f"can't be reached: {cause if is_told else f'{type(cause).__name__}: {cause}'}"
    return "is empty" if info.get("size") == 0 else None


def open_shard(shard: str, *, any_order: bool = False) -> IO[bytes]:
    """A shard for reading: a local file, seekable, or a remote stream, whose reads raise OSError after `ATTEMPTS` failures.

    With `any_order` a remote file is seekable, too, and little of it is fetched ahead.
    """
    if not is_remote(shard):
        return open(shard, "rb", buffering=_LOCAL_BUFFER_BYTES)
    stream = _RetriedStream(shard, any_order)
    if any_order:
        return cast(IO[bytes], io.BufferedReader(stream, _HEADER_BUFFER_BYTES))
    return cast(IO[bytes], io.BufferedReader(_ReadAhead(stream), _STREAM_BUFFER_BYTES))


def again(attempt: Callable[[], T], recover: Callable[[], None] = lambda: None) -> T:
    """The result of `attempt`, tried up to `ATTEMPTS` times with longer and longer waits between.

    Raises at once what another attempt wouldn't change: FileNotFoundError, PermissionError (of what a server refuses as well),
    ImportError and those of folders; OSError where it failed every time.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Exception as error:  # every file system's package has its own
            last = _behind(error)
            if _is_refused(last):
                raise PermissionError(f"{type(last).__name__}: {last}") from error
            if _is_missing(last):
                raise FileNotFoundError(str(last)) from error
            if isinstance(last, PermissionError | ImportError | IsADirectoryError | NotADirectoryError):
                raise
            recover()
            if number < ATTEMPTS - 1:
                time.sleep(FIRST_WAIT_S * 2**number)
    raise OSError(f"failed {ATTEMPTS} times, at last with {type(last).__name__}: {last}")


def _behind(error: Exception) -> BaseException:
    """The error itself, or what it comes of: fsspec says of everything that goes wrong with HTTP that a file isn't found."""
    cause = error.__cause__
    is_http = isinstance(cause, TimeoutError) or type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if cause and is_http and isinstance(error, FileNotFoundError) else error


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or getattr(error, "status", None) in (404, 410)


def _is_refused(error: BaseException) -> bool:
    """Whether an HTTP server answered that the request is wrong, rather than late (408) or one too many (429); gcsfs says it in
    words."""
    status = getattr(error, "status", None)
    is_wrong = isinstance(status, int) and 400 <= status < 500 and status not in (404, 408, 410, 429)
    return is_wrong or (isinstance(error, OSError) and str(error).startswith("Forbidden"))


class _RetriedStream(io.RawIOBase):
    """A remote file. Of an HTTP server that gives no part of one, it is read from its start up to where one wants to be."""

    def __init__(self, url: str, any_order: bool) -> None:
        self._url = url
        self._options = {"block_size": _HEADER_BUFFER_BYTES} if any_order else {}
        self._is_seekable = any_order
        self._may_lack_ranges, self._is_stream = url.startswith(("http://", "https://")), False
        self._position = self._file_position = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("seek from the end of a remote file")
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = again(lambda: self._read(len(view)), self._let_go)
        view[: len(content)] = content
        self._position = self._file_position = self._position + len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        try:
            return self._read_here(size)
        except ValueError:  # fsspec's, of a server that takes no notice of ranges
            if not self._may_lack_ranges:
                raise
            self._let_go()
            self._may_lack_ranges, self._is_stream, self._options = False, True, {"block_size": 0}
            return self._read_here(size)

    def _read_here(self, size: int) -> bytes:
        if self._is_stream and self._file_position > self._position:
            self._let_go()
        if self._file is None:
            self._file = fsspec.open(self._url, "rb", expand=False, **self._options).open()
            self._file_position = 0
        if self._file_position != self._position:
            if self._is_stream:
                self._pass_over()
            else:
                self._file.seek(self._position)
        return cast(bytes, self._file.read(size))

    def _pass_over(self) -> None:
        while missing := self._position - self._file_position:
            passed = self._file.read(min(missing, _STREAM_BUFFER_BYTES))
            if not passed:
                raise EOFError(f"it ends at byte {self._file_position:,}")
            self._file_position += len(passed)

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # it is of no more use, however it ends
                file.close()

    def close(self) -> None:
        self._let_go()
        super().close()


class _ReadAhead(io.RawIOBase):
    """A stream's content, up to `_BUFFERS_AHEAD` buffers of which are read by a thread before they are asked for."""

    def __init__(self, stream: io.RawIOBase) -> None:
        self._stream = stream
        self._read: queue.Queue[bytes | Exception] = queue.Queue(_BUFFERS_AHEAD)
        self._thread: threading.Thread | None = None
        self._rest = memoryview(b"")
        self._end: bytes | Exception | None = None  # what was read last: nothing, or why no more can be

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, daemon=True)
            self._thread.start()
        if not self._rest and self._end is None:
            found = self._read.get()
            if found and isinstance(found, bytes):
                self._rest = memoryview(found)
            else:
                self._end = found
        if isinstance(self._end, Exception):
            raise self._end
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._rest))
        view[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def _read_all(self) -> None:
        found: bytes | Exception | None = b"more"
        with self._stream:
            while found and isinstance(found, bytes) and not self.closed:
                try:
                    found = self._stream.read(_STREAM_BUFFER_BYTES)
                except Exception as error:
                    found = error
                self._read.put(found or b"")

    def close(self) -> None:
        super().close()
        while not self._read.empty():  # the thread may wait for room
            self._read.get_nowait()
        if self._thread:
            self._thread.join(_LONGEST_WAIT_S)  # what it reads now isn't waited for any longer
