"""Which audio files go into which shard, and the making of one shard.

A shard is written under another name and gets its own, and a record, when it is whole: a build that is killed goes on with the
shards that have none. Audio is decoded once to check it, and re-encoded only where that is wanted or needed. Lists of files
are read by `caption_lists`, the command is `build_shards`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from webdataset.writer import TarWriter

from clap_ds.data.build.caption_lists import Entry
from clap_ds.data.items import AUDIO_FORMATS, BrokenItemError
from clap_ds.data.shard_manifest import ShardRecord, digest, write_whole

RECORDS = ".build"  # folder of finished shards' records, beside them


@dataclass(frozen=True, slots=True)
class Encoding:
    """What audio is turned into. `sample_rate`: Hz; None keeps the file's. `to_flac`: re-encode even what needn't be."""

    to_flac: bool = False
    sample_rate: int | None = None
    mono: bool = False

    @property
    def changes_all(self) -> bool:
        return self.to_flac or self.mono


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard to build: its file name, and its items by their numbers in the list."""

    name: str
    items: list[tuple[int, Entry]]


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """A finished shard. `record`: None where none of its items could be used, so that there is no tar.

    `broken`: path and reason of items left out."""

    name: str
    record: ShardRecord | None
    broken: list[tuple[str, str]]


def plan_shards(
    entries: list[Entry], *, held_out: float, shard_bytes: int, num_shards: int | None, seed: int
) -> list[PlannedShard]:
    """Entries in random order, divided into shards for training and, before them, a share for evaluation.

    Args:
        held_out: share of the entries that goes into `held_out-….tar`; the others go into `train-….tar`.
        shard_bytes: of encoded audio in a shard, about.
        num_shards: of the training shards; None: by `shard_bytes`.
    """
    numbered = list(enumerate(entries))
    random.Random(seed).shuffle(numbered)
    number_held_out = round(held_out * len(numbered))
    if held_out > 0:
        number_held_out = min(max(1, number_held_out), len(numbered) - 1)
    parts = {"held_out": numbered[:number_held_out], "train": numbered[number_held_out:]}
    planned = []
    for part, items in parts.items():
        groups = _even(items, num_shards) if num_shards and part == "train" else _by_size(items, shard_bytes)
        digits = max(5, len(str(len(groups))))
        planned += [PlannedShard(f"{part}-{number:0{digits}d}.tar", group) for number, group in enumerate(groups)]
    return planned


def _even(items: list[tuple[int, Entry]], number: int) -> list[list[tuple[int, Entry]]]:
    return [items[k * len(items) // number : (k + 1) * len(items) // number] for k in range(number)]


def _by_size(items: list[tuple[int, Entry]], shard_bytes: int) -> list[list[tuple[int, Entry]]]:
    total = sum(_size(entry) for _, entry in items)
    number = max(1, min(len(items), round(total / shard_bytes)))
    return _even(items, number) if items else []


def _size(entry: Entry) -> int:
    try:
        return entry.path.stat().st_size
    except OSError:
        return 0


def fingerprint(planned: list[PlannedShard], encoding: Encoding) -> str:
    """Stands for everything the shards will hold, short of the audio itself, of which the sizes count."""
    state = hashlib.sha256(repr(encoding).encode())
    for shard in planned:
        state.update(shard.name.encode())
        for number, entry in shard.items:
            parts = [number, str(entry.path), _size(entry), entry.captions, entry.more, entry.problem]
            state.update(json.dumps(parts, default=str).encode())
    return state.hexdigest()


def finished(folder: Path, name: str) -> BuiltShard | None:
    """What is known of a shard that was built before, if it is there in full length."""
    try:
        content = json.loads((folder / RECORDS / f"{name}.json").read_text())
        record = ShardRecord(**content["record"]) if content["record"] else None
        if record is not None and (folder / name).stat().st_size != record.bytes:
            return None
        return BuiltShard(name, record, [(path, reason) for path, reason in content["broken"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def build_shard(
    shard: PlannedShard, folder: Path, encoding: Encoding, on_item: Callable[[], None] = lambda: None
) -> BuiltShard:
    """Write one shard and its record.

    Args:
        on_item: called after each item, usable or not.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """
    partial = folder / f"{shard.name}.partial"
    broken: list[tuple[str, str]] = []
    num_items, seconds = 0, 0.0
    with partial.open("wb") as file:
        with TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
            for number, entry in shard.items:
                try:
                    extension, content, length = load_audio(entry, encoding)
                except BrokenItemError as error:
                    broken.append((str(entry.path), str(error)))
                else:
                    caption = entry.captions[0] if len(entry.captions) == 1 else entry.captions
                    description = {**entry.more, "caption": caption, "source": entry.path.name}
                    described = json.dumps(description, ensure_ascii=False, default=str).encode()
                    tar.write({"__key__": f"{number:09d}", extension: content, "json": described})
                    num_items, seconds = num_items + 1, seconds + length
                on_item()
        file.flush()
        os.fsync(file.fileno())
    record = None
    if num_items:
        record = ShardRecord(num_items, partial.stat().st_size, round(seconds, 3), digest(partial))
        os.replace(partial, folder / shard.name)
    else:
        partial.unlink()
    content_of_record = {"record": asdict(record) if record else None, "broken": broken}
    write_whole(folder / RECORDS / f"{shard.name}.json", json.dumps(content_of_record))
    return BuiltShard(shard.name, record, broken)


def load_audio(entry: Entry, encoding: Encoding) -> tuple[str, bytes, float]:
    """An entry's audio as it goes into the shard: extension, encoded file, and its length in seconds.

    Raises:
        BrokenItemError: it can't be used, see `clap_ds.data.items.decode_audio`.
    """
    if entry.problem:
        raise BrokenItemError(entry.problem)
    try:
        content = entry.path.read_bytes()
    except OSError as error:
        raise BrokenItemError(f"audio file can't be read: {error.strerror}") from None
    samples, rate = _decode(content)
    extension = entry.path.suffix.lower().removeprefix(".")
    resample = encoding.sample_rate is not None and rate != encoding.sample_rate
    if extension in AUDIO_FORMATS and not encoding.changes_all and not resample:
        return extension, content, len(samples) / rate
    return "flac", _to_flac(samples, rate, encoding), len(samples) / rate


def _decode(content: bytes) -> tuple[NDArray[np.float32], int]:
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, MemoryError, ValueError) as error:
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BrokenItemError(f"audio can't be decoded: {reason}") from None
    if len(samples) < 2:
        raise BrokenItemError("audio holds a single sample" if len(samples) else "audio holds no samples")
    if not np.isfinite(samples).all():
        raise BrokenItemError("audio holds NaN or infinite samples")
    if not samples.any():
        raise BrokenItemError("audio is silent: every sample is 0")
    return samples, rate


def _to_flac(samples: NDArray[np.float32], rate: int, encoding: Encoding) -> bytes:
    import torch

    from clap_ds.data.items import resample

    waveform = torch.from_numpy(samples.T.copy())
    if encoding.mono or len(waveform) > 8:  # FLAC's most channels
        waveform = waveform.mean(dim=0, keepdim=True)
    target = encoding.sample_rate or rate
    waveform = resample(waveform, rate, target).clamp_(-1, 1)
    buffer: Any = io.BytesIO()
    soundfile.write(buffer, waveform.T.numpy(), target, format="FLAC", subtype="PCM_16")
    return bytes(buffer.getvalue())
