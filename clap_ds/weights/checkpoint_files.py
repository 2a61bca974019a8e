"""A checkpoint as files on a disk: a folder `step-<number>` with a manifest of the hash of every file.

It is put together under a hidden name and renamed; what is deleted is renamed first. So a kill at any moment leaves each
checkpoint whole or absent. Files are compared with the manifest before they are loaded. Imports neither torch nor DeepSpeed.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from clap_ds.config.errors import printable
from clap_ds.config.files import drafted, open_regular, parse_json, read_bytes
from clap_ds.config.metrics import TRAIN_LOSS, score
from clap_ds.config.schema import CheckpointSettings

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
RAW = "raw.safetensors"
"""The weights themselves, where `WEIGHTS` are a moving average of them."""
STATE = "state.safetensors"
TOKENIZER = "tokenizer"
FORMAT = 2
FILE_NAME = re.compile(rf"(weights|raw|state)\.safetensors|progress\.json|{TOKENIZER}/\w[\w.+-]*", re.ASCII)
"""Of a file in a checkpoint. Somebody else may have written the manifest: none outside, and no URL."""
NAME = re.compile(r"step-\d{8,}(-\d+)?")


def warn(message: str) -> None:
    print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


class DamagedError(ValueError):
    """A checkpoint that isn't what was written."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and BLAKE2b-128 of a file's content."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and what it may be loaded into.

    Attributes:
        serial: ms since 1970 when it was saved, and larger than every older one's in its folder.
        engine: what a run that resumes must have in common (`clap_ds.engine.state.describe`).
        tokenizer: hub name of the captions' tokenizer, or `TOKENIZER`: the folder in the checkpoint.
        metrics: of the evaluation at this step, if there was one, and `TRAIN_LOSS`.
        run: id of the run that saved it, through all its restarts.
        settings: the run's JSON as resolved.
        best_metric: the evaluation metric that tells the run's best.
    """

    serial: int
    step: int
    model: dict[str, Any]
    engine: dict[str, Any]
    tokenizer: str | None
    metrics: dict[str, float]
    files: dict[str, FileRecord]
    run: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    best_metric: str | None = None

    def to_json(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "hash": _hash(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: object) -> Self:
        """Read `to_json`'s text, fields of other versions left out; raises DamagedError, naming `where`."""
        try:
            content = parse_json(text)
            if content["format"] != FORMAT:
                raise ValueError(f"it is of format {content['format']}, this version reads {FORMAT}")
            if content.pop("hash") != _hash(content):
                raise ValueError("it has changed since it was written")
            found = TypeAdapter(cls).validate_python(content)
            if outside := [name for name in found.files if not FILE_NAME.fullmatch(name)]:
                raise ValueError(f"it names {outside[0]!r}, which is no file of a checkpoint")
            return found
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise DamagedError(f"{where}: its {MANIFEST} can't be read: {error}") from error

    def tokenizer_in(self, folder: Path) -> str | None:
        return str(folder / TOKENIZER) if self.tokenizer == TOKENIZER else self.tokenizer

    @classmethod
    def read(cls, folder: Path) -> Self:
        try:
            text = read_bytes(folder / MANIFEST)
        except OSError as error:
            raise DamagedError(f"{folder}: no checkpoint: {MANIFEST}: {error.strerror}") from error
        return cls.from_json(text, folder)


def write_file(path: Path, content: bytes) -> FileRecord:
    """A new file, in a folder that is made where it isn't there."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return record_of(path)


def record_of(path: Path) -> FileRecord:
    """Of a file that has just been written, once it is on the disk."""
    with open_regular(path) as file:
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, _hash_of(file))


def _hash(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _hash_of(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def free_name(step: int, taken: Collection[str]) -> str:
    names = (f"step-{step:08d}" + f"-{number}" * (number > 1) for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def begin(folder: Path, step: int) -> AbstractContextManager[Path]:
    """Give a hidden folder to put a checkpoint of this step together in, manifest included; then it gets its name."""
    folder.mkdir(parents=True, exist_ok=True)
    return drafted(folder / free_name(step, os.listdir(folder)))


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest; raises DamagedError: which is missing or changed."""
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        try:
            with open_regular(folder / name) as file:
                if os.fstat(file.fileno()).st_size != record.bytes or _hash_of(file) != record.hash:
                    raise DamagedError(f"{folder}: {name} has changed since it was written")
        except OSError as error:
            raise DamagedError(f"{folder}: {name}: {error.strerror}") from error
    return manifest


def remove(folder: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for one."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted")))


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for path in folder.glob(".step-*.*"):
        shutil.rmtree(path, ignore_errors=True)


def move_aside(folder: Path, *, but: str) -> Path | None:
    """Move all that is in a folder, but one file, into a new one beside it; None where there was nothing."""
    paths = [path for path in folder.iterdir() if path.name != but]
    aside = folder.with_name(f"{folder.name}-aside-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    for path in paths:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    return aside if paths else None


def newest_first(names: Iterable[str], read: Callable[[str], Manifest], damaged: dict[str, str]) -> dict[str, Manifest]:
    """Manifests by those names that are a checkpoint's, the newest first. `damaged` gets why others can't be read, by name."""
    manifests = {}
    for name in filter(NAME.fullmatch, names):
        try:
            manifests[name] = read(name)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            damaged[name] = str(error)
    return dict(sorted(manifests.items(), key=lambda item: item[1].serial, reverse=True))


def read_all(folder: Path, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
    """`newest_first` of a folder."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return newest_first(names, lambda name: Manifest.read(folder / name), {} if damaged is None else damaged)


def newest_good(folder: Path, damaged: dict[str, str] | None = None, *, best: bool = False) -> Path | None:
    """The newest checkpoint of a folder that is all there, or the best by the newest one's `best_metric`; None where there is
    none. Those passed over are warned of; `damaged` gets why, by name."""
    damaged = {} if damaged is None else damaged
    manifests = read_all(folder, damaged)
    metric = next((manifest.best_metric or "" for manifest in manifests.values()), "")
    for name in best_first(manifests, metric) if best else manifests:
        try:
            verify(folder / name)
        except DamagedError as error:
            damaged[name] = str(error)
        else:
            warn_of(damaged)
            return folder / name
    return None


def warn_of(damaged: dict[str, str]) -> None:
    for reason in damaged.values():
        warn(f"passed over: {reason}")


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """`path` itself if it is a checkpoint, else what `newest_good` finds in it; raises DamagedError: neither, or damaged."""
    if (path / MANIFEST).exists() and not best:
        verify(path)
        return path
    damaged: dict[str, str] = {}
    if (found := newest_good(path, damaged, best=best)) is None:
        evaluated = " that was evaluated by its run's best_metric" if best else ""
        reasons = "; ".join(damaged.values()) or f"expected {MANIFEST}, or folders step-… with one"
        raise DamagedError(f"{path}: no good checkpoint here{evaluated}: {reasons}")
    return found


def superfluous(manifests: dict[str, Manifest], rule: CheckpointSettings) -> list[str]:
    """Names to delete of manifests with the newest first: all but the last, the best and that with the lowest training loss."""
    kept = {*[*manifests][: rule.keep_last], *best_first(manifests, rule.best_metric or "")[: rule.keep_best]}
    return [name for name in reversed(manifests) if name not in {*kept, *best_first(manifests, TRAIN_LOSS)[:1]}]


def best_first(manifests: dict[str, Manifest], metric: str) -> list[str]:
    """Names of checkpoints that have this metric, the best first; of equals, the one that comes first."""
    scores = {name: score(metric, each.metrics[metric]) for name, each in manifests.items() if metric in each.metrics}
    return sorted(scores, key=lambda name: -scores[name])
