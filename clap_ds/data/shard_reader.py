"""Read one worker's share of the shards in a resumable order, and decode and collate it to pieces.

The order of a pass and an item's crop and caption depend only on the seed, the pass and the
position in it.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from webdataset.filters import shuffle

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.clip import Broken, captions_of, choose_clip, read_clip, values_by_name
from clap_ds.data.shard_assignment import Part, Source
from clap_ds.data.shard_io import open_ahead, open_shard
from clap_ds.data.shard_manifest import (
    DAMAGE,
    FIELD,
    Item,
    fetch,
    list_items,
    samples_between,
    words,
)
from clap_ds.data.staging import StagingFolder
from clap_ds.utils.errors import printable
from clap_ds.weights.hub import PreTrainedTokenizerBase, tokenize

Position = dict[str, Any]
"""A reader's JSON-serializable state: `samples` read so far, and per source in `passes` the pass
and its items drawn."""
START: Position = {"samples": 0, "passes": []}


def note(text: str) -> None:
    print(f"{FIELD}: {printable(text)}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Chunk:
    """Hold what a worker sends: some rows and its broken items. The audio stays in the reader's
    memory."""

    worker: int
    place: int  # index of the audio in that memory
    broken: list[Broken]
    after: Position  # the reader's position after these rows
    captions: tuple[NDArray[np.int64], NDArray[np.int64]] | None = (
        None  # `Batch.input_ids` and `attention_mask`
    )
    made_in_s: float = 0.0  # excludes waiting to be fetched; 0 for a worker's first piece
    failure: str = ""  # why the reader stopped; then there are no rows


@dataclass(slots=True)
class ShardReader:
    """Make one worker's pieces. `memory`, (places, rows, *row shape), is used as a ring buffer of
    places."""

    worker: int
    sources: list[Source]  # the worker's share of every source
    data: ShardData
    spec: BatchSpec
    tokenizer: PreTrainedTokenizerBase
    memory: Tensor
    seed: str  # differs between runs' seeds, ranks and workers
    start: Position
    staging: StagingFolder | None = None
    _broken: list[Broken] = field(default_factory=list)  # not yet sent
    _row: Tensor = field(default_factory=lambda: torch.empty(0))  # next row to fill

    def pieces(self) -> Iterator[Chunk]:
        """Yield pieces endlessly. If a source has no usable item, the last piece gives the
        reason."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, most)
        )  # a tar stays open while its items are buffered
        passes: list[tuple[int, int]] = [*self.start["passes"]] or [(0, 0)] * len(self.sources)
        streams = [self._captions(number, *passes[number]) for number in range(len(passes))]
        weights = [source.weight for source in self.sources]
        # the first piece's time includes starting
        place = 0
        began_s = 0.0
        chosen = 0
        captions: list[str] = []
        for number in count(self.start["samples"]):
            self._row = self.memory[place, len(captions)]
            if len(streams) > 1:
                (chosen,) = random.Random(f"{self.seed}, mixture {number}").choices(
                    range(len(streams)), weights
                )
            found = next(streams[chosen], None)
            if found is not None:
                caption, passes[chosen] = found
                captions.append(caption)
                if len(captions) < self.memory.shape[1]:
                    continue
            piece = Chunk(
                self.worker, place, self._broken, {"samples": number + 1, "passes": [*passes]}
            )
            if found is None:
                shards = self.sources[chosen].shards
                piece.failure = f"no usable item in a whole pass over {len(shards)} shard(s), such as {shards[0]}"
                yield piece
                return
            ids, mask = tokenize(captions, self.tokenizer, self.spec.context_length)
            piece.captions = ids.numpy(), mask.numpy()
            piece.made_in_s = time.perf_counter() - began_s if began_s else 0.0
            yield piece
            began_s = time.perf_counter()
            captions = []
            self._broken = []
            place = (place + 1) % len(self.memory)

    def _captions(
        self, number: int, pass_number: int, drawn: int
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        """Decode the items of a source to the next rows. Yield the caption of each usable one, and
          the pass and items drawn
        in it so far. End only if a whole pass has none."""
        source = self.sources[number]
        seed = f"{self.seed}, source {number}"
        given = self.start["samples"]
        is_useful = True
        while is_useful:
            wanted = source.deal.given(pass_number + 1) if source.deal else math.inf
            is_useful = drawn > 0 or given >= wanted
            in_pass = f"{seed}, pass {pass_number}"
            items = (
                self._items(source, pass_number, random.Random(in_pass))
                if given < wanted
                else iter(())
            )
            rest = islice(enumerate(items, start=1), drawn, None)
            for drawn, item in rest:
                caption = self._decode(item, random.Random(f"{in_pass}, item {drawn - 1}"))
                if caption is not None:
                    if given == self.start["samples"]:
                        self._note_captions(item)
                    is_useful = True
                    given += 1  # of this source; it is the only one if `wanted` is finite
                    yield caption, (pass_number, drawn)
                    if given >= wanted:
                        break
            pass_number = pass_number + 1
            drawn = 0

    def _items(self, source: Source, pass_number: int, rng: random.Random) -> Iterator[Item]:
        """Yield the items of one pass, then replacements for broken ones."""
        own: list[Part] = [(shard, 0, None) for shard in source.shards]
        others: list[Part] = []
        if source.deal:
            own, others = source.deal.parts(source.shards, pass_number)
        elif source.shards_per_pass:
            own = rng.choices(own, k=source.shards_per_pass)
        if not self.data.shuffle_buffer:
            return chain(self._read(own), self._read(others))
        if not source.shards_per_pass:
            own = rng.sample(own, len(own))
            others = rng.sample(others, len(others))
        buffer = max(1, round(self.data.shuffle_buffer * source.weight))
        return chain(shuffle(buffer, rng=rng)(self._read(own)), self._read(others))

    def _read(self, parts: list[Part]) -> Iterator[Item]:
        open_source = self.staging.open if self.staging else open_shard
        shards = (shard for shard, _, _ in parts)
        opened = open_ahead(shards, partial(open_source, cache_bytes=1e9 * self.data.cache_gb))
        for (_, first, end), (shard, open_file) in zip(parts, opened, strict=True):
            yield from samples_between(list_items(shard, self._report, open_file), first, end)

    def _decode(self, item: Item, rng: random.Random) -> str | None:
        """Write an item's audio to the next row. Return its caption, or None if it is broken."""
        try:
            fetch(item)
            caption = rng.choice(captions_of(item, self.data.caption_key))
            clip = choose_clip(item, "mel" if self._row.ndim == 2 else "encoded")
            read_clip(clip, self._row, audio=self.spec.model.audio, rng=rng)
        except DAMAGE as error:
            self._report(f"{item['__url__']}: {item['__key__']}", words(error))
            return None
        return caption

    def _note_captions(self, item: Item) -> None:
        """Log, on one worker, which captions are used if an item has several kinds."""
        names = list(values_by_name(item, self.data.caption_key))
        if len(names) > 1 and not (self.worker or self.spec.rank):
            note(
                f"captions are from {names[0]!r}, not {', '.join(names[1:])} (clap.data.caption_key)"
            )

    def _report(self, name: str, reason: str) -> None:
        self._broken.append(Broken(name, reason))
