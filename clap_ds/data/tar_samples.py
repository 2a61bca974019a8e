"""Read the items of a tar: its members grouped by name, as in WebDataset, without decoding them."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from webdataset.tariterators import group_by_keys

from clap_ds.data.clip import CAPTION_FORMATS, CLIP_FORMATS
from clap_ds.data.decoding import BrokenItemError
from clap_ds.data.shard_io import OpenFile, open_shard

Item = dict[str, Any]
"""Extension → content (bytes or a `Place` in the tar), with `__key__`, `__url__` and, for places,
`__file__`."""
Report = Callable[[str, str], None]
"""Called with the name of an unusable tar or item, and the reason."""
UNREADABLE = (
    tarfile.TarError,
    EOFError,
    ValueError,
    OverflowError,
    IndexError,
    RecursionError,
    MemoryError,
)
DAMAGE = (*UNREADABLE, OSError)  # errors of reading a damaged or deleted tar

_HEADER_BUFFER_BYTES = (
    2**13
)  # the default is megabytes on some file systems, which each seek to a header would read
_MOST_HEADER_BYTES = 2**20
_DIGITS = re.compile(
    rb"\d{256}"
)  # no file name has as many; tarfile before Python 3.11.10 takes quadratic time for them
_MOST_READ_BEHIND = 2**24  # bytes after the last member: block padding
_MOST_REMEMBERED = 200_000  # items per process, about 700 bytes each


class _Headers(io.BufferedReader):
    """A tar as tarfile reads it, which reads extended headers whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has more than {_MOST_HEADER_BYTES:,} bytes")
        content = super().read(size)
        if size > tarfile.BLOCKSIZE and _DIGITS.search(content):
            raise tarfile.ReadError("a header has more than 255 digits in a row")
        return content


class Place(NamedTuple):
    """Locate a member's content in its tar, in bytes."""

    start: int
    size: int

    def read(self, file: OpenFile) -> bytes:
        """Read the content. Raises BrokenItemError if the tar is truncated, and OSError."""
        content = file.read(self.start, self.size)
        if len(content) < self.size:
            raise BrokenItemError("its tar is truncated within it")
        return content


_remembered: dict[tuple[str | int, ...], list[Item]] = {}  # by file and version


def list_items(
    shard: str, report: Report, open_file: Callable[[], OpenFile] | None = None
) -> Iterator[Item]:
    """Yield the items of a tar (path or URL) in order without reading their contents, as far as the
    tar is readable."""
    try:
        file = open_file() if open_file else open_shard(shard)
        state = os.fstat(file.number)
        version = (
            shard,
            state.st_ino,
            state.st_size,
            state.st_mtime_ns,
        )  # inodes of deleted copies are reused
        for item in _remembered.get(version) or _read_headers(shard, file, version, report):
            yield {**item, "__file__": file}
    except DAMAGE as error:
        expected = "; expected an uncompressed tar" if isinstance(error, tarfile.ReadError) else ""
        report(shard, f"tar can't be read: {words(error)}{expected}")


def _read_headers(
    shard: str, file: OpenFile, version: tuple[str | int, ...], report: Report
) -> Iterator[Item]:
    """Yield items, and cache them all at the end if nothing was reported."""
    found: list[Item] = []
    problems: list[str] = []

    def tell(error: Exception) -> bool:  # a damaged tar, or a duplicate name in an item
        problems.append(str(error.args[0]))
        report(shard, problems[-1])
        return True

    for item in group_by_keys(_members(shard, file, tell), handler=tell):
        found.append(item)
        yield item
    if not problems and sum(map(len, _remembered.values())) + len(found) <= _MOST_REMEMBERED:
        _remembered[version] = found


def _members(shard: str, file: OpenFile, tell: Callable[[Exception], object]) -> Iterator[Item]:
    """Yield the files of a tar for `group_by_keys`. Detect damage and truncation, which tarfile
    treats as the end."""
    with (
        _Headers(io.FileIO(os.dup(file.number)), _HEADER_BUFFER_BYTES) as stream,
        tarfile.open(fileobj=stream, mode="r:") as tar,
    ):
        size = os.fstat(file.number).st_size
        offset = 0
        try:
            while member := tar.next():
                if tar.offset <= offset:
                    raise tarfile.ReadError("its headers point backwards")
                offset = tar.offset
                tar.__dict__["members"].clear()  # to save memory
                if member.isfile() and not member.issparse():
                    if member.offset_data + member.size > size:
                        raise EOFError("unexpected end of data")
                    place = Place(member.offset_data, member.size)
                    yield {"fname": member.name, "data": place, "__url__": shard}
            rest = file.read(tar.offset, _MOST_READ_BEHIND)
            if not rest or any(rest):
                raise EOFError(
                    f"end-of-archive mark missing, or followed by other than zeros, at byte {tar.offset:,}"
                )
        except UNREADABLE as error:
            tell(EOFError(f"tar is truncated or damaged ({words(error)}); using its readable part"))


def words(error: BaseException) -> str:
    return str(error.args[-1] if isinstance(error, OSError) and error.strerror else error) or repr(
        error
    )


def fetch(item: Item) -> None:
    """Replace the places in `item` by their contents. Raises like `Place.read`."""
    file = item.pop("__file__")
    for name, content in item.items():
        if isinstance(content, Place):
            item[name] = content.read(file)


def is_sample(item: Item) -> bool:
    """Return whether an item has audio or features, and a member that can hold captions."""
    return all(item.keys() & set(formats) for formats in (CLIP_FORMATS, CAPTION_FORMATS))


def samples_between(items: Iterator[Item], first: int, end: int | None) -> Iterator[Item]:
    """Yield a tar's items from sample `first` to before sample `end` (None: all), including items
    that aren't samples."""
    number = 0
    for item in items:
        if number >= first:
            yield item
        number += is_sample(item)
        if number == end:
            return
