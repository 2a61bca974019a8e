"""Write, verify and find checkpoints on disk: folders `step-<number>` with a manifest.

The manifest holds every file's hash, to detect damage. Checkpoints are written under a hidden name
and then renamed, and renamed before they are deleted, so a kill leaves each one whole or absent.
Files are verified before they are loaded.

`state.safetensors` stores nested dictionaries, lists, numbers, text and tensors. Its structure is
JSON in the file's metadata, so that it can't contain code.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import safetensors
import safetensors.torch
from pydantic import TypeAdapter
from torch import Tensor

from clap_ds.config.model import Count
from clap_ds.config.schema import CheckpointSettings, to_higher_is_better
from clap_ds.utils.errors import warn
from clap_ds.utils.files import (
    RefusedFileError,
    create_folder_atomically,
    hold_file,
    open_regular,
    parse_json,
    read_bytes,
)
from clap_ds.weights.formats import write_tensors
from clap_ds.weights.key_mapping import State

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
# The raw weights, if `WEIGHTS` holds their moving average.
RAW = "raw.safetensors"
# What training resumes from: model, optimizer, scheduler and random number generators.
STATE = "state.safetensors"
# A `TrainState`.
PROGRESS = "progress.json"
TOKENIZER = "tokenizer"
FORMAT = 2
# Allowed file names. Manifests are untrusted: no paths outside the checkpoint, and no URLs.
FILE_NAME = re.compile(
    rf"(weights|raw|state)\.safetensors|progress\.json|{TOKENIZER}/\w[\w.+-]*", re.ASCII
)
# `free_name` makes these.
NAME = re.compile(r"step-\d{8,}(-\d+)?")


class DamagedError(ValueError):
    """A checkpoint is damaged or missing."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and its BLAKE2b-128."""

    bytes: Count
    hash: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint, and what it can be loaded into.

    Attributes:
        serial: time of saving in ms since 1970, increasing within a folder.
        engine: what a resuming run must match (`clap_ds.checkpoint.restore.describe_engine`).
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
        return json.dumps({**content, "hash": _hash_json(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, source: object) -> Self:
        """Parse `to_json`'s text, ignoring unknown fields. Raises DamagedError, naming the
        source."""
        try:
            content = parse_json(text)
            # Another format may have other fields, so it is reported before a wrong hash.
            if content["format"] != FORMAT:
                raise ValueError(
                    f"its format is {content['format']}, but this version reads {FORMAT}"
                )
            if content.pop("hash") != _hash_json(content):
                raise ValueError("it has changed since it was written")
            manifest = TypeAdapter(cls).validate_python(content)
            for name in manifest.files:
                if not FILE_NAME.fullmatch(name):
                    raise ValueError(f"it lists {name!r}, which isn't a checkpoint file")
            return manifest
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise DamagedError(f"{source}: its {MANIFEST} can't be read: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest. Raises DamagedError."""
        try:
            text = read_bytes(folder / MANIFEST)
        except OSError as error:
            raise DamagedError(f"{folder}: no checkpoint: {MANIFEST}: {error.strerror}") from error
        return cls.from_json(text, folder)

    def tokenizer_in(self, folder: Path) -> str | None:
        """Return the tokenizer's Hub name, or its path in the checkpoint's folder."""
        return str(folder / TOKENIZER) if self.tokenizer == TOKENIZER else self.tokenizer


class CheckpointFolder(NamedTuple):
    """A checkpoint on disk, and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest in a folder. Raises DamagedError."""
        return cls(path, Manifest.read(path))

    def verify(self) -> None:
        """Compare every file with the manifest. Raises DamagedError for a missing or changed
        file."""
        for name, record in self.manifest.files.items():
            try:
                with open_regular(self.path / name) as file:
                    size = os.fstat(file.fileno()).st_size
                    # A different size saves reading gigabytes.
                    if size != record.bytes or _hash_file(file) != record.hash:
                        problem = f"{name} has changed since it was written"
                        raise DamagedError(f"{self.path}: {problem}")
            except OSError as error:
                raise DamagedError(f"{self.path}: {name}: {error.strerror}") from error


def _hash_json(content: dict[str, Any]) -> str:
    # Parsed JSON may have another order.
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _hash_file(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a new file, creating its folder if necessary."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return sync_file(path)


def sync_file(path: Path) -> FileRecord:
    """Flush a new file to disk and return its record."""
    with open_regular(path) as file:
        # A crash of the host must not leave a renamed folder with empty files.
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, _hash_file(file))


def free_name(step: int, taken: Collection[str]) -> str:
    """Return the name of a new checkpoint; a step that is saved again gets a suffix."""
    name = f"step-{step:08d}"
    if name not in taken:
        return name
    for number in itertools.count(2):
        if f"{name}-{number}" not in taken:
            break
    return f"{name}-{number}"


def atomic_dir(folder: Path, step: int) -> AbstractContextManager[Path]:
    """Return a context with a hidden folder for a checkpoint and its manifest. On success it is
    renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    return create_folder_atomically(folder / free_name(step, os.listdir(folder)))


def remove(folder: Path) -> None:
    """Delete a checkpoint atomically. Raises OSError."""
    # Renamed, it is no checkpoint even if the deletion is interrupted.
    try:
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted")))
    except RecursionError:
        raise OSError(errno.ELOOP, "folders in it are nested too deeply", str(folder)) from None


def clear_leftovers(folder: Path) -> None:
    """Delete a killed process's partly written or deleted checkpoints."""
    for path in folder.glob(".step-*.*"):
        # Other users of the folder may have nested folders deeply.
        with suppress(RecursionError):
            shutil.rmtree(path, ignore_errors=True)


def archive(folder: Path, *, keep: str) -> Path | None:
    """Move a folder's contents except the file `keep` to a new sibling folder and return it; None
    if there were none."""
    paths = [path for path in folder.iterdir() if path.name != keep]
    if not paths:
        return None
    # UTC with microseconds: no other folder has the name.
    new_folder = folder.with_name(f"{folder.name}-aside-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    new_folder.mkdir()
    for path in paths:
        path.rename(new_folder / path.name)
    return new_folder


def newest_first(
    names: Iterable[str], read: Callable[[str], Manifest], damaged: dict[str, str]
) -> dict[str, Manifest]:
    """Return checkpoints' manifests by name, newest first, and add the reasons for unreadable ones
    to `damaged`."""
    manifests = {}
    for name in filter(NAME.fullmatch, names):
        try:
            manifests[name] = read(name)
        except FileNotFoundError:
            # Deleted since it was listed, or still being uploaded.
            continue
        except (DamagedError, RefusedFileError) as error:
            damaged[name] = str(error)
    # Serials end at `MOST`, so that equal ones are ordered by step.
    return dict(
        sorted(manifests.items(), key=lambda item: (item[1].serial, item[1].step), reverse=True)
    )


def read_all(folder: Path, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
    """Return the manifests of a folder's checkpoints by name, newest first, and add the reasons for
    unreadable ones to `damaged`."""
    # Sorted, since the order of a directory depends on the file system.
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    damaged = {} if damaged is None else damaged
    return newest_first(names, lambda name: Manifest.read(folder / name), damaged)


def latest_valid(
    folder: Path, damaged: dict[str, str] | None = None, *, best: bool = False
) -> CheckpointFolder | None:
    """Return a folder's newest undamaged checkpoint, or None.

    Damaged ones are skipped with a warning, and the reasons added to `damaged` by name. With
    `best`, the newest manifest's `best_metric` orders checkpoints.
    """
    damaged = {} if damaged is None else damaged
    manifests = read_all(folder, damaged)
    candidates = list(manifests)
    if best and manifests:
        # Earlier starts of the run may have had another `best_metric`.
        newest = manifests[candidates[0]]
        candidates = best_first(manifests, newest.best_metric or "")
    for name in candidates:
        checkpoint = CheckpointFolder(folder / name, manifests[name])
        try:
            checkpoint.verify()
        except DamagedError as error:
            damaged[name] = str(error)
        else:
            warn_of_damaged(damaged)
            return checkpoint
    return None


def warn_of_damaged(damaged: dict[str, str]) -> None:
    for reason in damaged.values():
        warn(f"skipped: {reason}")


def find_checkpoint(path: Path, *, best: bool = False) -> CheckpointFolder:
    """Return the checkpoint at `path`, or else the folder's newest or best valid one. Raises
    DamagedError if damaged or none."""
    if (path / MANIFEST).exists() and not best:
        checkpoint = CheckpointFolder.read(path)
        checkpoint.verify()
        return checkpoint
    damaged: dict[str, str] = {}
    newest = latest_valid(path, damaged, best=best)
    if newest is not None:
        return newest
    evaluated = " with its run's best_metric metric" if best else ""
    reasons = "; ".join(damaged.values()) or f"expected {MANIFEST}, or folders step-… with one"
    raise DamagedError(f"{path}: no good checkpoint found{evaluated}: {reasons}")


def to_delete(manifests: dict[str, Manifest], settings: CheckpointSettings) -> list[str]:
    """Return the names to delete, oldest first: all but the last and the best. `manifests`: by
    name, newest first."""
    last = [*manifests][: settings.keep_last]
    best = best_first(manifests, settings.best_metric or "")[: settings.keep_best]
    return [name for name in reversed(manifests) if name not in last + best]


def best_first(manifests: dict[str, Manifest], metric: str) -> list[str]:
    """Return the names of checkpoints that have this metric, best first (stable)."""
    names = [name for name, manifest in manifests.items() if metric in manifest.metrics]
    return sorted(
        names, key=lambda name: -to_higher_is_better(metric, manifests[name].metrics[metric])
    )


# The metadata's field with the structure.
KEY = "clap_ds.state"


def save_tensors(path: Path, tensors: State, metadata: dict[str, str]) -> FileRecord:
    """Write a new safetensors file and flush it to disk. Raises OSError."""
    write_tensors(path, tensors, metadata)
    return sync_file(path)


def to_state_file(state: Any) -> tuple[State, dict[str, str]]:
    """Return the tensors and metadata of a state's file."""
    tensors: State = {}
    return tensors, {KEY: json.dumps(_encode_state(state, tensors, set()))}


def _encode_state(value: Any, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    """Convert a value to JSON types, moving its tensors to the CPU and into `tensors`."""

    def encode(part: Any) -> Any:
        return _encode_state(part, tensors, storages)

    if isinstance(value, Tensor):
        # safetensors takes only contiguous tensors.
        tensor = value.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors rejects tensors that share memory.
        if storage in storages:
            tensor = tensor.clone()
        storages.add(storage)
        name = str(len(tensors))
        tensors[name] = tensor
        return {"tensor": name}
    if isinstance(value, dict):
        # Keys may be numbers, which JSON objects would turn into text.
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [encode(part) for part in value]}
    return value


def read_state_file(path: Path) -> Any:
    """Read the state given to `to_state_file`. Raises ValueError for an invalid file."""
    try:
        with hold_file(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            structure = (file.metadata() or {})[KEY]
            # A state may hold NaN, such as an undefined statistic.
            return _decode_state(parse_json(structure, allow_nan=True), file.get_tensor)
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise ValueError(f"{path}: can't be read as a state: {error}") from error


def _decode_state(value: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value

    def decode(part: Any) -> Any:
        return _decode_state(part, get_tensor)

    # All other values are dictionaries with one field: the type.
    ((kind, content),) = value.items()
    if kind == "tensor":
        return get_tensor(content)
    if kind == "dict":
        return {decode(key): decode(part) for key, part in content}
    sequence: Any = {"list": list, "tuple": tuple}[kind]
    return sequence(decode(part) for part in content)
