"""Describe tars and list their items.

`expand_shards` finds tars by their patterns. A folder's `manifest.json` states the kind of its
tars, and each tar's items, bytes, seconds and checksum. `list_items` reads the headers of one tar,
and groups its members by name to items, as in WebDataset. Contents stay in the file until `fetch`.
"""

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from braceexpand import braceexpand
from pydantic import Field, TypeAdapter
from webdataset.tariterators import group_by_keys

from clap_ds.config.model import AudioConfig, ClapConfig, Count
from clap_ds.config.urls import check_url, is_remote
from clap_ds.data.clip import CAPTION_FORMATS, CLIP_FORMATS
from clap_ds.data.decoding import RESAMPLING_FILTER, BrokenItemError
from clap_ds.data.remote_files import RemoteFiles, is_absent
from clap_ds.data.shard_io import KINDS, Kind, OpenFile, open_shard
from clap_ds.utils.errors import printable
from clap_ds.utils.files import MOST_BYTES, parse_json, write_atomically

FIELD = "clap.data.shards"
HUB_TOKENIZER = "FacebookAI/roberta-base"
MANIFEST = "manifest.json"
# Of so many files, `describe_contents` reads so many bytes.
_NUM_DESCRIBED_FILES = 8
_DESCRIBED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ShardRecord:
    items: Count
    bytes: Count
    # of audio
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
    # of the whole file, in hex
    sha256: str


_FRONT_END_FIELDS = "sample_rate num_samples stft_window hop_size mel_bins fmin fmax fusion"
FRONT_END = tuple(_FRONT_END_FIELDS.split())
"""Fields of `AudioConfig` that determine features."""
FrontEnd = dict[str, Any]


def front_end_of(audio: AudioConfig) -> FrontEnd:
    return audio.model_dump(include={*FRONT_END}) | {"resampling": RESAMPLING_FILTER}


@dataclass(frozen=True)
class ShardManifest:
    """A folder's tars by file name, their kind and, for prepared kinds, the front end. `left_out`
    counts clips that the user didn't want, by reason."""

    shards: Mapping[str, ShardRecord]
    kind: Kind = "encoded"
    front_end: FrontEnd | None = None
    left_out: Mapping[str, Count] = field(default_factory=dict)


def expand_shards(shards: str | list[str], field: str = FIELD) -> list[str]:
    """Expand paths or URLs with braces and wildcards to tar files, in order. Raises ValueError for
    none."""
    names: list[str] = []
    try:
        for pattern in [shards] if isinstance(shards, str) else shards:
            for name in braceexpand(pattern.removeprefix("file://")):
                names += _expand_wildcards(name)
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


def _expand_wildcards(name: str) -> list[str]:
    """Return the matching names in order. Raises ValueError for none."""
    names = [name]
    if is_remote(name):
        check_url(name)
        # not for ?, which starts a URL's query
        if "*" in name or "[" in name:
            try:
                names = RemoteFiles(name).glob()
            # any error of the file system package
            except Exception as error:
                raise ValueError(
                    f"{name!r} can't be listed: {type(error).__name__}: {error}"
                ) from None
    elif glob.has_magic(name) and not Path(name).exists():
        names = sorted(glob.glob(name))
    if not names:
        raise ValueError(f"no file matches {name!r} (working folder: {Path.cwd()})")
    return names


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
        if isinstance(content, dict) and "shards" in content:
            return TypeAdapter(ShardManifest).validate_python(content)
    except (NotADirectoryError, IsADirectoryError, PermissionError):
        # Without permission to list, object stores deny access to missing files.
        pass
    # any error of the file system package
    except Exception as error:
        if not is_absent(error):
            # fsspec raises FileNotFoundError for all errors of HTTP.
            reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
            raise ValueError(f"{path} can't be read: {' '.join(str(reason).split())}") from None
    # none, or another program's
    return ShardManifest({})


def _read_start(path: str, size: int) -> bytes:
    """Read up to `size` bytes of a regular file or URL."""
    return RemoteFiles(path).read_start("", size)


def describe_contents(paths: Sequence[str]) -> str:
    """Describe what files contain, the same wherever they are: their number, and a digest of all
    names and of the beginnings of the first files. Raises ValueError if one can't be read."""
    # Without folders, which differ between clusters.
    by_name = sorted(paths, key=lambda path: Path(path).name)
    digest = hashlib.sha256(repr([Path(path).name for path in by_name]).encode())
    for path in by_name[:_NUM_DESCRIBED_FILES]:
        try:
            digest.update(_read_start(path, _DESCRIBED_BYTES))
        # any error of the file system package
        except Exception as error:
            raise ValueError(f"{path} can't be read: {error!r}") from None
    return f"{len(paths)} file(s) ({digest.hexdigest()[:12]})"


def kind_of(
    shards: Iterable[str], model: ClapConfig, field: str = FIELD, warns: bool = True
) -> Kind:
    """Return the kind of these shards from their folders' manifests; `encoded` without one or if
    mixed with `waveform`. `warns` prints folders that were prepared with another resampling filter.
    Raises ValueError for kinds that can't be mixed and for another model's front end."""
    # the last folder of each kind
    folders: dict[Kind, str] = {}
    for folder in dict.fromkeys(map(folder_of, shards)):
        manifest = read_manifest(folder)
        folders[manifest.kind] = folder
        _check_front_end(manifest, model, f"{field}: {folder}")
        front_end = manifest.front_end
        if warns and front_end and front_end.get("resampling") != RESAMPLING_FILTER:
            print(
                f"warning: {field}: {printable(folder)} was prepared with another resampling "
                f"filter than {RESAMPLING_FILTER}. Unless its files had the model's sample rate or "
                "a higher one, they have another spectrum than encoded audio: prepare them again "
                "(clap-ds shards prepare)",
                file=sys.stderr,
            )
    if "mel" in folders and len(folders) > 1:
        kinds = " and ".join(f"{kind} in {folder}" for kind, folder in sorted(folders.items()))
        raise ValueError(
            f"{field}: {kinds} can't be mixed; prepare all as mel, or none (clap-ds shards prepare)"
        )
    # `KINDS` begins with the kind whose reader also reads the next one.
    return next(kind for kind in KINDS if kind in folders)


def _check_front_end(manifest: ShardManifest, model: ClapConfig, where: str) -> None:
    """Raise ValueError if prepared shards don't fit the model."""
    relevant = {"encoded": (), "waveform": ("sample_rate",), "mel": FRONT_END}[manifest.kind]
    expected = front_end_of(model.audio)
    front_end = manifest.front_end or {}
    differences = [
        f"{name} is {front_end.get(name)}, not {expected[name]}"
        for name in relevant
        if front_end.get(name) != expected[name]
    ]
    if differences:
        raise ValueError(
            f"{where} was prepared for another model than {model.name}: {', '.join(differences)}"
        )


def samples_of(shards: Sequence[str], max_bytes: float = math.inf) -> list[int] | None:
    """Count each tar's samples from manifests or, for up to `max_bytes` of local tars, headers.
    Return None otherwise."""
    records = _find_records(shards)
    uncounted = [tar for tar, record in zip(shards, records, strict=True) if record is None]
    if any(map(is_remote, uncounted)):
        return None
    if sum(Path(tar).stat().st_size for tar in uncounted) > max_bytes:
        return None
    counts = []
    for tar, record in zip(shards, records, strict=True):
        counts.append(record.items if record else sum(map(is_sample, list_items(tar))))
    return counts


def count_bytes(shards: Sequence[str]) -> dict[str, int]:
    """Return each shard's size by its folder's manifest or, of a local one, by its file; 0 if
    neither tells it."""
    sizes = dict.fromkeys(shards, 0)
    for shard, record in zip(shards, _find_records(shards), strict=True):
        if record:
            sizes[shard] = record.bytes
        elif not is_remote(shard):
            sizes[shard] = Path(shard).stat().st_size
    return sizes


def _find_records(shards: Sequence[str]) -> list[ShardRecord | None]:
    manifests = {folder: read_manifest(folder).shards for folder in set(map(folder_of, shards))}
    return [manifests[folder_of(tar)].get(tar.rpartition("/")[2]) for tar in shards]


Item = dict[str, Any]
"""Extension → content (bytes or a `TarMember` in the tar), with `__key__`, `__url__` and, for places,
`__file__`."""
Report = Callable[[str, str], object]
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
DAMAGE = (*UNREADABLE, OSError)
"""Errors of reading a damaged or deleted tar."""

# The default is megabytes on some file systems, which each seek to a header would read.
_HEADER_BUFFER_BYTES = 2**13
_MAX_HEADER_BYTES = 2**20
# No file name has as many. tarfile before Python 3.11.10 takes quadratic time for them.
_MANY_DIGITS = re.compile(rb"\d{256}")
# after the last member: padding of blocks
_MAX_PADDING_BYTES = 2**24
# per process; about 700 bytes each
_MAX_CACHED_ITEMS = 200_000


class _Headers(io.BufferedReader):
    """A tar as tarfile reads it, which reads extended headers whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has more than {_MAX_HEADER_BYTES:,} bytes")
        content = super().read(size)
        if size > tarfile.BLOCKSIZE and _MANY_DIGITS.search(content):
            raise tarfile.ReadError("a header has more than 255 digits in a row")
        return content


class TarMember(NamedTuple):
    """A member's content in its tar, in bytes."""

    start: int
    size: int

    def read(self, file: OpenFile) -> bytes:
        """Read the content. Raises BrokenItemError if the tar is truncated, and OSError."""
        content = file.read(self.start, self.size)
        if len(content) < self.size:
            raise BrokenItemError("its tar is truncated within it")
        return content


_cached_items: dict[tuple[str | int, ...], list[Item]] = {}
"""Items of undamaged tars, by file and version."""


def list_items(
    shard: str,
    report: Report = lambda name, reason: None,
    open_file: Callable[[], OpenFile] | None = None,
) -> Iterator[Item]:
    """Yield the items of a tar (path or URL) in order without reading their contents, as far as the
    tar is readable."""
    try:
        file = open_file() if open_file else open_shard(shard)
        state = os.fstat(file.number)
        # Not only the inode, because those of deleted copies are used again.
        version = (shard, state.st_ino, state.st_size, state.st_mtime_ns)
        for item in _cached_items.get(version) or _read_items(shard, file, version, report):
            yield {**item, "__file__": file}
    except DAMAGE as error:
        expected = "; expected an uncompressed tar" if isinstance(error, tarfile.ReadError) else ""
        report(shard, f"tar can't be read: {describe_error(error)}{expected}")


def _read_items(
    shard: str, file: OpenFile, version: tuple[str | int, ...], report: Report
) -> Iterator[Item]:
    """Yield items from headers, and cache them all at the end if nothing was reported."""
    items: list[Item] = []
    is_damaged = False

    # also called for a duplicate name in an item
    def handle(error: Exception) -> bool:
        nonlocal is_damaged
        is_damaged = True
        report(shard, str(error.args[0]))
        return True

    for item in group_by_keys(_read_members(shard, file, handle), handler=handle):
        items.append(item)
        yield item
    num_cached = sum(map(len, _cached_items.values()))
    if not is_damaged and num_cached + len(items) <= _MAX_CACHED_ITEMS:
        _cached_items[version] = items


def _read_members(
    shard: str, file: OpenFile, handle: Callable[[Exception], object]
) -> Iterator[Item]:
    """Yield the files of a tar for `group_by_keys`. Detect damage and truncation, which tarfile
    treats as the end."""
    tar_bytes = os.fstat(file.number).st_size
    stream = _Headers(io.FileIO(os.dup(file.number)), _HEADER_BUFFER_BYTES)
    with stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        offset = 0
        try:
            while member := tar.next():
                if tar.offset <= offset:
                    raise tarfile.ReadError("its headers point backwards")
                offset = tar.offset
                # To save memory.
                tar.__dict__["members"].clear()
                # Folders and links have no contents.
                if member.isfile() and not member.issparse():
                    if member.offset_data + member.size > tar_bytes:
                        raise EOFError("unexpected end of data")
                    place = TarMember(member.offset_data, member.size)
                    yield {"fname": member.name, "data": place, "__url__": shard}
            padding = file.read(tar.offset, _MAX_PADDING_BYTES)
            if not padding or any(padding):
                raise EOFError(
                    "end-of-archive mark missing, or followed by other than zeros, at "
                    f"byte {tar.offset:,}"
                )
        except UNREADABLE as error:
            handle(
                EOFError(
                    f"tar is truncated or damaged ({describe_error(error)}); using its "
                    "readable part"
                )
            )


def describe_error(error: BaseException) -> str:
    """Return an error's message, without the file name of an OSError, or else its type."""
    if isinstance(error, OSError) and error.strerror:
        return str(error.args[-1])
    return str(error) or repr(error)


def fetch(item: Item) -> None:
    """Replace the places in `item` by their contents. Raises like `Place.read`."""
    file = item.pop("__file__")
    for extension, content in item.items():
        if isinstance(content, TarMember):
            item[extension] = content.read(file)


def is_sample(item: Item) -> bool:
    """Return whether an item has audio or features, and a member that can hold captions."""
    return not item.keys().isdisjoint(CLIP_FORMATS) and not item.keys().isdisjoint(CAPTION_FORMATS)


def samples_between(
    items: Iterator[Item], start: int, stop: int | None
) -> Iterator[tuple[int | None, Item]]:
    """Yield a tar's items from sample `start` to before sample `stop` (None: all), each with its
    number as a sample, or None if it isn't one."""
    num_samples = 0
    for item in items:
        number = num_samples if is_sample(item) else None
        if num_samples >= start:
            yield number, item
        if number is not None:
            num_samples += 1
        if num_samples == stop:
            return
