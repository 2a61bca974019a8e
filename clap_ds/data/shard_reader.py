"""One worker's part in reading shards: items in an order that can be entered anywhere, decoded and collated to pieces.

The order of a pass follows from the seed, the pass and the place in it alone, and so do an item's crop and caption. To go on
from a place, items before it are passed over without being decoded. Which shards a worker has is left to `shard_list`, reading
a tar to `tar_items`, decoding one item to `items`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from webdataset.filters import shuffle

from clap_ds.data.batch import Batch, to_int16
from clap_ds.data.items import BrokenItemError, choose_audio, choose_caption, decode_audio
from clap_ds.data.shard_list import FIELD, Share
from clap_ds.data.tar_items import DAMAGE, Item, Report, fetch, read_items, words
from clap_ds.model.tokenizer import tokenize

NUM_EXAMPLES = 5  # broken items quoted in errors and statistics


@dataclass(frozen=True, slots=True)
class Broken:
    """Something in the shards that can't be used: an item or, by its path, a tar."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


Position = dict[str, Any]
"""Where a reader stands, fit for JSON: `samples` given so far, and of each source in `passes` the number of the pass and how
many of its items were drawn."""

START: Position = {"samples": 0, "passes": []}


@dataclass(slots=True)
class Piece:
    """What a worker sends: some rows, and what it met on the way.

    Attributes:
        worker: which it is.
        after: where its reader stands when these rows are given.
        encoded_bytes: of audio files decoded for them.
        failure: why it has given up; then there are no rows.
    """

    worker: int
    batch: Batch | None
    broken: list[Broken]
    after: Position
    encoded_bytes: int = 0
    failure: str = ""

    def pin_memory(self) -> Piece:
        batch = self.batch.pin_memory() if self.batch else None
        return Piece(self.worker, batch, self.broken, self.after, self.encoded_bytes, self.failure)


class Sample(NamedTuple):
    """A waveform (num_samples,) float32 with its caption; `encoded_bytes` of the file it was."""

    waveform: Tensor
    caption: str
    encoded_bytes: int


Decode = Callable[[Item, random.Random], Sample | None]


class SourceReader:
    """Goes through one worker's share of a source without end.

    Args:
        shuffle_buffer: encoded items held for shuffling; 0 keeps the order of files and tars.
        seed: text that decides the order, crops and choice of captions.
        pass_number, drawn: where to go on from: a pass, and items of it drawn before.

    Attributes:
        pass_number, drawn: where it stands.
    """

    def __init__(
        self, share: Share, shuffle_buffer: int, seed: str, report: Report, *, pass_number: int, drawn: int
    ) -> None:
        self.name = share.name
        self.pass_number = pass_number
        self.drawn = drawn
        self._share = share
        self._shuffle_buffer = shuffle_buffer
        self._seed = seed
        self._report = report

    def samples(self, decode: Decode) -> Iterator[Sample]:
        """Samples without end; ends only where a whole pass gave none."""
        skipped = self.drawn
        while True:
            is_useful = skipped > 0
            for number, item in enumerate(self._pass(skipped)):
                if number < skipped:
                    continue
                self.drawn = number + 1
                sample = decode(item, random.Random(f"{self._seed}, pass {self.pass_number}, item {number}"))
                if sample is not None:
                    is_useful = True
                    yield sample
            if not is_useful:
                return
            self.pass_number, self.drawn, skipped = self.pass_number + 1, 0, 0

    def _pass(self, num_skipped: int) -> Iterator[Item]:
        """The items of one pass, the first `num_skipped` without content where that is possible."""
        rng = random.Random(f"{self._seed}, pass {self.pass_number}")
        shards = self._share.shards
        if self._share.shards_per_pass:
            shards = rng.choices(shards, k=self._share.shards_per_pass)
        elif self._shuffle_buffer:
            shards = rng.sample(shards, len(shards))
        items = self._items(shards, num_skipped)
        return shuffle(self._shuffle_buffer, rng=rng)(items) if self._shuffle_buffer else items

    def _items(self, shards: list[str], num_skipped: int) -> Iterator[Item]:
        place = 0

        def is_skipped(member: str) -> bool:
            return place < num_skipped

        for shard in shards:
            for item in read_items(shard, self._report, leave=is_skipped):
                place += 1
                yield item


@dataclass(slots=True)
class ShardReader:
    """One worker's pieces. Remembers what was broken, so that each is named once.

    Attributes:
        worker: number of the worker it is for.
        shares: the worker's part of every source.
        sample_rate, num_samples: of the waveforms, Hz and samples.
        piece_size: rows in a piece.
        shuffle_buffer: encoded items held for shuffling, of all sources together.
        as_int16: send waveforms as int16.
        seed: text that differs between runs' seeds, ranks and workers.
        start: where to go on from.
    """

    worker: int
    shares: list[Share]
    tokenizer: PreTrainedTokenizerBase
    text_tokens: int
    sample_rate: int
    num_samples: int
    piece_size: int
    shuffle_buffer: int
    seed: str
    as_int16: bool = False
    start: Position = field(default_factory=lambda: START)
    _known: dict[str, Broken] = field(default_factory=dict)
    _news: list[Broken] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        """Pieces without end; the last says why, where a source has nothing that can be used."""
        sources = self._open_sources()
        streams = [source.samples(self._decode) for source in sources]
        weights = [share.weight for share in self.shares]
        rows: list[Sample] = []
        for number in itertools.count(self.start["samples"]):
            chosen = 0
            if len(streams) > 1:
                chosen = random.Random(f"{self.seed}, mixture {number}").choices(range(len(streams)), weights)[0]
            sample = next(streams[chosen], None)
            position = {"samples": number + 1, "passes": [[source.pass_number, source.drawn] for source in sources]}
            if sample is None:
                yield Piece(self.worker, None, self._take_news(), position, failure=self._failure(self.shares[chosen]))
                return
            rows.append(sample)
            if len(rows) == self.piece_size:
                size = sum(row.encoded_bytes for row in rows)
                yield Piece(self.worker, self._collate(rows), self._take_news(), position, size)
                rows = []

    def _open_sources(self) -> list[SourceReader]:
        places = self.start["passes"] or [[0, 0]] * len(self.shares)
        return [
            SourceReader(
                share,
                max(1, round(self.shuffle_buffer * share.weight)) if self.shuffle_buffer else 0,
                f"{self.seed}, source {number}",
                self._report,
                pass_number=place[0],
                drawn=place[1],
            )
            for number, (share, place) in enumerate(zip(self.shares, places, strict=True))
        ]

    def _decode(self, item: Item, rng: random.Random) -> Sample | None:
        try:
            fetch(item)
            caption = choose_caption(item, rng)
            if not caption.isascii() and self._is_unknown(caption):
                raise BrokenItemError(f"the tokenizer knows no part of the caption {caption[:40]!r}")
            encoded = choose_audio(item)
            waveform = decode_audio(encoded, sample_rate=self.sample_rate, num_samples=self.num_samples, rng=rng)
        except (BrokenItemError, *DAMAGE) as error:
            self._report(f"{item['__url__']}: {item['__key__']}", words(error))
            return None
        return Sample(waveform, caption, len(encoded))

    def _is_unknown(self, caption: str) -> bool:
        ids = self.tokenizer(caption, add_special_tokens=False)["input_ids"]
        return all(token == self.tokenizer.unk_token_id for token in ids)

    def _collate(self, rows: list[Sample]) -> Batch:
        waveforms = torch.stack([row.waveform for row in rows])
        captions = tokenize([row.caption for row in rows], self.tokenizer, self.text_tokens)
        return Batch(to_int16(waveforms) if self.as_int16 else waveforms, *captions)

    def _report(self, name: str, reason: str) -> None:
        if name not in self._known:
            self._known[name] = Broken(name, reason)
            self._news.append(self._known[name])

    def _take_news(self) -> list[Broken]:
        news, self._news = self._news, []
        return news

    def _failure(self, share: Share) -> str:
        examples = "; ".join(str(broken) for broken in itertools.islice(self._known.values(), NUM_EXAMPLES))
        return (
            f"{FIELD}: a whole pass over {len(share.shards)} shard(s) gave no usable item; {len(self._known)} broken"
            + (f", the first: {examples}" if examples else f": {share.shards[0]} holds no items")
        )
