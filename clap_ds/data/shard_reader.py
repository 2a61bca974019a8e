"""One worker's part in reading shards: items in an order that can be entered anywhere, decoded and collated to pieces.

The order of a pass follows from the seed, the pass and the place in it alone, and so do an item's crop and caption. To resume
at a place, items before it are passed over without being decoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from webdataset.filters import shuffle

from clap_ds.config.sections import ShardData
from clap_ds.data.batch import Batch, BatchSpec
from clap_ds.data.items import Broken, BrokenItemError, captions_of, choose_audio, decode_audio
from clap_ds.data.shard_list import FIELD, Source
from clap_ds.data.tar_items import DAMAGE, Item, Report, fetch, read_items, words
from clap_ds.model.tokenizer import tokenize

NUM_EXAMPLES = 5  # broken items quoted in errors and statistics

Position = dict[str, Any]
"""Where a reader stands, fit for JSON: `samples` given so far, and of each source in `passes` the number of the pass and how
many of its items were drawn."""
START: Position = {"samples": 0, "passes": []}


@dataclass(slots=True)
class Piece:
    """What a worker sends: some rows, and what it met on the way."""

    worker: int
    batch: Batch | None
    broken: list[Broken]
    after: Position  # where its reader stands when these rows are given
    encoded_bytes: int = 0  # of audio files decoded for them
    failure: str = ""  # why it has given up; then there are no rows

    def pin_memory(self) -> Piece:
        return replace(self, batch=self.batch.pin_memory()) if self.batch else self


class Sample(NamedTuple):
    """A waveform (num_samples,) float32 with its caption; `encoded_bytes` of the file it was."""

    waveform: Tensor
    caption: str
    encoded_bytes: int


@dataclass(slots=True)
class SourceReader:
    """Goes through one worker's share of a source without end."""

    source: Source
    shuffle_buffer: int  # encoded items held for shuffling; 0 keeps the order of files and tars
    seed: str  # decides the order, crops and choice of captions
    report: Report
    pass_number: int
    drawn: int  # items of this pass

    def samples(self, decode: Callable[[Item, random.Random], Sample | None]) -> Iterator[Sample]:
        """Samples without end; ends only where a whole pass gave none."""
        is_useful = True
        while is_useful:
            skipped = self.drawn
            is_useful = skipped > 0
            for number, item in islice(enumerate(self._pass(skipped)), skipped, None):
                self.drawn = number + 1
                sample = decode(item, random.Random(f"{self.seed}, pass {self.pass_number}, item {number}"))
                if sample is not None:
                    is_useful = True
                    yield sample
            if is_useful:
                self.pass_number, self.drawn = self.pass_number + 1, 0

    def _pass(self, num_skipped: int) -> Iterator[Item]:
        """The items of one pass, the first `num_skipped` without content where that is possible."""
        rng = random.Random(f"{self.seed}, pass {self.pass_number}")
        shards = self.source.shards
        if self.source.shards_per_pass:
            shards = rng.choices(shards, k=self.source.shards_per_pass)
        elif self.shuffle_buffer:
            shards = rng.sample(shards, len(shards))
        read = 0

        def is_skipped(member: str) -> bool:
            return read < num_skipped

        def items() -> Iterator[Item]:
            nonlocal read
            for item in chain.from_iterable(read_items(shard, self.report, leave=is_skipped) for shard in shards):
                read += 1
                yield item

        return shuffle(self.shuffle_buffer, rng=rng)(items()) if self.shuffle_buffer else items()


@dataclass(slots=True)
class ShardReader:
    """One worker's pieces. Remembers what was broken, so that each is named once."""

    worker: int
    sources: list[Source]  # the worker's part of every source
    data: ShardData
    spec: BatchSpec
    tokenizer: PreTrainedTokenizerBase
    piece_size: int
    seed: str  # differs between runs' seeds, ranks and workers
    start: Position
    _known: dict[str, Broken] = field(default_factory=dict)
    _news: list[Broken] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        """Pieces without end; the last says why, where a source has nothing that can be used."""
        readers, places = [], self.start["passes"] or [[0, 0]] * len(self.sources)
        for number, (source, place) in enumerate(zip(self.sources, places, strict=True)):
            buffer = self.data.shuffle_buffer and max(1, round(self.data.shuffle_buffer * source.weight))
            readers.append(SourceReader(source, buffer, f"{self.seed}, source {number}", self._report, *place))
        streams = [reader.samples(self._decode) for reader in readers]
        weights = [source.weight for source in self.sources]
        rows: list[Sample] = []
        for number in count(self.start["samples"]):
            (chosen,) = random.Random(f"{self.seed}, mixture {number}").choices(range(len(streams)), weights)
            sample = next(streams[chosen], None)
            position = {"samples": number + 1, "passes": [[reader.pass_number, reader.drawn] for reader in readers]}
            if sample is None:
                yield Piece(self.worker, None, self._take_news(), position, failure=self._failure(chosen))
                return
            rows.append(sample)
            if len(rows) == self.piece_size:
                size = sum(row.encoded_bytes for row in rows)
                yield Piece(self.worker, self._collate(rows), self._take_news(), position, size)
                rows = []

    def _decode(self, item: Item, rng: random.Random) -> Sample | None:
        audio = self.spec.model.audio
        try:
            fetch(item)
            caption = rng.choice(captions_of(item))
            if not caption.isascii():
                ids = self.tokenizer(caption, add_special_tokens=False)["input_ids"]
                if all(token == self.tokenizer.unk_token_id for token in ids):
                    raise BrokenItemError(f"the tokenizer knows no part of the caption {caption[:40]!r}")
            encoded = choose_audio(item)
            waveform = torch.empty(audio.num_samples, dtype=getattr(torch, self.data.waveforms))
            decode_audio(encoded, waveform, sample_rate=audio.sample_rate, rng=rng)
        except (BrokenItemError, *DAMAGE) as error:
            self._report(f"{item['__url__']}: {item['__key__']}", words(error))
            return None
        return Sample(waveform, caption, len(encoded))

    def _collate(self, rows: list[Sample]) -> Batch:
        waveforms = torch.stack([row.waveform for row in rows])
        captions = tokenize([row.caption for row in rows], self.tokenizer, self.spec.text_tokens)
        return Batch(waveforms, *captions)

    def _report(self, name: str, reason: str) -> None:
        if name not in self._known:
            self._known[name] = Broken(name, reason)
            self._news.append(self._known[name])

    def _take_news(self) -> list[Broken]:
        news, self._news = self._news, []
        return news

    def _failure(self, number: int) -> str:
        shards = self.sources[number].shards
        examples = "; ".join(map(str, islice(self._known.values(), NUM_EXAMPLES)))
        why = f", the first: {examples}" if examples else f": {shards[0]} holds no items"
        return f"{FIELD}: a whole pass over {len(shards)} shard(s) gave no usable item; {len(self._known)} broken{why}"
