"""The items of one tar: what its members of the same name hold, as WebDataset groups them. Nothing is decoded here.

Audio can stay where it is and be read later if it is wanted: of items that wait to be shuffled, or that a resumed run passes
over, or all audio of an evaluation. Either way the items are the same, in the same order, in damaged tars too.

Of local tars the disk is asked for what comes next before it is read, and plain headers are read here, for tarfile takes far
longer for them. It reads all others, and finds the damage.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

from webdataset.tariterators import group_by_keys

from clap_ds.data.captions import CAPTION_FORMATS
from clap_ds.data.decoding import Encoded
from clap_ds.data.items import CLIP_FORMATS
from clap_ds.data.shard_files import is_remote, open_shard

Item = dict[str, Any]  # extension → content (bytes, or a `Place` in the tar), with `__key__` and `__url__`
Report = Callable[[str, str], None]  # called for what can't be used, with its name and why
DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error)  # what reading a damaged tar, or one that is gone, raises

_READ_AHEAD_BYTES, _ASKED_FOR_BYTES = 2**26, 2**17  # Linux heeds a request up to its own read-ahead, by default 128 KB
_MOST_READ_AT_ONCE = 2**22
_TEXTS = tuple(f".{extension}" for extension in CAPTION_FORMATS)

# Of a file, or of a PAX header: without a prefix to its name, and all numbers are octal but for large user and group numbers.
_PLAIN_HEADER = re.compile(
    rb"(?=([^\0]{1,100})).{100}(?:[0-7]{6}[0-7 ][\0 ]|\x80.{7}){3}([0-7]{11})[\0 ][0-7]{11}[\0 ]([0-7]{6})\0 ([0x])"
    rb".{172}(?:[0-7]{6}[0-7 ][\0 ]|\0{8}){2}\0.{166}",
    re.DOTALL,
)
_PAX_TIME = re.compile(rb"([0-9]+) mtime=[0-9.]+\n")  # all that WebDataset's own writer puts into PAX headers


class LocalFile:
    """A file's descriptor, closed with the last reference to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.number = -1
        self.number = os.dup(stream.fileno())

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class Place(NamedTuple):
    """Where a member's content lies in its tar, in bytes, uncompressed."""

    start: int
    size: int
    file: LocalFile | None = None  # the tar, kept open for this

    def read(self) -> Encoded:
        """The content, where `file` is there: read at once, or if it is long mapped, for a crop needs little of it.

        Mapping everything would be slower (a clip of 128 KB 21 µs, not 17; of 960 KB 122, not 75), and a disk that fails under
        a map ends the process. Raises OSError; EOFError where the tar ends within it.
        """
        assert self.file is not None
        if self.size > _MOST_READ_AT_ONCE:
            inset = self.start % mmap.ALLOCATIONGRANULARITY
            length, offset = inset + self.size, self.start - inset
            with contextlib.suppress(OSError, ValueError):  # a file system that can't; a tar that ends within it
                return memoryview(mmap.mmap(self.file.number, length, access=mmap.ACCESS_READ, offset=offset))[inset:]
        content = os.pread(self.file.number, self.size, self.start)
        if len(content) < self.size:
            raise EOFError("the tar ends within it")
        return content


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
def _open_tar(shard: str, any_order: bool, copy: IO[bytes] | None = None) -> Iterator[Any]:
    mode: Any = "r|*" if is_remote(shard) and not (any_order or copy) else "r:*"
    with (
        copy or open_shard(shard, any_order=any_order) as stream,
        tarfile.open(None, mode, stream, tarinfo=_Header) as tar,
    ):
        yield tar


def _local_file(tar: Any) -> LocalFile | None:
    """The tar's file, unless it is remote or compressed."""
    stream = tar.fileobj
    return LocalFile(stream) if isinstance(getattr(stream, "raw", None), io.FileIO) else None


def read_items(
    shard: str, report: Report, *, leave_audio: bool = False, any_order: bool = False, copy: IO[bytes] | None = None
) -> Iterator[Item]:
    """The items of a tar (path or URL) in order, compressed or not. A damaged tar gives what can be read of it.

    Args:
        leave_audio: leave all but captions in the tar, where that is a local one, uncompressed: items have `Place`s instead,
            which `fetch` reads.
        any_order: leave it in any tar, for `ContentReader`; remote ones are opened for reading out of order.
        copy: a remote tar's content in a local file, to be read instead, and closed.
    """

    def group_error(error: Exception) -> bool:
        report(shard, f"{error.args[0] if error.args else error!r}")
        return True

    try:
        with _open_tar(shard, any_order, copy) as tar:
            yield from group_by_keys(_members(shard, tar, report, leave_audio, any_order), handler=group_error)
    except DAMAGE as error:
        report(shard, f"tar can't be read: {words(error)}")


def _members(shard: str, tar: Any, report: Report, leave_audio: bool, any_order: bool) -> Iterator[Item]:
    file = _local_file(tar)
    size = os.fstat(file.number).st_size if file else 0
    is_left = any_order or (leave_audio and file is not None)
    kept_open = None if any_order else file
    asked_for, needed = 0, 0 if any_order else size  # content that is read later, if at all, isn't worth it
    try:
        while True:
            while asked_for < min(needed, tar.offset + _READ_AHEAD_BYTES):
                os.posix_fadvise(tar.fileobj.fileno(), asked_for, _ASKED_FOR_BYTES, os.POSIX_FADV_WILLNEED)
                asked_for += _ASKED_FOR_BYTES
            member = (_plain_member(tar) if file else None) or tar.next()
            if member is None:
                break
            tar.members.clear()  # would grow with the tar
            if not member.isfile():
                continue
            place = Place(member.offset_data, member.size, kept_open)
            if file and not member.sparse and place.start + place.size > size:
                raise tarfile.ReadError("unexpected end of data")
            if is_left and not member.sparse and not member.name.lower().endswith(_TEXTS):
                content: Any = place
            elif file and not member.sparse:
                tar.fileobj.seek(place.start)
                content = tar.fileobj.read(place.size)
            else:
                content = tar.extractfile(member).read()
            yield {"fname": member.name, "data": content, "__url__": shard}
        if not getattr(tar, "has_ended", False):
            raise EOFError("no end-of-archive mark")
        if file and (hidden := _first_after(file, tar.offset, size)) is not None:
            raise EOFError(f"zeros end it at byte {tar.offset:,}, there is more from byte {hidden:,} on")
    except (EOFError, tarfile.ReadError) as error:
        is_cut = isinstance(error, EOFError) or "unexpected end" in str(error)
        what = "is truncated or damaged" if is_cut else "can't be read"
        report(shard, f"tar {what} ({words(error)}); what can be read of it is used")


def _first_after(file: LocalFile, end: int, size: int) -> int | None:
    """Where there is anything but zeros behind the end of a tar, which is filled up with them."""
    for start in range(end, size, _ASKED_FOR_BYTES):
        content = os.pread(file.number, _ASKED_FOR_BYTES, start)
        if rest := content.lstrip(b"\0"):
            return start + len(content) - len(rest)
    return None


def _plain_member(tar: Any) -> tarfile.TarInfo | None:
    """What `tar.next()` would give of a local tar, where that is a file with a plain header; None leaves it to that."""
    if tar.firstmember is not None or tar.pax_headers:  # headers for all that follow
        return None
    offset = tar.offset
    tar.fileobj.seek(offset)
    header = _plain_header(tar.fileobj)
    if header and header[4] == b"x" and int(header[2], 8) < tarfile.BLOCKSIZE:
        record = _PAX_TIME.match(tar.fileobj.read(tarfile.BLOCKSIZE))
        if record and record.end() == int(record[1]) == int(header[2], 8):
            offset += 2 * tarfile.BLOCKSIZE
            header = _plain_header(tar.fileobj)
    if not header or header[4] != b"0":
        tar.fileobj.seek(0)  # away from the offset, whereupon tarfile looks whether the content before it is whole
        return None
    member = tarfile.TarInfo(header[1].decode(tar.encoding, tar.errors))
    member.size = int(header[2], 8)
    member.offset_data = offset + tarfile.BLOCKSIZE
    tar.offset = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return member


def _plain_header(stream: IO[bytes]) -> re.Match[bytes] | None:
    block = stream.read(tarfile.BLOCKSIZE)
    header = _PLAIN_HEADER.fullmatch(block)
    return header if header and sum(block) - sum(block[148:156]) + 8 * ord(" ") == int(header[3], 8) else None


def words(error: BaseException) -> str:
    """What an error of `DAMAGE` says, for people."""
    return str(error.args[-1] if isinstance(error, OSError) and error.strerror else error) or repr(error)


class ContentReader:
    """Reads content that was left in tars, in any order. Keeps the tar last read open; `close` when done."""

    def __init__(self) -> None:
        self._shard: str | None = None
        self._tar: Any = None
        self._file: LocalFile | None = None
        self._stack = ExitStack()

    def read(self, shard: str, place: Place) -> Encoded:
        """Raises one of `DAMAGE`; EOFError where the tar ends before the place does."""
        if shard != self._shard:
            self.close()
            self._tar = self._stack.enter_context(_open_tar(shard, any_order=True))
            self._file = _local_file(self._tar)
            self._shard = shard
        if self._file:
            return place._replace(file=self._file).read()
        self._tar.fileobj.seek(place.start)
        content: bytes = self._tar.fileobj.read(place.size)
        if len(content) < place.size:
            raise EOFError("the tar ends within it")
        return content

    def close(self) -> None:
        self._shard = self._tar = self._file = None
        self._stack.close()


def fetch(item: Item) -> None:
    """Read what was left in a local tar, in place. Raises as `Place.read` does."""
    for name, content in item.items():
        if isinstance(content, Place):
            item[name] = content.read()


def is_sample(item: Item) -> bool:
    """Whether an item has audio or features, and what a caption can be in: only such are counted."""
    return all(item.keys() & set(formats) for formats in (CLIP_FORMATS, CAPTION_FORMATS))


def count_samples(shard: str) -> int:
    """Samples in a tar; audio isn't read where that is possible."""
    return sum(map(is_sample, read_items(shard, lambda name, reason: None, any_order=True)))


def samples_between(items: Iterator[Item], first: int, end: int | None) -> Iterator[Item]:
    """Of a tar's items, those from one sample's number up to another's, or to its end; what is no sample there, too."""
    number = 0
    for item in items:
        if number >= first:
            yield item
        number += is_sample(item)
        if number == end:
            return
