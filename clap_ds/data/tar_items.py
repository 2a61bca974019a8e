"""The items of one tar: what its members of the same name hold, as WebDataset groups them. Nothing is decoded here.

Made for going on in the middle of an epoch: the content of items that are to be passed over can stay where it is, and is read
later if it is wanted after all. Both ways give the same items in the same order, in damaged tars too.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from webdataset.tariterators import group_by_keys

from clap_ds.data.items import AUDIO_FORMATS, CAPTION_FORMATS
from clap_ds.data.shard_files import is_remote, open_shard

Item = dict[str, Any]
"""Extension → content (bytes, or a `Place` in the tar), with `__key__` and `__url__`."""

Report = Callable[[str, str], None]
"""Told of what can't be used: its name, and why."""

_DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error)


class Place(NamedTuple):
    """Where a member's content lies in its tar, in bytes."""

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


def read_items(shard: str, report: Report, *, leave: Callable[[], bool] = lambda: False) -> Iterator[Item]:
    """The items of a tar in order, compressed or not. A damaged tar gives what can be read of it.

    Args:
        shard: path or URL.
        leave: asked before each member: whether its content may stay in the tar. Heeded where a tar can be read out of order:
            local, uncompressed.
    """

    def member_error(error: Exception) -> bool:
        report(shard, f"{error.args[0] if error.args else error!r}")
        return True

    try:
        with open_shard(shard) as stream:
            yield from group_by_keys(_members(shard, stream, report, leave), handler=member_error)
    except _DAMAGE as error:
        report(shard, f"tar can't be read: {_words(error)}")


def _members(
    shard: str, stream: IO[bytes], report: Report, leave: Callable[[], bool]
) -> Iterator[dict[str, bytes | Place | str]]:
    try:
        with tarfile.open(fileobj=stream, mode="r|*" if is_remote(shard) else "r:*", tarinfo=_Header) as tar:
            # Of a tar that is decompressed on the way, neither the size is known nor is it cheap to pass anything over.
            size = os.fstat(stream.fileno()).st_size if tar.fileobj is stream else None
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # would grow with the tar
                if not member.isfile():
                    continue
                if size is not None and member.offset_data + member.size > size:
                    raise tarfile.ReadError("unexpected end of data")
                if size is not None and leave():
                    yield {"fname": member.name, "data": Place(member.offset_data, member.size), "__url__": shard}
                    continue
                content = tar.extractfile(member)
                assert content is not None
                yield {"fname": member.name, "data": content.read(), "__url__": shard}
            if not getattr(tar, "has_ended", False):
                raise EOFError("no end-of-archive mark")
    except (EOFError, tarfile.ReadError) as error:
        is_cut = isinstance(error, EOFError) or "unexpected end" in str(error)
        what = "is truncated or damaged" if is_cut else "can't be read"
        report(shard, f"tar {what} ({_words(error)}); what can be read of it is used")


def _words(error: BaseException) -> str:
    return str(error.args[-1] if isinstance(error, OSError) and error.strerror else error) or repr(error)


def fetch(item: Item) -> None:
    """Read what was left in the tar.

    Raises:
        OSError: it can't be read any more.
    """
    places = {name: place for name, place in item.items() if isinstance(place, Place)}
    if places:
        with open(item["__url__"], "rb") as stream:
            for name, place in places.items():
                stream.seek(place.start)
                item[name] = stream.read(place.size)


def count_samples(shard: str) -> int:
    """Items of a tar that have audio and something a caption can be in; headers alone are read where that is possible."""
    return sum(
        any(name in item for name in AUDIO_FORMATS) and any(name in item for name in CAPTION_FORMATS)
        for item in read_items(shard, lambda name, reason: None, leave=lambda: True)
    )
