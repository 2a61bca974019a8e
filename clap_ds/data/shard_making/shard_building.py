"""Which audio files go into which shard, and what goes in of each.

Audio is decoded once to check it, and re-encoded only where that is wanted or needed.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from clap_ds.config.errors import UserError
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.shard_making.audio_files import open_regular
from clap_ds.data.shard_making.caption_lists import Entry
from clap_ds.data.shard_making.prepared_audio import Clip, Conversion
from clap_ds.data.shard_making.splits import held_out
from clap_ds.data.shard_making.writing import Member, Named


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
    for side in ("held_out", "train"):
        items = [(number, entries[number]) for number in order if (number in chosen) == (side == "held_out")]
        number = min(len(items), max(1, round(sum(entry.size for _, entry in items) / (options.shard_mb * 1e6))))
        if options.shards and side == "train":
            number = options.shards
            if number > len(items):
                found = f"--shards {number} is more than the {len(items)} items for training"
                raise UserError(f"{found}: a shard would be empty")
        for k in range(number):
            group = items[k * len(items) // number : (k + 1) * len(items) // number]
            planned.append(PlannedShard(f"{side}-{k:0{max(5, len(str(number)))}d}.tar", group))
    return planned


def plan_of(planned: list[PlannedShard], conversion: Conversion) -> Iterator[str]:
    """What the shards follow from: their list, its captions and sizes of files, and what becomes of audio."""
    yield repr(conversion)
    for shard in planned:
        yield shard.name
        for number, entry in shard.items:
            parts = [number, str(entry.path), entry.size, entry.captions, entry.more, list(map(str, entry.others))]
            yield json.dumps(parts, default=str)


def members_of(shard: PlannedShard, conversion: Conversion, broken: list[Named]) -> Iterator[Member | None]:
    """What goes into a shard of each of its items; None of those that can't be used, which are added to `broken`."""
    for number, entry in shard.items:
        names = [entry.path, *entry.others]
        try:
            clip = load_audio(entry, conversion)
        except BrokenItemError as error:
            broken += [(str(path), str(error)) for path in names]
            yield None
            continue
        sources = list(dict.fromkeys(path.name for path in names))
        caption, source = (each[0] if len(each) == 1 else each for each in (entry.captions, sources))
        described = {**entry.more, "caption": caption, "source": source}
        content = json.dumps(described, ensure_ascii=False, default=str).encode()
        yield {"__key__": f"{number:09d}", clip.extension: clip.content, "json": content}, clip.seconds


def load_audio(entry: Entry, conversion: Conversion) -> Clip:
    """An entry's audio as it goes into the shard; or BrokenItemError."""
    with open_regular(entry.path) as opened:
        content = opened.read()
    return conversion.clip(content, entry.path.suffix.lower().removeprefix("."))
