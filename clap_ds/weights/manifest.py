"""What a checkpoint says of itself: its files with their sizes and hashes, and what it may be loaded into.

Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


class DamagedError(ValueError):
    """A checkpoint that isn't what it was when it was written."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and BLAKE2b-128 of a file's content."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and what it may be loaded into.

    Attributes:
        serial: when it was saved, in ms since 1970, and larger than every older one's in its folder: the largest is the newest,
            whatever its step.
        step: optimiser steps taken.
        model: `ClapConfig` as JSON.
        engine: what a run that goes on must have in common (`engine_state.describe`).
        tokenizer: hub name of the captions' tokenizer, or `tokenizer`: the folder of that name in the checkpoint.
        metrics: of the evaluation at this step, if there was one.
        files: by path relative to the checkpoint.
    """

    serial: int
    step: int
    model: dict[str, Any]
    engine: dict[str, Any]
    tokenizer: str | None
    metrics: dict[str, float]
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Of all files, the manifest aside."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "hash": _hash_of_json(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: object) -> Manifest:
        """Reads `to_json`'s text; `where` is named in errors.

        Raises:
            DamagedError: not such a text, one that has changed, or one of another version of the format.
        """
        try:
            content = json.loads(text)
            stated = content.pop("hash")
            version = content.pop("format")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedError(f"{where}: its {MANIFEST} can't be read: {error}") from error
        if version != FORMAT:
            raise DamagedError(f"{where}: a checkpoint of format {version}, this version reads {FORMAT}")
        if stated != _hash_of_json({"format": version, **content}):
            raise DamagedError(f"{where}: its {MANIFEST} has been damaged")
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        return cls(**content, files=files)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Of a checkpoint folder.

        Raises:
            DamagedError: there is none, or it is damaged.
        """
        try:
            text = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise DamagedError(f"{folder}: no checkpoint: {MANIFEST}: {error.strerror}") from error
        return cls.from_json(text, folder)


def _hash_of_json(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
