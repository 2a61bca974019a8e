"""Read and write a shard folder's `manifest.json`: its kind, and items, bytes, seconds and checksum of each tar."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import fsspec

from clap_ds.config.files import MOST_BYTES, parse_json, read_bytes, write_atomically
from clap_ds.config.model import ClapConfig
from clap_ds.data.front_end import KINDS, FrontEnd, Kind
from clap_ds.data.shard_assignment import FIELD, Source
from clap_ds.data.shard_io import again, is_absent, is_remote
from clap_ds.data.tar_samples import count_samples

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    items: int
    bytes: int
    seconds: float  # of audio
    sha256: str  # of the whole file, in hex


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """Describe a folder's tars by file name, their kind and, for prepared kinds, the front end."""

    shards: Mapping[str, ShardRecord]
    kind: Kind = "encoded"
    front_end: FrontEnd | None = None


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    front_end = {"front_end": asdict(manifest.front_end)} if manifest.front_end else {}
    shards = {name: asdict(record) for name, record in sorted(manifest.shards.items())}
    content = {"kind": manifest.kind, **front_end, "shards": shards}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: str) -> ShardManifest:
    """Read the manifest of a folder or URL; an empty one if missing. Raises ValueError if unreadable."""
    path = f"{folder}/{MANIFEST}"

    def read() -> bytes:
        with fsspec.open(path, "rb", expand=False) as file:
            return bytes(file.read(MOST_BYTES))

    try:
        found = again(read) if is_remote(path) else read_bytes(path)
    except Exception as error:  # any error of the file system package
        if isinstance(error, NotADirectoryError | IsADirectoryError | PermissionError) or is_absent(error):
            return ShardManifest({})  # without permission to list, object stores deny access to missing files
        reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{path} can't be read: {reason}") from None
    try:
        content = parse_json(found)
        shards = {name: ShardRecord(**record) for name, record in content["shards"].items()}
        front_end = FrontEnd(**content["front_end"]) if "front_end" in content else None
        manifest = ShardManifest(shards, content.get("kind", "encoded"), front_end)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ShardManifest({})  # another program's file
    if manifest.kind not in KINDS or (manifest.kind != "encoded" and front_end is None):
        wanted = f"{', '.join(KINDS)}, with a front_end unless encoded"
        raise ValueError(f"{path}: kind is {manifest.kind!r}, with front_end {front_end}; expected one of {wanted}")
    return manifest


def kind_of(sources: Sequence[Source], model: ClapConfig) -> Kind:
    """Return the kind of these shards from their folders' manifests; `encoded` without one or if mixed with `waveform`.
    Raises ValueError for kinds that can't be mixed and for another model's front end."""
    own, kinds = FrontEnd.of(model.audio), dict[str, str]()  # kind → its last folder
    for folder in dict.fromkeys(shard.rpartition("/")[0] or "." for source in sources for shard in source.shards):
        manifest, where = read_manifest(folder), f"{FIELD}: {folder}"
        matters = {"encoded": (), "waveform": ("sample_rate",), "mel": FrontEnd.__slots__}[manifest.kind]
        pairs = [(name, getattr(manifest.front_end, name), getattr(own, name)) for name in matters]
        if others := [f"{name} is {there}, not {ours}" for name, there, ours in pairs if there != ours]:
            raise ValueError(f"{where} was prepared for another model than {model.name}: {', '.join(others)}")
        kinds[manifest.kind] = folder
    if "mel" in kinds and len(kinds) > 1:
        found = " and ".join(f"{kind} in {folder}" for kind, folder in sorted(kinds.items()))
        raise ValueError(f"{FIELD}: {found} can't be mixed; prepare all as mel, or none (clap-shards prepare)")
    return next(kind for kind in KINDS if kind in kinds)


def digest(path: Path) -> str:  # SHA-256 of a file, in hex
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def samples_of(shards: Sequence[str], most_bytes: float = math.inf) -> list[int] | None:
    """Count each tar's samples from manifests or, for up to `most_bytes` of local tars, headers. Return None otherwise."""
    manifests = {folder: read_manifest(folder or ".").shards for folder in {tar.rpartition("/")[0] for tar in shards}}
    records = [manifests[folder].get(name) for folder, _, name in (tar.rpartition("/") for tar in shards)]
    unknown = [tar for tar, record in zip(shards, records, strict=True) if record is None]
    if any(map(is_remote, unknown)) or sum(Path(tar).stat().st_size for tar in unknown) > most_bytes:
        return None
    return [record.items if record else count_samples(tar) for tar, record in zip(shards, records, strict=True)]
