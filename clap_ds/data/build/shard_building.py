"""Which audio files go into which shard, and the making of one shard.

A shard is written under another name and gets its own, and a record, when it is whole: a build that is killed resumes with the
shards that have none. Audio is decoded once to check it, and re-encoded only where that is wanted or needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import soundfile
import torch
from webdataset.writer import TarWriter

from clap_ds.config.errors import UserError
from clap_ds.config.files import write_atomically
from clap_ds.data.build.audio_files import check_whole, open_regular
from clap_ds.data.build.caption_lists import Entry
from clap_ds.data.build.splits import held_out
from clap_ds.data.items import AUDIO_FORMATS, BrokenItemError, check_samples, open_audio, resample
from clap_ds.data.shard_manifest import ShardRecord, digest

RECORDS = ".build"  # folder of finished shards' records, beside them


@dataclass(frozen=True, slots=True)
class Encoding:
    """What audio is turned into. `sample_rate`: Hz; None keeps the file's. `to_flac`: re-encode even what needn't be."""

    to_flac: bool = False
    sample_rate: int | None = None
    mono: bool = False


class PlannedShard(NamedTuple):
    """A shard to build: its file name and its items."""

    name: str
    items: list[tuple[int, Entry]]  # with their numbers in the list


class BuiltShard(NamedTuple):
    """A finished shard."""

    name: str
    record: ShardRecord | None  # None where none of its items could be used, so that there is no tar
    broken: list[tuple[str, str]]  # path and reason of items left out


def plan_shards(entries: list[Entry], options: Namespace) -> list[PlannedShard]:
    """Entries in random order, divided into shards for training and, before them, those that are held out (see `splits`).

    These go into `held_out-….tar`, the others into as many `train-….tar` as `options.shards`. Where that is None, and of what
    is held out, a shard gets about `options.shard_mb` of encoded audio. UserError where that leaves one without items.
    """
    order = list(range(len(entries)))
    random.Random(options.seed).shuffle(order)
    chosen = held_out(entries, order, options)
    planned = []
    for part in ("held_out", "train"):
        items = [(number, entries[number]) for number in order if (number in chosen) == (part == "held_out")]
        number = min(len(items), max(1, round(sum(entry.size for _, entry in items) / (options.shard_mb * 1e6))))
        if options.shards and part == "train":
            number = options.shards
            if number > len(items):
                found = f"--shards {number} is more than the {len(items)} items for training"
                raise UserError(f"{found}: a shard would be empty")
        for k in range(number):
            group = items[k * len(items) // number : (k + 1) * len(items) // number]
            planned.append(PlannedShard(f"{part}-{k:0{max(5, len(str(number)))}d}.tar", group))
    return planned


def claim(folder: Path, planned: list[PlannedShard], encoding: Encoding) -> None:
    """Make the folder, or make sure that it is this build's: of the same list, options and sizes of files; else UserError."""
    state = hashlib.sha256(repr(encoding).encode())
    for shard in planned:
        state.update(shard.name.encode())
        for number, entry in shard.items:
            parts = [number, str(entry.path), entry.size, entry.captions, entry.more, list(map(str, entry.others))]
            state.update(json.dumps(parts, default=str).encode())
    mark = folder / RECORDS / "plan"
    try:
        if not mark.is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"{folder} exists and isn't an empty folder; name a new one, or empty it first")
            mark.parent.mkdir(parents=True)
            write_atomically(mark, state.hexdigest())
        elif mark.read_text() != state.hexdigest():
            other = "holds shards of another list, other audio or other options"
            raise UserError(f"{folder} {other}; name a new folder, or empty it")
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}") from None


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


def build_shard(shard: PlannedShard, folder: Path, encoding: Encoding, on_item: Callable[[], None]) -> BuiltShard:
    """Write one shard and its record; OSError where the folder can't be written, or the disk is full.

    `on_item` is called after each item, usable or not; what it raises ends the work.
    """
    partial, broken = folder / f"{shard.name}.partial", []
    num_items, seconds = 0, 0.0
    with partial.open("wb") as file:
        with TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
            for number, entry in shard.items:
                try:
                    extension, content, length = load_audio(entry, encoding)
                except BrokenItemError as error:
                    broken += [(str(path), str(error)) for path in (entry.path, *entry.others)]
                else:
                    caption = entry.captions[0] if len(entry.captions) == 1 else entry.captions
                    names = list(dict.fromkeys(path.name for path in (entry.path, *entry.others)))
                    source = names[0] if len(names) == 1 else names
                    description = {**entry.more, "caption": caption, "source": source}
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
    built = {"record": asdict(record) if record else None, "broken": broken}
    write_atomically(folder / RECORDS / f"{shard.name}.json", json.dumps(built))
    return BuiltShard(shard.name, record, broken)


def load_audio(entry: Entry, encoding: Encoding) -> tuple[str, bytes, float]:
    """An entry's audio as it goes into the shard: extension, encoded file, and its seconds; or BrokenItemError."""
    with open_regular(entry.path) as opened:
        content = opened.read()
    with open_audio(content) as file:
        rate = file.samplerate
        samples = file.read(dtype="float32", always_2d=True)
        check_whole(content, file, len(samples))
    check_samples(samples, len(samples))
    extension = entry.path.suffix.lower().removeprefix(".")
    wanted_rate = encoding.sample_rate or rate
    if extension not in AUDIO_FORMATS or encoding.to_flac or encoding.mono or wanted_rate != rate:
        waveform = torch.from_numpy(samples.T.copy())
        if encoding.mono or len(waveform) > 8:  # FLAC's most channels
            waveform = waveform.mean(dim=0, keepdim=True)
        flac = io.BytesIO()
        converted = resample(waveform, rate, wanted_rate).clamp_(-1, 1).T.numpy()
        soundfile.write(flac, converted, wanted_rate, format="FLAC", subtype="PCM_16")
        extension, content = "flac", flac.getvalue()
    return extension, content, len(samples) / rate
