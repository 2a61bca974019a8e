"""Read one worker's part of the shards: from tars to rows of a batch.

An item passes these steps:

1. `open_ahead` opens a pass's tars in order, each while the one before is read.
2. `_SourceReader._read_tars` lists a tar's items. Their contents stay in the file.
3. `_SourceReader._items_of_pass` shuffles them, and appends replacements for unusable ones.
4. `_SourceReader.read_into` chooses an item's caption and writes its audio to a row. It skips
   unusable items.
5. `ShardReader.chunks` draws the source of each row in a mixture, tokenizes captions and yields
   full chunks.

The order of a pass, and an item's crop and caption, depend only on the seed, the pass and the
position in it. A position is thus a few numbers, from which reading resumes exactly.
"""

from __future__ import annotations

import bisect
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from webdataset.filters import shuffle

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import Batch, BatchSpec
from clap_ds.data.clip import SkippedSample, captions_of, choose_clip, read_clip, values_by_name
from clap_ds.data.epoch_progress import Draw
from clap_ds.data.shard_assignment import OUTSIDE, REPLACEMENT, Source, TarPart
from clap_ds.data.shard_io import open_ahead, open_shard
from clap_ds.data.shard_manifest import (
    DAMAGE,
    FIELD,
    Item,
    Report,
    describe_error,
    fetch,
    list_items,
)
from clap_ds.data.staging import StagingFolder
from clap_ds.utils.errors import printable
from clap_ds.weights.hub import PreTrainedTokenizerBase, tokenize

Position = dict[str, Any]
"""A reader's JSON-serializable state: `samples` read so far, and per source in `passes` the pass
and its items drawn."""
START: Position = {"samples": 0, "passes": []}

_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def log(message: str) -> None:
    print(f"{FIELD}: {printable(message)}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Chunk:
    """Rows that a worker sends. Their audio stays in memory that it shares with its rank."""

    worker: int
    # index of the audio in the worker's ring buffer
    slot: int
    # unusable items since the previous chunk
    skipped: list[SkippedSample]
    # the reader's position after these rows
    position: Position
    # all draws from the reader's shares for these rows
    draws: list[Draw]
    # `Batch.input_ids` and `attention_mask`, which tensors would send through /dev/shm
    captions: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    # excludes waiting to be fetched; 0 for a worker's first chunk, which includes starting
    made_in_s: float = 0.0
    # why the reader stopped; then there are no rows
    failure: str = ""

    def batch(self, ring_buffers: Tensor) -> Batch:
        """Return the rows, whose audio is in `ring_buffers`, (workers, slots, rows, …)."""
        assert self.captions is not None
        ids, mask = self.captions
        audio = ring_buffers[self.worker, self.slot]
        return Batch(audio, torch.from_numpy(ids), torch.from_numpy(mask))


@dataclass(slots=True)
class ShardReader:
    """One worker's part of all sources, read endlessly in chunks."""

    worker: int
    # this worker's part of every source
    sources: list[Source]
    data: ShardData
    spec: BatchSpec
    tokenizer: PreTrainedTokenizerBase
    # (slots, rows of a chunk, *row shape): slots are filled in turn
    ring_buffer: Tensor
    # differs between runs' seeds, ranks and workers
    seed: str
    start: Position
    staging: StagingFolder | None = None

    def chunks(self) -> Iterator[Chunk]:
        """Yield chunks endlessly. If a source has no usable item, the last one gives the reason."""
        # A tar stays open while its items are in the shuffle buffer.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        skipped: list[SkippedSample] = []

        def report(name: str, reason: str) -> None:
            skipped.append(SkippedSample(name, reason))

        passes = self.start["passes"] or [(0, 0)] * len(self.sources)
        readers = [
            _SourceReader(self, number, start, report) for number, start in enumerate(passes)
        ]
        choose_source = self._source_chooser()
        num_samples = self.start["samples"]
        is_timed = False
        for slot in cycle(range(len(self.ring_buffer))):
            started_s = time.perf_counter()
            captions: list[str] = []
            draws: list[Draw] = []
            for row_number, row in enumerate(self.ring_buffer[slot]):
                reader = readers[choose_source(num_samples)]
                num_samples += 1
                caption, drawn_places = reader.read_into(row)
                draws += [Draw(row_number, reader.number, *drawn) for drawn in drawn_places]
                if caption is None:
                    failure = reader.failure()
                    yield Chunk(self.worker, slot, skipped, self.start, [], failure=failure)
                    return
                captions.append(caption)
            passes = [(reader.pass_number, reader.num_drawn) for reader in readers]
            position = {"samples": num_samples, "passes": passes}
            chunk = Chunk(self.worker, slot, [*skipped], position, draws)
            skipped.clear()
            prefix = self.spec.model.text.caption_prefix
            ids, mask = tokenize(captions, self.tokenizer, self.spec.context_length, prefix)
            chunk.captions = ids.numpy(), mask.numpy()
            if is_timed:
                chunk.made_in_s = time.perf_counter() - started_s
            yield chunk
            is_timed = True

    def _source_chooser(self) -> Callable[[int], int]:
        """Return a function that chooses the source of the sample after some others, by the
        sources' weights."""
        weights = [source.weight for source in self.sources]
        if len(weights) == 1:
            return lambda num_samples: 0
        numbers = range(len(weights))

        def draw(num_samples: int) -> int:
            rng = random.Random(f"{self.seed}, mixture {num_samples}")
            (number,) = rng.choices(numbers, weights)
            return number

        if any(source.partition is None for source in self.sources):
            return draw
        phase = random.Random(f"{self.seed}, mixture").random()
        ends = [*accumulate(weights)]

        # Multiples of the golden ratio cover [0, 1) evenly at any time. All workers thus draw from
        # a source equally often, up to a few samples, and finish its passes together.
        def spread(num_samples: int) -> int:
            place = (phase + num_samples * _GOLDEN_RATIO) % 1
            return min(bisect.bisect(ends, place), numbers[-1])

        return spread


class _SourceReader:
    """The items of one worker's part of a source, in endless passes from a position on."""

    def __init__(
        self, reader: ShardReader, number: int, start: tuple[int, int], report: Report
    ) -> None:
        self.number = number
        self._source = reader.sources[number]
        self._data = reader.data
        self._audio = reader.spec.model.audio
        self._staging = reader.staging
        self._seed = f"{reader.seed}, source {number}"
        self._report = report
        # Only one worker of the run logs the names of captions.
        self._logs_captions = reader.worker == 0 and reader.spec.rank == 0
        # Usable samples so far of all sources. Passes end by it only if there is one source.
        self._num_samples = reader.start["samples"]
        self._start_pass(*start)

    def _start_pass(self, pass_number: int, num_drawn: int) -> None:
        self.pass_number = pass_number
        # including unusable items
        self.num_drawn = num_drawn
        partition = self._source.partition
        self._samples_at_end = partition.samples_until(pass_number + 1) if partition else math.inf
        # A resumed pass had a usable item, or else this pass may be too short to have one.
        self._has_usable = num_drawn > 0 or self._num_samples >= self._samples_at_end
        if partition:
            is_short = partition.is_partial(pass_number) or partition.share_size(pass_number) == 0
            self._has_usable = self._has_usable or is_short
        self._is_share_read = False
        self._pass_seed = f"{self._seed}, pass {pass_number}"
        self._items = islice(self._items_of_pass(), num_drawn, None)

    def read_into(self, row: Tensor) -> tuple[str | None, list[tuple[int, int]]]:
        """Write the next usable item's audio to `row`.

        Returns:
            Its caption, or None if a whole pass has no usable item; and of everything that was
            drawn from this worker's share, the pass and the place in the share.
        """
        drawn_places = []
        while True:
            while self._num_samples < self._samples_at_end:
                place, item = next(self._items, (OUTSIDE, None))
                if item is None:
                    break
                rng = random.Random(f"{self._pass_seed}, item {self.num_drawn}")
                self.num_drawn += 1
                if place == REPLACEMENT:
                    drawn_places += self._rest_of_share()
                elif place != OUTSIDE:
                    drawn_places.append((self.pass_number, place))
                caption = self._decode(item, row, rng)
                if caption is not None:
                    self._num_samples += 1
                    self._has_usable = True
                    return caption, drawn_places
            if not self._has_usable:
                return None, drawn_places
            self._start_pass(self.pass_number + 1, 0)

    def _rest_of_share(self) -> list[tuple[int, int]]:
        """Return all places of the share at its end, once per pass. Those that couldn't be read,
        such as behind a cut in a tar, aren't left."""
        partition = self._source.partition
        if partition is None or self._is_share_read:
            return []
        self._is_share_read = True
        size = partition.share_size(self.pass_number)
        return [(self.pass_number, place) for place in range(size)]

    def failure(self) -> str:
        shards = self._source.shards
        return f"no usable item in a whole pass over {len(shards)} shard(s), such as {shards[0]}"

    def _items_of_pass(self) -> Iterator[tuple[int, Item]]:
        """Yield the items of one pass, then replacements for unusable ones, each with its place in
        this worker's share."""
        source = self._source
        rng = random.Random(self._pass_seed)
        parts = [TarPart(shard) for shard in source.shards]
        replacements: list[TarPart] = []
        if source.partition:
            parts, replacements = source.partition.parts(source.shards, self.pass_number)
        elif source.shards_per_pass:
            parts = rng.choices(parts, k=source.shards_per_pass)
        if not self._data.shuffle_buffer:
            return chain(self._read_tars(parts), self._read_replacements(replacements))
        if not source.shards_per_pass:
            parts = rng.sample(parts, len(parts))
            replacements = rng.sample(replacements, len(replacements))
        # Sources of a mixture divide the buffer.
        buffer_size = max(1, round(self._data.shuffle_buffer * source.weight))
        shuffled = shuffle(buffer_size, rng=rng)(self._read_tars(parts))
        return chain(shuffled, self._read_replacements(replacements))

    def _read_replacements(self, parts: list[TarPart]) -> Iterator[tuple[int, Item]]:
        """Yield samples of other shares: as many as are taken or, in a mixture, whose passes end
        with the share, until one is usable if none of the share was."""
        items = self._read_tars(parts)
        if self._source.partition is None or self._source.partition.is_counted:
            yield from items
            return
        while not self._has_usable:
            entry = next(items, None)
            if entry is None:
                return
            yield entry

    def _read_tars(self, parts: list[TarPart]) -> Iterator[tuple[int, Item]]:
        """Yield the items of these tars and their places, as far as they are readable."""
        open_source = self._staging.open if self._staging else open_shard
        open_tar = partial(open_source, cache_bytes=1e9 * self._data.cache_gb)
        opened_tars = open_ahead((part.tar for part in parts), open_tar)
        for part, (tar, open_file) in zip(parts, opened_tars, strict=True):
            items = list_items(tar, self._report, open_file)
            yield from part.select(items)

    def _decode(self, item: Item, row: Tensor, rng: random.Random) -> str | None:
        """Write an item's audio to `row`. Return its caption, or None if it is unusable."""
        try:
            fetch(item)
            caption = rng.choice(captions_of(item, self._data.caption_key))
            clip = choose_clip(item, "mel" if row.ndim == 2 else "encoded")
            read_clip(clip, row, audio=self._audio, rng=rng)
        except DAMAGE as error:
            self._report(f"{item['__url__']}: {item['__key__']}", describe_error(error))
            return None
        if self._logs_captions:
            self._logs_captions = False
            name, *unused = values_by_name(item, self._data.caption_key)
            if unused:
                log(f"captions are from {name!r}, not {', '.join(unused)} (clap.data.caption_key)")
        return caption
