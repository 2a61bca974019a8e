"""Load audio and captions from WebDataset tars in worker processes.

Workers send small pieces of a micro-batch in reused shared memory, because 616 ten-second clips take 1.2 GB.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import Batch, BatchSpec
from clap_ds.data.broken import Broken
from clap_ds.data.captions import monotony
from clap_ds.data.front_end import Kind
from clap_ds.data.loader_throughput import LoaderThroughput
from clap_ds.data.shard_assignment import FIELD, Source, assign_shards, expand_sources, note, split_by_worker
from clap_ds.data.shard_manifest import kind_of, samples_of
from clap_ds.data.shard_reader import START, Chunk, ShardReader
from clap_ds.data.workers import Loader, lock_pages, shared_empty, unlock_pages
from clap_ds.weights.tokenizer import load_tokenizer

COUNTED_BYTES = 1e10  # of local tars without a manifest; counting their items takes a second
NUM_EXAMPLES = 5  # broken items quoted in errors
PIECE_SIZE = 32  # rows


class _Readers(IterableDataset[Chunk]):
    def __init__(self, readers: list[ShardReader]) -> None:
        self._readers = readers

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        return self._readers[worker.id if worker else 0].pieces()


class WebDatasetStream:
    """Iterate endlessly over one rank's micro-batches. Arguments and errors: see `clap_ds.data.dataloader.build_batches`."""

    def __init__(
        self, data: ShardData, spec: BatchSpec, state: dict[str, Any] | None = None, *, needs_epochs: bool = False
    ) -> None:
        sources = expand_sources(data.shards)
        self.kind = kind_of(sources, spec.model)
        self.prepared: Kind = "waveform" if spec.model.audio.fusion else "mel"
        self._micro_batch, self.num_workers = spec.micro_batch, data.num_workers
        shares, order = self._share(sources, data, spec, needs_epochs=needs_epochs)
        # origin: all ranks' samples before this order; samples: this rank's since; rows_taken: of the current piece.
        self._state: dict[str, Any] = {"source": "webdataset", "order": order, "origin": 0, "samples": 0}
        self._state |= {"positions": [START] * len(shares), "next_worker": 0, "rows_taken": 0}
        if state is not None:
            self._restore(state, spec)
        piece_size = order["rows in a piece"]
        # Two micro-batches wait ahead of the one in use. Each worker also keeps its part of that, and fills another.
        ahead = max(2, math.ceil(2 * spec.micro_batch / (piece_size * len(shares)))) if self.num_workers else 0
        in_use = math.ceil((math.ceil((spec.micro_batch - 1) / piece_size) + 1) / len(shares))
        audio, is_mel = spec.model.audio, self.kind == "mel"
        row = audio.feature_shape if is_mel else audio.clip_shape
        in_16_bits = is_mel or (audio.fusion and data.audio_dtype == "int16")
        dtype = torch.float16 if in_16_bits else getattr(torch, data.audio_dtype)
        self._memory = shared_empty((len(shares), ahead + in_use, piece_size, *row), dtype)
        text = spec.model.text
        tokenizer = load_tokenizer(data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
        seed = f"seed {spec.seed}, after {self._state['origin']}, rank {spec.rank}, worker "
        readers = [
            ShardReader(worker, own, data, spec, tokenizer, self._memory[worker], f"{seed}{worker}", start)
            for worker, (own, start) in enumerate(zip(shares, self._state["positions"], strict=True))
        ]
        most = min(1000, self._num_samples // spec.world_size) if self._num_samples else 100
        self._looks = (
            sorted({min(100, most), most}) if spec.rank == 0 else []
        )  # numbers of captions after which to check that they differ
        self._captions: list[bytes] = []  # the first
        self._made, self._made_in_s = 0, 0.0  # rows, and worker seconds for them
        self._broken: dict[str, Broken] = {}  # by name
        self._piece: tuple[Chunk, Batch] | None = None
        # The loader polls workers in turn, so the next one comes first.
        next_worker = self._state["next_worker"]
        self._received: Loader[Chunk] = Loader(
            _Readers(readers[next_worker:] + readers[:next_worker]),
            num_workers=self.num_workers, section="clap.data", batch_size=None,
            **({"prefetch_factor": ahead, "multiprocessing_context": "fork"} if self.num_workers else {}),
        )  # fmt: skip
        if spec.device.type == "cuda":
            if lock_pages(self._memory):
                # Not in `close`, which also runs after errors: CUDA could wait for unfinished work of other ranks.
                weakref.finalize(self, unlock_pages, self._memory).atexit = False
            else:
                note("clap.data: CUDA can't lock the memory of the workers' audio; copies to the GPU block the host")

    def _share(
        self, sources: list[Source], data: ShardData, spec: BatchSpec, *, needs_epochs: bool
    ) -> tuple[list[list[Source]], dict[str, Any]]:
        """Return each worker's share, and everything that determines the order of samples."""
        all_shards = [shard for source in sources for shard in source.shards]
        samples = samples_of(all_shards, math.inf if needs_epochs else COUNTED_BYTES)
        self._num_shards, self._num_samples = len(all_shards), sum(samples) if samples else None
        self._has_epochs = data.has_epochs and bool(self._num_samples)
        piece_size = min(spec.micro_batch, PIECE_SIZE)
        contents: Any = [[source.shards, source.weight] for source in sources]
        if self._has_epochs and samples:
            shuffled = data.shuffle_buffer > 0
            shares = split_by_worker(sources[0], samples, spec, max(data.num_workers, 1), piece_size, shuffled=shuffled)
            contents = [contents, samples]
        else:
            shares = assign_shards(sources, data.resampled, spec.rank, spec.world_size, data.num_workers)
        return shares, {
            "ranks": spec.world_size,
            "workers per rank": len(shares),
            "rows in a piece": piece_size,
            "seed": spec.seed,
            "clap.data.shuffle_buffer": data.shuffle_buffer,
            "clap.data.resampled": data.resampled,
            "shards": hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16],
        }

    def _restore(self, state: dict[str, Any], spec: BatchSpec) -> None:
        """Resume from `state`, in a new order if it can't be exact."""
        order, before = self._state["order"], state.get("order", {})
        changed = [name for name, value in order.items() if before.get(name) != value]
        if not changed:
            self._state |= state
            return
        origin = state.get("origin", 0) + state.get("samples", 0) * before.get("ranks", spec.world_size)
        self._state["origin"] = origin
        if spec.rank == 0:
            values = {name: f" (then {before.get(name)}, now {order[name]})" for name in changed if name != "shards"}
            other = ", ".join(name + values.get(name, "") for name in changed)
            note(f"resuming after {origin:,} samples in a new order, because these changed: {other}")

    def __next__(self) -> list[Batch]:
        """Return rows that are valid until the next call."""
        rows, num_missing, state = [], self._micro_batch, self._state
        while num_missing:
            piece, batch = self._piece = self._piece or self._receive()
            taken = state["rows_taken"]
            rows.append(batch.rows(taken, min(taken + num_missing, len(batch))))
            state["rows_taken"] += len(rows[-1])
            num_missing -= len(rows[-1])
            if state["rows_taken"] == len(batch):
                places = state["positions"]
                places = [*places[: piece.worker], piece.after, *places[piece.worker + 1 :]]
                state |= {"positions": places, "next_worker": (piece.worker + 1) % len(places), "rows_taken": 0}
                self._piece = None
        state["samples"] += self._micro_batch
        return rows

    def _receive(self) -> tuple[Chunk, Batch]:
        piece = next(self._received)
        for broken in piece.broken:
            if broken.name not in self._broken:  # several workers may report the same one
                note(f"skipped {broken}")
                self._broken[broken.name] = broken
        if piece.captions is None:
            self.close()
            examples = "; ".join(map(str, islice(self._broken.values(), NUM_EXAMPLES)))
            found = f"{len(self._broken)} broken, the first: {examples}" if examples else "they contain no items"
            raise ValueError(f"{FIELD}: {piece.failure}; {found}")
        self._captions += map(bytes, piece.captions[0]) if self._looks else []
        while self._looks and len(self._captions) >= self._looks[0]:
            if few := monotony(self._captions[: self._looks.pop(0)]):
                note(few)
                self._looks.clear()
        ids, mask = map(torch.from_numpy, piece.captions)
        batch = Batch(self._memory[piece.worker, piece.place], ids, mask)
        self._made += len(batch) if piece.made_in_s else 0
        self._made_in_s += piece.made_in_s
        return piece, batch

    def throughput(self) -> LoaderThroughput | None:
        if not self._made_in_s:
            return None
        rate = max(self.num_workers, 1) * self._made / self._made_in_s
        return LoaderThroughput(rate, self.num_workers, self.kind, self.prepared)

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def statistics(self) -> dict[str, Any]:
        """Return statistics that count broken items and damaged tars once each; unknown numbers of samples are None."""
        return {
            "source": "webdataset",
            "kind": self.kind,
            "num_shards": self._num_shards,
            "num_samples": self._num_samples,
            "epoch_samples": self._num_samples if self._has_epochs else None,
            "num_workers": self.num_workers,
            "num_broken_items": len(self._broken),
            "broken_items": [asdict(broken) for broken in self._broken.values()],
        }

    def close(self) -> None:
        self._received.close()
