"""The items of one tar: what its members of the same name hold, as WebDataset groups them. Nothing is decoded here.

Content can stay where it is and be read later if it is wanted: of items that a resumed run passes over, or all audio of an
evaluation. Either way the items are the same, in the same order, in damaged tars too.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from webdataset.tariterators import group_by_keys

from clap_ds.data.items import CAPTION_FORMATS, CLIP_FORMATS
from clap_ds.data.shard_files import is_remote, open_shard

Item = dict[str, Any]  # extension → content (bytes, or a `Place` in the tar), with `__key__` and `__url__`
Report = Callable[[str, str], None]  # called for what can't be used, with its name and why
DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error)  # what reading a damaged tar, or one that is gone, raises


class Place(NamedTuple):
    """Where a member's content lies in its tar, in bytes, uncompressed."""

    start: int
    size: int


class _Header(tarfile.TarInfo):
    """Notes in the tar that its closing zeros were met: tarfile takes damage, or a cut between members, for the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # as old as tarfile, but not in its documentation
            tar.has_ended = True  # type: ignore[attr-defined]
            raise


@contextmanager
def _open_tar(shard: str, any_order: bool) -> Iterator[Any]:
    mode: Any = "r:*" if any_order or not is_remote(shard) else "r|*"
    with open_shard(shard, any_order=any_order) as stream, tarfile.open(None, mode, stream, tarinfo=_Header) as tar:
        yield tar


def read_items(
    shard: str, report: Report, *, leave: Callable[[str], bool] = lambda member: False, any_order: bool = False
) -> Iterator[Item]:
    """The items of a tar (path or URL) in order, compressed or not. A damaged tar gives what can be read of it.

    Args:
        leave: whether the content of a member of this name may stay in the tar, as a `Place`. Heeded where that is cheap (in
            local, uncompressed tars), or everywhere with `any_order`, which opens the others for reading out of order, too.
    """

    def group_error(error: Exception) -> bool:
        report(shard, f"{error.args[0] if error.args else error!r}")
        return True

    try:
        with _open_tar(shard, any_order) as tar:
            yield from group_by_keys(_members(shard, tar, report, leave, any_order), handler=group_error)
    except DAMAGE as error:
        report(shard, f"tar can't be read: {words(error)}")


def _members(shard: str, tar: Any, report: Report, leave: Callable[[str], bool], any_order: bool) -> Iterator[Item]:
    is_plain_file = isinstance(tar.fileobj, io.BufferedReader) and not is_remote(shard)
    size = os.stat(shard).st_size if is_plain_file else None
    try:
        while (member := tar.next()) is not None:
            tar.members.clear()  # would grow with the tar
            if not member.isfile():
                continue
            if size is not None and member.offset_data + member.size > size:
                raise tarfile.ReadError("unexpected end of data")
            is_left = (size is not None or any_order) and leave(member.name)
            content = Place(member.offset_data, member.size) if is_left else tar.extractfile(member).read()
            yield {"fname": member.name, "data": content, "__url__": shard}
        if not getattr(tar, "has_ended", False):
            raise EOFError("no end-of-archive mark")
    except (EOFError, tarfile.ReadError) as error:
        is_cut = isinstance(error, EOFError) or "unexpected end" in str(error)
        what = "is truncated or damaged" if is_cut else "can't be read"
        report(shard, f"tar {what} ({words(error)}); what can be read of it is used")


def words(error: BaseException) -> str:
    """What an error of `DAMAGE` says, for people."""
    return str(error.args[-1] if isinstance(error, OSError) and error.strerror else error) or repr(error)


class ContentReader:
    """Reads content that was left in tars, in any order. Keeps the tar last read open; `close` when done."""

    def __init__(self) -> None:
        self._shard: str | None = None
        self._tar: Any = None
        self._stack = ExitStack()

    def read(self, shard: str, place: Place) -> bytes:
        """Raises one of `DAMAGE`; EOFError where the tar ends before the place does."""
        if shard != self._shard:
            self.close()
            self._tar = self._stack.enter_context(_open_tar(shard, any_order=True))
            self._shard = shard
        self._tar.fileobj.seek(place.start)
        content: bytes = self._tar.fileobj.read(place.size)
        if len(content) < place.size:
            raise EOFError("the tar ends within it")
        return content

    def close(self) -> None:
        self._shard = None
        self._stack.close()


def fetch(item: Item) -> None:
    """Read what was left in the tar, in place. Raises as `ContentReader.read` does."""
    with closing(ContentReader()) as reader:
        for name, content in item.items():
            if isinstance(content, Place):
                item[name] = reader.read(item["__url__"], content)


def count_samples(shard: str) -> int:
    """Items of a tar that have audio or features, and what a caption can be in; reads headers alone where that is possible."""
    items = read_items(shard, lambda name, reason: None, leave=lambda member: True)
    return sum(all(item.keys() & set(formats) for formats in (CLIP_FORMATS, CAPTION_FORMATS)) for item in items)
