"""On-disk checkpoint format: folders `step-<number>` whose manifest holds every file's hash, to
detect damage.

Checkpoints are written under a hidden name and then renamed, and renamed before they are deleted.
So a kill leaves each one whole or absent. Files are verified before loading. Imports neither torch
nor DeepSpeed.

Store nested dictionaries, lists, numbers, text and tensors in a safetensors file, which can't
contain code.

The structure is JSON in the file's metadata.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
from pydantic import TypeAdapter
from torch import Tensor

from clap_ds.config.model import Count
from clap_ds.config.schema import CheckpointSettings, score
from clap_ds.utils.errors import printable
from clap_ds.utils.files import (
    RefusedFileError,
    drafted,
    open_regular,
    parse_json,
    pinned,
    read_bytes,
)
from clap_ds.weights.formats import write_tensors
from clap_ds.weights.key_mapping import State

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
RAW = "raw.safetensors"
"""The raw weights, if `WEIGHTS` holds their moving average."""
STATE = "state.safetensors"
TOKENIZER = "tokenizer"
FORMAT = 2
FILE_NAME = re.compile(
    rf"(weights|raw|state)\.safetensors|progress\.json|{TOKENIZER}/\w[\w.+-]*", re.ASCII
)
"""Allowed file names. Manifests are untrusted: no paths outside the checkpoint, and no URLs."""
NAME = re.compile(r"step-\d{8,}(-\d+)?")


def warn(message: str) -> None:
    print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


class DamagedError(ValueError):
    """Raised for a checkpoint that is damaged or missing."""


@dataclass(frozen=True)
class FileRecord:
    """Hold the size in bytes and the BLAKE2b-128 of a file."""

    bytes: Count
    hash: str


@dataclass(frozen=True)
class Manifest:
    """Describe a checkpoint's contents and what it can be loaded into.

    Attributes:
        serial: time of saving in ms since 1970, increasing within a folder.
        engine: what a resuming run must match (`clap_ds.checkpoint.restore.describe`).
        tokenizer: Hub name of the captions' tokenizer, or `TOKENIZER` for the folder in the
          checkpoint.
        metrics: evaluation metrics at this step if any.
        run: id of the run that saved it, constant across restarts.
        settings: the run's resolved JSON.
        best_metric: evaluation metric that selects the run's best checkpoint.
    """

    serial: Count
    step: Count
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
        """Parse `to_json`'s text, ignoring unknown fields. Raises DamagedError, naming `where`."""
        try:
            content = parse_json(text)
            if content["format"] != FORMAT:
                raise ValueError(
                    f"its format is {content['format']}, but this version reads {FORMAT}"
                )
            if content.pop("hash") != _hash(content):
                raise ValueError("it has changed since it was written")
            found = TypeAdapter(cls).validate_python(content)
            if outside := [name for name in found.files if not FILE_NAME.fullmatch(name)]:
                raise ValueError(f"it lists {outside[0]!r}, which isn't a checkpoint file")
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
    """Write a new file, creating its folder if necessary."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return record_of(path)


def record_of(path: Path) -> FileRecord:
    """Flush a new file to disk and return its record."""
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
    """Return a context with a hidden folder for a checkpoint and its manifest, which is renamed on
    success."""
    folder.mkdir(parents=True, exist_ok=True)
    return drafted(folder / free_name(step, os.listdir(folder)))


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest. Raises DamagedError for a missing or changed file."""
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
    """Delete a checkpoint atomically. Raises OSError."""
    try:
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted")))
    except RecursionError:
        raise OSError(errno.ELOOP, "folders in it are nested too deeply", str(folder)) from None


def clear_leftovers(folder: Path) -> None:
    """Delete a killed process's partly written or deleted checkpoints."""
    for path in folder.glob(".step-*.*"):
        with suppress(RecursionError):  # others may have nested folders deeply
            shutil.rmtree(path, ignore_errors=True)


def move_aside(folder: Path, *, but: str) -> Path | None:
    """Move a folder's contents except the file `but` to a new sibling folder and return it; None if
    there were none."""
    paths = [path for path in folder.iterdir() if path.name != but]
    aside = folder.with_name(f"{folder.name}-aside-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    for path in paths:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    return aside if paths else None


def newest_first(
    names: Iterable[str], read: Callable[[str], Manifest], damaged: dict[str, str]
) -> dict[str, Manifest]:
    """Return checkpoints' manifests by name, newest first, and add the reasons for unreadable ones
    to `damaged`."""
    manifests = {}
    for name in filter(NAME.fullmatch, names):
        try:
            with suppress(FileNotFoundError):
                manifests[name] = read(name)
        except (DamagedError, RefusedFileError) as error:
            damaged[name] = str(error)
    return dict(
        sorted(manifests.items(), key=lambda item: (item[1].serial, item[1].step), reverse=True)
    )


def read_all(folder: Path, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
    """Return `newest_first` of a folder."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return newest_first(
        names, lambda name: Manifest.read(folder / name), {} if damaged is None else damaged
    )


def newest_good(
    folder: Path, damaged: dict[str, str] | None = None, *, best: bool = False
) -> Path | None:
    """Return a folder's newest undamaged checkpoint, or the best by the newest one's `best_metric`;
    None if there is none. Warn of skipped ones, and add the reasons to `damaged` by name."""
    damaged = {} if damaged is None else damaged
    manifests = read_all(folder, damaged)
    metrics = [manifest.best_metric or "" for manifest in manifests.values()]
    for name in best_first(manifests, *metrics[:1]) if best else manifests:
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
        warn(f"skipped: {reason}")


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """Return `path` if it is a checkpoint, else `newest_good` of it. Raises DamagedError if damaged
    or none."""
    if (path / MANIFEST).exists() and not best:
        verify(path)
        return path
    damaged: dict[str, str] = {}
    if (found := newest_good(path, damaged, best=best)) is None:
        evaluated = " with its run's best_metric metric" if best else ""
        reasons = "; ".join(damaged.values()) or f"expected {MANIFEST}, or folders step-… with one"
        raise DamagedError(f"{path}: no good checkpoint found{evaluated}: {reasons}")
    return found


def superfluous(manifests: dict[str, Manifest], rule: CheckpointSettings) -> list[str]:
    """Return the names to delete (`manifests`: newest first): all but the last and the best."""
    kept = {
        *[*manifests][: rule.keep_last],
        *best_first(manifests, rule.best_metric or "")[: rule.keep_best],
    }
    return [name for name in reversed(manifests) if name not in kept]


def best_first(manifests: dict[str, Manifest], metric: str = "") -> list[str]:
    """Return the names of checkpoints that have this metric, best first (stable)."""
    names = [name for name, each in manifests.items() if metric in each.metrics]
    return sorted(names, key=lambda name: -score(metric, manifests[name].metrics[metric]))


KEY = "clap_ds.state"


def save_tensors(path: Path, tensors: State, metadata: dict[str, str]) -> FileRecord:
    """Write a new safetensors file and flush it to disk. Raises OSError."""
    write_tensors(path, tensors, metadata)
    return record_of(path)


def to_state_file(state: Any) -> tuple[State, dict[str, str]]:
    """Return the file's tensors and metadata."""
    tensors: State = {}
    return tensors, {KEY: json.dumps(_described(state, tensors, set()))}


def _described(value: Any, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    """Convert a value to JSON types, moving its tensors to the CPU and into `tensors`."""
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:  # safetensors rejects tensors that share memory
            tensor = tensor.clone()
        storages.add(storage)
        tensors[name := str(len(tensors))] = tensor
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[_described(part, tensors, storages) for part in item] for item in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(part, tensors, storages) for part in value]}
    return value


def read_state_file(path: Path) -> Any:
    """Read the state given to `to_state_file`. Raises ValueError for an invalid file."""
    try:
        with pinned(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            return _restored(
                parse_json((file.metadata() or {})[KEY], allow_nan=True), file.get_tensor
            )
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise ValueError(f"{path}: can't be read as a state: {error}") from error


def _restored(described: Any, tensor_of: Any) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "dict":
        return {_restored(key, tensor_of): _restored(value, tensor_of) for key, value in content}
    return {"list": list, "tuple": tuple}[kind](_restored(part, tensor_of) for part in content)
