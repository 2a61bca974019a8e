"""Real audio and captions from WebDataset tars, decoded in worker processes.

A worker goes through its shards again and again, in a new order each time, and sends small pieces of a micro-batch with news of
the items it had to skip. A worker that finds nothing usable in a whole pass says so in its last piece, for an exception would
reach the main process as a traceback in a string. Which shards a worker has is left to `shard_list`, decoding one item to
`items`, putting pieces together on the device to `batch`.

Pieces rather than whole micro-batches: 616 ten-second clips are 1.2 GB, and each worker would hold several in shared memory.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase
from webdataset.filters import shuffle
from webdataset.tariterators import group_by_keys, tar_file_expander

from clap_ds.data.batch import Batch
from clap_ds.data.captions import load_tokenizer, tokenize
from clap_ds.data.items import BrokenItemError, choose_audio, choose_caption, decode_audio
from clap_ds.data.shard_list import FIELD, divide_shards, expand_shards, note
from clap_ds.model.config import ClapConfig
from clap_ds.settings import ShardData

PIECE_SIZE = 16
NUM_EXAMPLES = 5  # broken items quoted in errors and statistics

_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Broken:
    """Something in the shards that can't be used: an item or, by its path, a tar."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(slots=True)
class Piece:
    """What a worker sends: some rows, and what it met on the way. `failure`: why it has given up; then there are no rows."""

    batch: Batch | None
    broken: list[Broken]
    failure: str = ""

    def pin_memory(self) -> Piece:
        return Piece(self.batch.pin_memory() if self.batch else None, self.broken, self.failure)


@dataclass(slots=True)
class ShardReader:
    """Goes through one worker's shards without end. Remembers what was broken, so that each is named once.

    Attributes:
        sample_rate, num_samples: of the waveforms, Hz and samples.
        piece_size: rows in a piece.
        shuffle_buffer: encoded items held for shuffling; 0 keeps the order of files and tars.
        seed: text that differs between runs' seeds, ranks and workers; decides order, crops and choice of captions.
    """

    shards: list[Path]
    tokenizer: PreTrainedTokenizerBase
    text_tokens: int
    sample_rate: int
    num_samples: int
    piece_size: int
    shuffle_buffer: int
    seed: str
    _known: dict[str, Broken] = field(default_factory=dict)
    _news: list[Broken] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        samples: list[tuple[torch.Tensor, str]] = []
        for epoch in itertools.count():
            found_any = False
            for sample in self.samples(random.Random(f"{self.seed}, epoch {epoch}")):
                found_any = True
                samples.append(sample)
                if len(samples) == self.piece_size:
                    yield Piece(self._collate(samples), self._take_news())
                    samples = []
            if not found_any:
                yield Piece(None, self._take_news(), failure=self._explain_failure())
                return

    def samples(self, rng: random.Random) -> Iterator[tuple[torch.Tensor, str]]:
        """One pass over the shards: waveform (num_samples,) and caption of every item that can be used."""
        shards = rng.sample(self.shards, len(self.shards)) if self.shuffle_buffer else self.shards
        items: Iterator[dict[str, Any]] = (item for shard in shards for item in self._items(shard))
        if self.shuffle_buffer:
            items = shuffle(self.shuffle_buffer, rng=rng)(items)
        for item in items:
            try:
                caption = choose_caption(item, rng)
                waveform = decode_audio(
                    choose_audio(item), sample_rate=self.sample_rate, num_samples=self.num_samples, rng=rng
                )
            except BrokenItemError as error:
                self._report(f"{item['__url__']}: {item['__key__']}", str(error))
            else:
                yield waveform, caption

    def _items(self, shard: Path) -> Iterator[dict[str, Any]]:
        """The items of one tar: extension → content, with `__key__` and `__url__`. A damaged tar gives what can be read.

        One tar at a time, because webdataset joins what a damaged one left with the start of the next.
        """

        def report(error: Exception) -> bool:
            self._report(str(shard), f"tar can't be read: {error.args[0] if error.args else error!r}")
            return True

        try:
            with shard.open("rb") as stream:
                if _is_cut_short(stream):
                    self._report(
                        str(shard), "tar is truncated (no end-of-archive mark); what can be read of it is used"
                    )
                yield from group_by_keys(
                    tar_file_expander([{"url": str(shard), "stream": stream}], handler=report), handler=report
                )
        except OSError as error:
            report(error)

    def _collate(self, samples: list[tuple[torch.Tensor, str]]) -> Batch:
        waveforms, captions = zip(*samples, strict=True)
        return Batch(torch.stack(waveforms), *tokenize(list(captions), self.tokenizer, self.text_tokens))

    def _report(self, name: str, reason: str) -> None:
        if name not in self._known:
            self._known[name] = Broken(name, reason)
            self._news.append(self._known[name])

    def _take_news(self) -> list[Broken]:
        news, self._news = self._news, []
        return news

    def _explain_failure(self) -> str:
        examples = "; ".join(str(broken) for broken in itertools.islice(self._known.values(), NUM_EXAMPLES))
        return (
            f"{FIELD}: a whole pass over {len(self.shards)} shard(s) gave no usable item; {len(self._known)} broken"
            + (f", the first: {examples}" if examples else f": {self.shards[0]} holds no items")
        )


def _is_cut_short(stream: Any) -> bool:
    """Whether an uncompressed tar lacks its closing blocks of zeros. Leaves `stream` at its start.

    tarfile takes a cut between two members, or within a header, for the end.
    """
    header = stream.read(_BLOCK)
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _BLOCK))
    tail = stream.read()
    stream.seek(0)
    return header[257:262] == b"ustar" and (size % _BLOCK != 0 or any(tail))


class ShardDataset(IterableDataset[Piece]):
    """Gives each DataLoader worker its own `ShardReader`; without workers, the first."""

    def __init__(self, readers: list[ShardReader]) -> None:
        self._readers = readers

    def __iter__(self) -> Iterator[Piece]:
        worker = get_worker_info()
        return self._readers[worker.id if worker else 0].pieces()


def _start_worker(worker: int) -> None:
    # A forked worker would run the training process's handlers: interrupts are for that process, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


class ShardPieces:
    """One rank's endless micro-batches from its shards. Args and errors: see `clap_ds.data.batch.build_batches`.

    Args:
        pin: page-locked memory, for copying to a GPU.
    """

    def __init__(
        self,
        data: ShardData,
        *,
        model: ClapConfig,
        text_tokens: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        pin: bool,
    ) -> None:
        shards = expand_shards(data.shards)
        shards_by_worker = divide_shards(shards, rank=rank, world_size=world_size, num_workers=data.num_workers)
        tokenizer = load_tokenizer(data.tokenizer, vocab_size=model.text.vocab_size)
        piece_size = min(micro_batch, PIECE_SIZE)
        readers = [
            ShardReader(
                shards=own,
                tokenizer=tokenizer,
                text_tokens=text_tokens,
                sample_rate=model.audio.sample_rate,
                num_samples=model.audio.num_samples,
                piece_size=piece_size,
                shuffle_buffer=data.shuffle_buffer,
                seed=f"seed {seed}, rank {rank}, worker {worker}",
            )
            for worker, own in enumerate(shards_by_worker)
        ]
        self._micro_batch = micro_batch
        self._num_shards = len(shards)
        self._num_workers = len(readers) if data.num_workers else 0
        self._broken: list[Broken] = []
        self._num_broken = 0
        self._rest: Batch | None = None
        # Two micro-batches in all wait ahead of the one in use.
        prefetch = max(2, math.ceil(2 * micro_batch / (piece_size * len(readers)))) if self._num_workers else None
        self._received: Iterator[Piece] | None = iter(
            DataLoader(
                ShardDataset(readers),
                batch_size=None,
                num_workers=self._num_workers,
                prefetch_factor=prefetch,
                pin_memory=pin,
                worker_init_fn=_start_worker,
                generator=torch.Generator(),  # leaves the global one, and so dropout, as it is
            )
        )

    def __next__(self) -> list[Batch]:
        rows, num_missing = [], self._micro_batch
        while num_missing:
            batch = self._rest or self._receive()
            rows.append(batch.rows(0, num_missing))
            self._rest = batch.rows(num_missing, len(batch)) if len(batch) > num_missing else None
            num_missing -= len(rows[-1])
        return rows

    def _receive(self) -> Batch:
        assert self._received is not None
        piece = next(self._received)
        for broken in piece.broken:
            note(f"skipped {broken}")
        self._num_broken += len(piece.broken)
        self._broken += piece.broken[: NUM_EXAMPLES - len(self._broken)]
        if piece.batch is None:
            self.close()
            raise ValueError(piece.failure)
        return piece.batch

    def statistics(self) -> dict[str, Any]:
        """Broken items are counted once each, however often they are met; a damaged tar counts as one."""
        return {
            "source": "shards",
            "num_shards": self._num_shards,
            "num_workers": self._num_workers,
            "num_broken_items": self._num_broken,
            "broken_items": [{"name": broken.name, "reason": broken.reason} for broken in self._broken],
        }

    def close(self) -> None:
        self._received = None  # the iterator's finaliser stops its workers and waits for them
        self._rest = None
