"""The items of one tar: what its members of the same name hold, as WebDataset groups them. Nothing is decoded here."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from webdataset.tariterators import group_by_keys

from clap_ds.data.captions import CAPTION_FORMATS
from clap_ds.data.samples import CLIP_FORMATS
from clap_ds.data.shard_io import OpenFile, open_shard

Item = dict[str, Any]
"""Extension → content (bytes, or a `Place` in the tar), with `__key__`, `__url__` and, where there are places, `__file__`."""
Report = Callable[[str, str], None]
"""Called for what can't be used, with its name and why."""
UNREADABLE = (tarfile.TarError, EOFError, ValueError, OverflowError, IndexError, RecursionError, MemoryError)
DAMAGE = (*UNREADABLE, OSError)  # what reading a damaged tar, or one that is gone, raises

_HEADER_BUFFER_BYTES = 2**13  # some file systems would have it be megabytes, which each jump to a header would read
_MOST_READ_BEHIND = 2**24  # a tar's end, where writers fill a block up
_MOST_REMEMBERED = 200_000  # items of a process, of some 700 bytes


class Place(NamedTuple):
    """Where a member's content lies in its tar, in bytes."""

    start: int
    size: int

    def read(self, file: OpenFile) -> bytes:
        """Read the content. Raises OSError; EOFError where the tar ends within it."""
        content = file.read(self.start, self.size)
        if len(content) < self.size:
            raise EOFError("the tar ends within it")
        return content


_remembered: dict[tuple[int, ...], list[Item]] = {}  # by file and version


def list_items(shard: str, report: Report, open_file: Callable[[], OpenFile] | None = None) -> Iterator[Item]:
    """List the items of a tar (path or URL) in order, their contents left in it. A damaged tar gives what can be read of it."""
    try:
        file = open_file() if open_file else open_shard(shard)
        state = os.fstat(file.number)
        version = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        for item in _remembered.get(version) or _read_headers(shard, file, version, report):
            yield {**item, "__file__": file}
    except DAMAGE as error:
        expected = "; expected a plain tar, not compressed" if isinstance(error, tarfile.ReadError) else ""
        report(shard, f"tar can't be read: {words(error)}{expected}")


def read_items(shard: str, report: Report) -> Iterator[Item]:
    """Read the items of a tar as `list_items`, with their contents."""
    for item in list_items(shard, report):
        try:
            fetch(item)
        except DAMAGE as error:
            report(f"{shard}: {item['__key__']}", words(error))
        else:
            yield item


def _read_headers(shard: str, file: OpenFile, version: tuple[int, ...], report: Report) -> Iterator[Item]:
    """Give items as they are met; all of them are remembered in the end, unless something was to report."""
    found: list[Item] = []
    problems: list[str] = []

    def tell(error: Exception) -> bool:  # of a damaged tar, or a name that comes twice in an item
        problems.append(str(error.args[0]))
        report(shard, problems[-1])
        return True

    for item in group_by_keys(_members(shard, file, tell), handler=tell):
        found.append(item)
        yield item
    if not problems and sum(map(len, _remembered.values())) + len(found) <= _MOST_REMEMBERED:
        _remembered[version] = found


def _members(shard: str, file: OpenFile, tell: Callable[[Exception], object]) -> Iterator[Item]:
    """Give all files in a tar as `group_by_keys` takes them. tarfile takes damage, or a cut between members, for the end."""
    with (
        os.fdopen(os.dup(file.number), "rb", _HEADER_BUFFER_BYTES) as stream,
        tarfile.open(fileobj=stream, mode="r:") as tar,
    ):
        size, offset = os.fstat(file.number).st_size, 0
        try:
            while member := tar.next():
                if tar.offset <= offset:
                    raise tarfile.ReadError("its headers lead back")
                offset = tar.offset
                tar.__dict__["members"].clear()  # which would be kept, of every member
                if member.isfile() and not member.issparse():
                    if member.offset_data + member.size > size:
                        raise EOFError("unexpected end of data")
                    place = Place(member.offset_data, member.size)
                    yield {"fname": member.name, "data": place, "__url__": shard}
            rest = file.read(tar.offset, _MOST_READ_BEHIND)
            if not rest or any(rest):
                raise EOFError(f"no end-of-archive mark, or more than zeros behind it, at byte {tar.offset:,}")
        except UNREADABLE as error:
            tell(EOFError(f"tar is truncated or damaged ({words(error)}); what can be read of it is used"))


def words(error: BaseException) -> str:
    return str(error.args[-1] if isinstance(error, OSError) and error.strerror else error) or repr(error)


def fetch(item: Item) -> None:
    """Read what was left in a tar, in place. Raises as `Place.read` does."""
    file = item.pop("__file__")
    for name, content in item.items():
        if isinstance(content, Place):
            item[name] = content.read(file)


def is_sample(item: Item) -> bool:
    """Tell whether an item has audio or features, and what a caption can be in: only such are counted."""
    return all(item.keys() & set(formats) for formats in (CLIP_FORMATS, CAPTION_FORMATS))


def count_samples(shard: str) -> int:
    return sum(map(is_sample, list_items(shard, lambda name, reason: None)))


def samples_between(items: Iterator[Item], first: int, end: int | None) -> Iterator[Item]:
    """Give a tar's items from one sample's number up to another's, or to its end; what is no sample there, too."""
    number = 0
    for item in items:
        if number >= first:
            yield item
        number += is_sample(item)
        if number == end:
            return
