"""Transfer files from and to folders that others can write, and from servers that may never stop
sending.

No other module calls fsspec's transfers; a test holds that. Only regular files are transferred. No
link below the folder that the user named is followed. No more bytes are received than the caller
allows and the disk has room for. Reading is tried several times, unless the error is permanent. A
server that sends nothing for `STALL_S` seconds is such an error.
"""

import errno
import importlib
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.callbacks import NoOpCallback
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem

from clap_ds.utils.files import MOST_BYTES, RefusedFileError, hold_path, open_regular
from clap_ds.utils.redaction import redact_urls

# after which an answer that doesn't continue is given up
STALL_S = 30.0
NUM_ATTEMPTS = 5
# before the second attempt; doubled before each of the others
FIRST_WAIT_S = 0.5
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PERMANENT = (*NO_SPACE, errno.ELOOP, errno.ENAMETOOLONG)
T = TypeVar("T")
_LINK = re.compile(r"""\bhref=["']([^"'<>\s]+)""", re.IGNORECASE)


class RemoteFiles:
    """Files by their names in the folder at a URL or path. The name `""` is the file at the URL
    itself, which may be a link.

    Methods raise RefusedFileError for links and for files that are too large, TimeoutError for
    servers that stop sending, and any errors of the file system's package.
    """

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {}
        for scheme in ("http", "https"):
            if f"{scheme}://" in url:
                options[scheme] = {"get_client": _open_http_client}
        for scheme in ("gs", "gcs"):
            if f"{scheme}://" in url:
                options[scheme] = {"requests_timeout": _make_timeout()}
        fs, root = fsspec.url_to_fs(url, **options)
        # fsspec's caches have no limit.
        while isinstance(fs, CachingFileSystem):
            fs = fs.fs
        self._fs = fs
        self._root = root.rstrip("/")
        # Local paths are pinned by file descriptors, so that no one can replace a part by a link.
        self._is_local = isinstance(fs, LocalFileSystem)
        # Servers of HTTP may refuse to list folders.
        self._has_links = "http" not in fs.protocol
        # Packages of object stores try again themselves.
        self._num_attempts = 1 if hasattr(fs, "retries") else NUM_ATTEMPTS
        self._listing = cache(self.ls)
        self._info = cache(fs.info)

    def ls(self, folder: str = "") -> dict[str, bool]:
        """Return the names in a folder, and whether each is a link. A missing folder has none."""
        path = self._join(folder)

        def list_entries() -> Any:
            # Other programs may have written to the folder since.
            self._fs.invalidate_cache()
            return self._fs.ls(path, detail=True)

        try:
            entries = self._retry(list_entries, path)
        except FileNotFoundError:
            return {}
        is_link = {}
        for entry in entries:
            # Packages differ in how they mark links.
            name = posixpath.basename(entry["name"].rstrip("/"))
            is_link[name] = bool(entry.get("islink", entry.get("type") == "link"))
        return is_link

    def glob(self) -> list[str]:
        """Return the URLs that match the URL's wildcards, in order."""
        return sorted(str(self._fs.unstrip_protocol(path)) for path in self._fs.glob(self._root))

    def info(self, name: str = "") -> dict[str, Any]:
        """Return fsspec's description of a file."""
        path = self._join(name)
        self._fs.invalidate_cache(path)
        return self._retry(lambda: self._info(path), path)

    def read_start(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a file, or all if it has fewer."""

        def read() -> bytes:
            content = bytearray()
            with self._source(name) as (path, _), self._fs.open(path, "rb") as file:
                # A read may return fewer bytes than there are.
                while block := file.read(size - len(content)):
                    content += block
            return bytes(content)

        return self._retry(read, self._join(name))

    def download(self, name: str, to: Path, max_bytes: float) -> None:
        """Copy a file of at most `max_bytes` to a local path in a folder that only this user can
        write. Raises OSError if the download is incomplete; then no file is left."""
        self._retry(lambda: self._download(name, to, max_bytes), self._join(name))

    def _download(self, name: str, to: Path, max_bytes: float) -> None:
        limit = _Limit(self._join(name), min(max_bytes, shutil.disk_usage(to.parent).free))
        try:
            with self._source(name) as (path, size):
                # Refuses a file whose stated size is too large before any transfer.
                limit.set_size(size)
                self._fs.get_file(path, str(to), callback=limit)
            # Not every package does.
            limit.absolute_update(to.stat().st_size)
            if size not in (None, limit.value):
                raise OSError(f"{self._join(name)}: download stopped after {limit.value:,} bytes")
        except BaseException:
            to.unlink(missing_ok=True)
            raise

    def upload(self, folder: Path, source: str, name: str) -> None:
        """Create or replace a file by the one named `source` in a local folder."""
        with (
            hold_path(folder, source) as path,
            open_regular(path, os.O_NOFOLLOW) as file,
            self._target(name) as target,
        ):
            self._fs.put_file(f"/proc/self/fd/{file.fileno()}", target)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file."""
        with self._target(name) as target:
            self._fs.pipe_file(target, content)

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Delete a file, or a folder with its contents."""
        with self._own(name) as path:
            self._fs.rm(path, recursive=recursive)

    def _retry(self, attempt: Callable[[], T], path: str) -> T:
        """Return what `attempt` returns, after up to `NUM_ATTEMPTS`. Permanent errors, such as for
        a missing file, are raised at once."""
        for number in range(self._num_attempts):
            try:
                return attempt()
            except (PermissionError, IsADirectoryError, NotADirectoryError, RefusedFileError):
                raise
            # Each file system package has its own types.
            except Exception as error:
                if is_absent(error) or getattr(error, "errno", None) in PERMANENT:
                    raise
                if number < self._num_attempts - 1:
                    time.sleep(FIRST_WAIT_S * 2**number)
                elif _is_timeout(error):
                    attempts = f"{getattr(self._fs, 'retries', NUM_ATTEMPTS)} attempts"
                    problem = (
                        f"{redact_urls(path)}: the server stopped sending, in each of {attempts}"
                    )
                    raise TimeoutError(problem) from error
                else:
                    raise
        raise AssertionError

    def _join(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _source(self, name: str) -> Iterator[tuple[str, int | None]]:
        """Yield a regular file's path, and its size if the file system tells it."""
        with self._own(name) as path:
            if self._is_local:
                with open_regular(path, os.O_NOFOLLOW if name else os.O_RDONLY) as file:
                    yield f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
                return
            info = self._info(path)
            if info.get("type", "file") != "file":
                raise RefusedFileError(f"{path}: expected a regular file")
            yield path, info.get("size")

    @contextmanager
    def _target(self, name: str) -> Iterator[str]:
        """Yield the path to write a file to. On a local disk, it becomes the file when the context
        ends without an error."""
        if self._is_local:
            self._fs.makedirs(self._root, exist_ok=True)
        with self._own(name, creates=True) as path:
            if not self._is_local:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                yield path
                return
            # No one can put a link at this name.
            partial = Path(f"{path}.{os.urandom(8).hex()}")
            try:
                yield str(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    @contextmanager
    def _own(self, name: str, *, creates: bool = False) -> Iterator[str]:
        """Yield a path that isn't reached through a link below the root. Locally, `creates` makes
        missing folders."""
        if self._is_local and name:
            with hold_path(Path(self._root), name, creates=creates) as local_path:
                yield str(local_path)
            return
        # Remote links can't be pinned, but the listing of each folder on the way names them.
        folder = ""
        for part in name.split("/"):
            if part and self._has_links and self._listing(folder).get(part):
                raise RefusedFileError(f"{self._join(name)}: expected no link")
            folder = posixpath.join(folder, part)
        yield self._join(name)


def is_absent(error: Exception) -> bool:
    """Return whether a file is missing. fsspec raises FileNotFoundError for all HTTP errors, so
    check its cause."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    # 403 is object stores' answer without permission to list.
    is_status = getattr(cause, "status", None) in (403, 404, 410)
    return is_status or isinstance(cause, FileNotFoundError | None)


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether an error is a timeout, or was raised while one was handled."""
    return error is not None and (
        isinstance(error, TimeoutError) or _is_timeout(error.__cause__ or error.__context__)
    )


class _Limit(NoOpCallback):
    """A callback that ends a transfer with an error after `max_bytes`. With other base classes than
    `NoOpCallback`, `hf://` is slow."""

    def __init__(self, path: str, max_bytes: float) -> None:
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes

    def call(self, *args: Any, **kwargs: Any) -> None:
        if max(self.value, self.size or 0) > self._max_bytes:
            raise RefusedFileError(
                f"{self._path} has more than {self._max_bytes:,.0f} bytes, the limit or "
                "the room on the disk"
            )


def _make_timeout() -> Any:
    """Return time limits of a client. By default, a transfer over HTTP may take 5 minutes in all,
    however fast it is, and one of Google's storage forever."""
    # Only these URLs need it.
    aiohttp = importlib.import_module("aiohttp")
    return aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)


async def _open_http_client(**options: Any) -> Any:
    """Return a client that reads at most `MOST_BYTES` of an answer into memory. fsspec reads
    listings and ranges whole."""
    # only needed for these URLs
    import aiohttp

    class LimitedResponse(aiohttp.ClientResponse):
        _body: bytes | None

        async def read(self) -> bytes:
            if self._body is None:
                body = bytearray()
                # In pieces, because an answer may state no length.
                async for block in self.content.iter_any():
                    body += block
                    if len(body) > MOST_BYTES:
                        self.close()
                        limit = f"{MOST_BYTES:,} bytes"
                        raise RefusedFileError(f"{self.url} answers with more than {limit}")
                self._body = bytes(body)
            return self._body

        async def text(self, *args: Any, **options: Any) -> str:
            """Return only the links of a page: fsspec's pattern takes cubic time, and a server may
            name a slow encoding."""
            page = (await self.read()).decode(errors="ignore")
            return "".join(f'<a href="{link}">' for link in _LINK.findall(page))

    return aiohttp.ClientSession(response_class=LimitedResponse, timeout=_make_timeout(), **options)
