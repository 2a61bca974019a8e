"""Which audio files go into which shard, and what goes in of each.

Audio is decoded once to check it, and re-encoded only where that is wanted or needed.
"""

from __future__ import annotations

import io
import json
import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
import torch

from clap_ds.config.errors import UserError
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import AUDIO_FORMATS, check_finite, check_samples, open_audio
from clap_ds.data.resampling import resample
from clap_ds.data.shard_making.audio_files import check_whole, open_regular
from clap_ds.data.shard_making.caption_lists import Entry
from clap_ds.data.shard_making.prepared_audio import Clip, Preparation
from clap_ds.data.shard_making.splits import held_out
from clap_ds.data.shard_making.writing import BuiltShard, Named, OnItem, write_shard


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


def plan_of(planned: list[PlannedShard], encoding: Encoding | Preparation) -> Iterator[str]:
    """What the shards follow from: their list, its captions and sizes of files, and what becomes of audio."""
    yield repr(encoding)
    for shard in planned:
        yield shard.name
        for number, entry in shard.items:
            parts = [number, str(entry.path), entry.size, entry.captions, entry.more, list(map(str, entry.others))]
            yield json.dumps(parts, default=str)


def build_shard(shard: PlannedShard, folder: Path, encoding: Encoding | Preparation, on_item: OnItem) -> BuiltShard:
    """Write one shard and its record; OSError where the folder can't be written, or the disk is full."""
    broken: list[Named] = []

    def items() -> Iterator[tuple[dict[str, Any], float]]:
        for number, entry in shard.items:
            try:
                clips = load_audio(entry, encoding)
            except BrokenItemError as error:
                broken.extend((str(path), str(error)) for path in (entry.path, *entry.others))
            else:
                caption = entry.captions[0] if len(entry.captions) == 1 else entry.captions
                names = list(dict.fromkeys(path.name for path in (entry.path, *entry.others)))
                source = names[0] if len(names) == 1 else names
                description = {**entry.more, "caption": caption, "source": source}
                described = json.dumps(description, ensure_ascii=False, default=str).encode()
                for clip in clips:
                    key = f"{number:09d}{clip.suffix}"
                    yield {"__key__": key, clip.extension: clip.content, "json": described}, clip.seconds
            on_item()

    return write_shard(folder, shard.name, items(), broken)


def load_audio(entry: Entry, encoding: Encoding | Preparation) -> list[Clip]:
    """An entry's audio as it goes into the shard; or BrokenItemError."""
    with open_regular(entry.path) as opened:
        content = opened.read()
    if isinstance(encoding, Preparation):
        return encoding.clips(content)
    with open_audio(content) as file:
        rate = file.samplerate
        samples = file.read(dtype="float32", always_2d=True)
        check_whole(content, file, len(samples))
    check_finite(samples)
    check_samples(len(samples), len(samples), not samples.any())
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
    return [Clip(extension, content, len(samples) / rate)]
