"""Find tars, and read and write the `manifest.json` of their folders: kind, and items, bytes,
seconds and checksum per tar.

Read the items of a tar: its members grouped by name, as in WebDataset, without decoding them.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import math
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from braceexpand import braceexpand
from pydantic import Field, TypeAdapter
from webdataset.tariterators import group_by_keys

from clap_ds.config.model import AudioConfig, ClapConfig, Count
from clap_ds.data.clip import CAPTION_FORMATS, CLIP_FORMATS
from clap_ds.data.decoding import RESAMPLING_FILTER, BrokenItemError
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_io import (
    KINDS,
    Kind,
    OpenFile,
    again,
    check_url,
    is_absent,
    is_remote,
    open_shard,
)
from clap_ds.utils.errors import printable
from clap_ds.utils.files import MOST_BYTES, parse_json, write_atomically

FIELD = "clap.data.shards"
HUB_TOKENIZER = "FacebookAI/roberta-base"
MANIFEST = "manifest.json"
FILES_READ = 8
BYTES_READ = 2**20
"""Of how many files `describe_contents` reads how many bytes."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    items: Count
    bytes: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]  # of audio
    sha256: str  # of the whole file, in hex


FRONT_END = (
    "sample_rate",
    "num_samples",
    "stft_window",
    "hop_size",
    "mel_bins",
    "fmin",
    "fmax",
    "fusion",
)
"""Fields of `AudioConfig` that determine features."""
FrontEnd = dict[str, Any]


def front_end_of(audio: AudioConfig) -> FrontEnd:
    return audio.model_dump(include={*FRONT_END}) | {"resampling": RESAMPLING_FILTER}


@dataclass(frozen=True)
class ShardManifest:
    """Describe a folder's tars by file name, their kind and, for prepared kinds, the front end."""

    shards: Mapping[str, ShardRecord]
    kind: Kind = "encoded"
    front_end: FrontEnd | None = None


def expand_shards(shards: str | list[str], field: str = FIELD) -> list[str]:
    """Expand paths or URLs with braces and wildcards to tar files, in order. Raises ValueError for
    none."""
    names: list[str] = []
    try:
        for pattern in [shards] if isinstance(shards, str) else shards:
            for name in braceexpand(pattern.removeprefix("file://")):
                names += _matches(name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if not names:
        raise ValueError(f"{field}: expected at least one tar file, found an empty list")
    for name in names:
        path = Path(name)
        if is_remote(name) or path.is_file():
            continue
        problem = "is not a regular file" if path.exists() else "does not exist"
        if path.is_dir():
            problem = "is a folder; expected its tars, as in 'folder/*.tar'"
        raise ValueError(f"{field}: {name} {problem} (working folder: {Path.cwd()})")
    return names


def _matches(name: str) -> list[str]:
    """Expand wildcards, in order. Raises ValueError for no match."""
    found = [name]
    if is_remote(name):
        check_url(name)
        if "*" in name or "[" in name:  # not ?, which starts a URL's query
            try:
                found = RemoteFiles(name).glob()
            except Exception as error:  # any error of the file system package
                raise ValueError(
                    f"{name!r} can't be listed: {type(error).__name__}: {error}"
                ) from None
    elif glob.has_magic(name) and not Path(name).exists():
        found = sorted(glob.glob(name))
    if not found:
        raise ValueError(f"no file matches {name!r} (working folder: {Path.cwd()})")
    return found


def folder_of(shard: str) -> str:
    return shard.rpartition("/")[0] or "."


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: str) -> ShardManifest:
    """Read the manifest of a folder or URL; an empty one if missing. Raises ValueError if
    unreadable."""
    path = f"{folder}/{MANIFEST}"
    try:
        content = parse_json(_read_start(path, MOST_BYTES))
        is_own = isinstance(content, dict) and "shards" in content  # else another program's
        return TypeAdapter(ShardManifest).validate_python(content) if is_own else ShardManifest({})
    except Exception as error:  # any error of the file system package
        if isinstance(error, NotADirectoryError | IsADirectoryError | PermissionError) or is_absent(
            error
        ):
            return ShardManifest(
                {}
            )  # without permission to list, object stores deny access to missing files
        reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{path} can't be read: {' '.join(str(reason).split())}") from None


def _read_start(path: str, size: int) -> bytes:
    """Read up to `size` bytes of a regular file or URL."""
    return again(lambda: RemoteFiles(path).read_start("", size))


def describe_contents(paths: Sequence[str]) -> str:
    """Describe what files contain, the same wherever they are: their number, and a digest of all
    names and of the beginnings of the first files. Raises ValueError if one can't be read."""
    by_name = sorted(paths, key=lambda path: Path(path).name)
    digest = hashlib.sha256(repr([Path(path).name for path in by_name]).encode())
    for path in by_name[:FILES_READ]:
        try:
            digest.update(_read_start(path, BYTES_READ))
        except Exception as error:  # any error of the file system package
            raise ValueError(f"{path} can't be read: {error!r}") from None
    return f"{len(paths)} file(s) ({digest.hexdigest()[:12]})"


def kind_of(
    shards: Iterable[str], model: ClapConfig, field: str = FIELD, warns: bool = True
) -> Kind:
    """Return the kind of these shards from their folders' manifests; `encoded` without one or if
    mixed with `waveform`. `warns` prints folders that were prepared with another resampling filter.
    Raises ValueError for kinds that can't be mixed and for another model's front end."""
    # kind → its last folder
    own = front_end_of(model.audio)
    kinds = dict[Kind, str]()
    for folder in dict.fromkeys(map(folder_of, shards)):
        manifest = read_manifest(folder)
        found = manifest.front_end or {}
        matters = {"encoded": (), "waveform": ("sample_rate",), "mel": FRONT_END}[manifest.kind]
        if others := [
            f"{name} is {found.get(name)}, not {own[name]}"
            for name in matters
            if found.get(name) != own[name]
        ]:
            where = f"{field}: {folder} was prepared for another model than {model.name}"
            raise ValueError(f"{where}: {', '.join(others)}")
        if warns and found and found.get("resampling") != RESAMPLING_FILTER:
            print(
                f"warning: {field}: {printable(folder)} was prepared with another resampling filter than {RESAMPLING_FILTER}. "
                "Unless its files had the model's sample rate or a higher one, they have another spectrum than encoded "
                "audio: prepare them again (clap-ds shards prepare)",
                file=sys.stderr,
            )
        kinds[manifest.kind] = folder
    if "mel" in kinds and len(kinds) > 1:
        found_in = " and ".join(f"{kind} in {folder}" for kind, folder in sorted(kinds.items()))
        raise ValueError(
            f"{field}: {found_in} can't be mixed; prepare all as mel, or none (clap-ds shards prepare)"
        )
    return next(kind for kind in KINDS if kind in kinds)


def samples_of(shards: Sequence[str], most_bytes: float = math.inf) -> list[int] | None:
    """Count each tar's samples from manifests or, for up to `most_bytes` of local tars, headers.
    Return None otherwise."""
    records = _find_records(shards)
    unknown = [tar for tar, record in zip(shards, records, strict=True) if record is None]
    if (
        any(map(is_remote, unknown))
        or sum(Path(tar).stat().st_size for tar in unknown) > most_bytes
    ):
        return None
    counted = {
        tar: sum(map(is_sample, list_items(tar, lambda name, reason: None))) for tar in unknown
    }
    return [
        record.items if record else counted[tar]
        for tar, record in zip(shards, records, strict=True)
    ]


def count_bytes(shards: Sequence[str]) -> dict[str, int]:
    """Return each shard's size by its folder's manifest or, of a local one, by its file; 0 if
    neither tells it."""
    sizes: dict[str, int] = {}
    for shard, record in zip(shards, _find_records(shards), strict=True):
        if record:
            sizes[shard] = record.bytes
        else:
            sizes[shard] = 0 if is_remote(shard) else Path(shard).stat().st_size
    return sizes


def _find_records(shards: Sequence[str]) -> list[ShardRecord | None]:
    manifests = {folder: read_manifest(folder).shards for folder in set(map(folder_of, shards))}
    return [manifests[folder_of(tar)].get(tar.rpartition("/")[2]) for tar in shards]


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
