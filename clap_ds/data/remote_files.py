"""Transfer files from and to folders that others can write, and from servers that may never stop sending.

No other module calls fsspec's transfers; a test holds that. Only regular files are transferred. No link below the folder that
the user named is followed. No more bytes are received than the caller allows and the disk has room for.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import NoOpCallback
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem

from clap_ds.config.files import MOST_BYTES, RefusedFileError, open_regular, own_path


class RemoteFiles:
    """Files by their names in the folder at a URL or path. The name `""` is the file at the URL itself, which may be a link.

    Methods raise RefusedFileError for links and for files that are too large, and any errors of the file system's package.
    """

    def __init__(self, url: str) -> None:
        fs, root = fsspec.url_to_fs(url)
        while isinstance(fs, CachingFileSystem):  # fsspec's caches have no limit
            fs = fs.fs
        self._fs = fs
        self.root = root.rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._links = cache(self._list_links)

    def ls(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return fsspec's descriptions of a folder's files and folders by name; of a missing folder, none."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._join(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {posixpath.basename(entry["name"].rstrip("/")): entry for entry in entries}

    def glob(self) -> list[str]:
        """Return the URLs that match the URL's wildcards, in order."""
        return sorted(str(self._fs.unstrip_protocol(path)) for path in self._fs.glob(self.root))

    def info(self, name: str = "") -> dict[str, Any]:
        """Return fsspec's description of a file or folder."""
        self._fs.invalidate_cache(self._join(name))
        return dict(self._fs.info(self._join(name)))

    def read_start(self, name: str, size: int) -> bytes:
        """Return up to `size` bytes of a file."""
        content = bytearray()
        with self._source(name) as (path, _), self._fs.open(path, "rb") as file:
            while block := file.read(size - len(content)):
                content += block
        return bytes(content)

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes."""
        content = self.read_start(name, most + 1)
        if len(content) > most:
            raise self._too_large(name, most)
        return content

    def download(self, name: str, to: Path, most: float) -> None:
        """Copy a file of at most `most` bytes to a local path in a folder that only this user can write.
        Raises OSError if the download is incomplete or the disk has no room for it; then there is no file."""
        to.unlink(missing_ok=True)
        try:
            with self._source(name) as (path, size):
                self._download(name, path, size, to, most)
        except BaseException:
            to.unlink(missing_ok=True)
            raise

    def _download(self, name: str, path: str, size: int | None, to: Path, most: float) -> None:
        disk = os.statvfs(to.parent)
        free_bytes = disk.f_bavail * disk.f_frsize
        limit = min(most, free_bytes)
        if size is not None:
            if size > most:
                raise self._too_large(name, most)
            if size > free_bytes:
                reason = f"has {size:,} bytes, but the disk has room for {free_bytes:,}"
                raise OSError(errno.ENOSPC, reason, self._join(name))
            limit = size
        self._fs.get_file(path, str(to), callback=_Limit(limit, self._too_large(name, limit)))
        received = to.stat().st_size
        if received > most:  # not every package reports progress
            raise self._too_large(name, most)
        if size not in (None, received):
            reason = f"download stopped after {received:,} bytes, expected {size:,}"
            raise OSError(errno.EIO, reason, self._join(name))

    def upload(self, folder: Path, source: str, name: str) -> None:
        """Create or replace a file by the one named `source` in a local folder."""
        with own_path(folder, source) as path, open_regular(path, os.O_NOFOLLOW) as file, self._target(name) as target:
            self._fs.put_file(f"/proc/self/fd/{file.fileno()}", target)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file."""
        with self._target(name) as target:
            self._fs.pipe_file(target, content)

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Delete a file, or a folder with its contents."""
        with self._own(name) as path:
            if recursive:
                self._fs.rm(path, recursive=True)
            else:
                self._fs.rm_file(path)

    def _join(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _too_large(self, name: str, most: float) -> RefusedFileError:
        return RefusedFileError(errno.EFBIG, f"has more than {most:,.0f} bytes", self._join(name))

    @contextmanager
    def _source(self, name: str) -> Iterator[tuple[str, int | None]]:
        """Yield a regular file's path, and its size if the file system tells it."""
        with self._own(name) as path:
            if self._is_local:
                with open_regular(path, os.O_NOFOLLOW if name else os.O_RDONLY) as file:
                    yield f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
                return
            info = self._fs.info(path)
            if info.get("type", "file") != "file":
                raise RefusedFileError(errno.EINVAL, "expected a regular file", path)
            yield path, info.get("size")

    @contextmanager
    def _target(self, name: str) -> Iterator[str]:
        """Yield the path to write a file to. On a local disk, it becomes the file when the context ends without an error."""
        if self._is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        with self._own(name, creates=True) as path:
            if self._is_local:
                partial = Path(path).with_name(f".{os.urandom(8).hex()}")  # no one can put a link at this name
                try:
                    yield str(partial)
                    partial.replace(path)
                finally:
                    partial.unlink(missing_ok=True)
            else:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                yield path

    @contextmanager
    def _own(self, name: str, *, creates: bool = False) -> Iterator[str]:
        """Yield a path that isn't reached through a link below the root. Locally, `creates` makes missing folders."""
        if self._is_local and name:
            with own_path(Path(self.root), name, creates=creates) as local_path:
                yield str(local_path)
            return
        folder = ""
        for part in name.split("/"):
            if part == ".." or (part and part in self._links(folder)):
                raise RefusedFileError(errno.ELOOP, "expected no link", self._join(name))
            folder = posixpath.join(folder, part)
        yield self._join(name)

    def _list_links(self, folder: str) -> set[str]:
        if "http" in self._fs.protocol:  # has none, and may refuse to list
            return set()
        return {name for name, entry in self.ls(folder).items() if is_link(entry)}


def is_link(entry: dict[str, Any]) -> bool:
    """Return whether fsspec describes a link."""
    return bool(entry.get("islink")) or entry.get("type") == "link"


class _Limit(NoOpCallback):
    """End a transfer with an error after `most` bytes. With other classes than `NoOpCallback`, `hf://` is slow."""

    def __init__(self, most: float, error: OSError) -> None:
        super().__init__()
        self._left, self._error = most, error

    def relative_update(self, inc: int = 1, **kwargs: Any) -> None:
        self._left -= inc
        if self._left < 0:
            raise self._error


async def _open_http_client(**options: Any) -> Any:
    """Return a client that reads at most `MOST_BYTES` of an answer into memory. fsspec reads listings and ranges whole."""
    import aiohttp  # only needed for these URLs

    class LimitedResponse(aiohttp.ClientResponse):
        _body: bytes | None

        async def read(self) -> bytes:
            if self._body is None:
                try:
                    await self.content.readexactly(MOST_BYTES + 1)
                except asyncio.IncompleteReadError as answer:
                    self._body = answer.partial
                else:
                    self.close()
                    raise RefusedFileError(errno.EFBIG, f"answers with more than {MOST_BYTES:,} bytes", str(self.url))
            return self._body

    return aiohttp.ClientSession(response_class=LimitedResponse, **options)


fsspec.config.conf.setdefault("http", {}).setdefault("get_client", _open_http_client)
