"""Load audio and captions from WebDataset tars in worker processes.

Workers send small pieces of a micro-batch in reused shared memory, because 616 ten-second clips
take 1.2 GB.
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
from clap_ds.data.batch import Batch, BatchSpec, LoaderThroughput
from clap_ds.data.clip import Broken
from clap_ds.data.shard_assignment import Source, assign_shards, expand_sources
from clap_ds.data.shard_manifest import FIELD, count_bytes, kind_of, samples_of
from clap_ds.data.shard_reader import START, Chunk, ShardReader, note
from clap_ds.data.staging import StagingFolder
from clap_ds.data.workers import Loader, lock_pages, shared_empty, unlock_pages
from clap_ds.weights.hub import load_tokenizer

COUNTED_BYTES = 1e10  # of local tars without a manifest; counting their items takes a second
NUM_EXAMPLES = 5  # broken items quoted in errors
PIECE_SIZE = 32  # rows


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def _prepare_staging(
    stage_to: str, shards: list[str], shares: list[list[Source]], ranks_per_host: int
) -> StagingFolder:
    """Create the folder for copies of shards, and compare its room with what this host's ranks
    need."""
    staging = StagingFolder(stage_to)
    sizes = count_bytes(shards)
    of_rank = {shard for share in shares for source in share for shard in source.shards_read()}
    # Ranks read equally much. Neighbors share a shard on the border.
    needed_bytes = ranks_per_host * sum(sizes[shard] for shard in of_rank)
    staging.check_room(min(needed_bytes, sum(sizes.values())))
    return staging


class _Readers(IterableDataset[Chunk]):
    def __init__(self, readers: list[ShardReader]) -> None:
        self._readers = readers

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        return self._readers[worker.id if worker else 0].pieces()


class WebDatasetStream:
    """Iterate endlessly over one rank's micro-batches. Arguments and errors: see
    `clap_ds.data.dataloader.build_batches`."""

    def __init__(
        self,
        data: ShardData,
        spec: BatchSpec,
        state: dict[str, Any] | None = None,
        *,
        needs_epochs: bool = False,
    ) -> None:
        self._num_workers = data.num_workers
        self._micro_batch = spec.micro_batch
        piece_size = min(spec.micro_batch, PIECE_SIZE)
        shares, order = self._share(
            data, spec, piece_size, math.inf if needs_epochs else COUNTED_BYTES
        )
        # origin: all ranks' samples before this order; samples: this rank's since; rows_taken: of
        # the current piece.
        self._state: dict[str, Any] = {
            "source": "webdataset",
            "order": order,
            "origin": 0,
            "samples": 0,
        }
        self._state |= {"positions": [START] * len(shares), "next_worker": 0, "rows_taken": 0}
        if state is not None:
            self._restore(state, spec)
        # Two micro-batches wait ahead of the one in use. Each worker also keeps its part of that,
        # and fills another.
        ahead = (
            max(2, math.ceil(2 * spec.micro_batch / (piece_size * len(shares))))
            if self._num_workers
            else 0
        )
        in_use = math.ceil((math.ceil((spec.micro_batch - 1) / piece_size) + 1) / len(shares))
        audio = spec.model.audio
        is_mel = self._kind == "mel"
        in_16_bits = is_mel or (audio.fusion and data.audio_dtype == "int16")
        dtype = torch.float16 if in_16_bits else getattr(torch, data.audio_dtype)
        row = audio.feature_shape if is_mel else audio.clip_shape
        self._memory = shared_empty((len(shares), ahead + in_use, piece_size, *row), dtype)
        text = spec.model.text
        tokenizer = load_tokenizer(
            data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
        )
        seed = f"seed {spec.seed}, after {self._state['origin']}, rank {spec.rank}, worker "
        readers = [
            ShardReader(
                worker,
                own,
                data,
                spec,
                tokenizer,
                self._memory[worker],
                f"{seed}{worker}",
                start,
                self._staging,
            )
            for worker, (own, start) in enumerate(
                zip(shares, self._state["positions"], strict=True)
            )
        ]
        # rows, and worker seconds for them
        self._made = 0
        self._made_in_s = 0.0
        self._broken: dict[str, Broken] = {}  # by name
        self._piece: tuple[Chunk, Batch] | None = None
        # The loader polls workers in turn, so the next one comes first.
        next_worker = self._state["next_worker"]
        self._received: Loader[Chunk] = Loader(
            _Readers(readers[next_worker:] + readers[:next_worker]),
            num_workers=self._num_workers, section="clap.data", batch_size=None,
            **({"prefetch_factor": ahead, "multiprocessing_context": "fork"} if self._num_workers else {}),
        )  # fmt: skip
        if spec.device.type == "cuda":
            if lock_pages(self._memory):
                # Not in `close`, which also runs after errors: CUDA could wait for unfinished work
                # of other ranks.
                weakref.finalize(self, unlock_pages, self._memory).atexit = False
            else:
                note(
                    "clap.data: CUDA can't lock the memory of the workers' audio; copies to the GPU block the host"
                )

    def _share(
        self, data: ShardData, spec: BatchSpec, piece_size: int, most_bytes: float
    ) -> tuple[list[list[Source]], dict[str, Any]]:
        """Find the shards. Return each worker's share, and everything that determines the order of
        samples."""
        sources = expand_sources(data.shards)
        shards = [shard for source in sources for shard in source.shards]
        self._kind = kind_of(shards, spec.model, warns=spec.rank == 0)
        samples = samples_of(shards, most_bytes)
        num_samples = sum(samples) if samples else None
        has_epochs = bool(num_samples and data.has_epochs)
        self._described = {
            "source": "webdataset",
            "kind": self._kind,
            "num_shards": len(shards),
            "num_samples": num_samples,
            "epoch_samples": num_samples if has_epochs else None,
            "num_workers": data.num_workers,
        }
        # Names without folders: moved tars are read in the same order.
        contents: Any = [
            [[tar.rpartition("/")[2] for tar in source.shards], source.weight] for source in sources
        ]
        paths: Any = [[source.shards, source.weight] for source in sources]
        shares = assign_shards(sources, data, spec, samples if has_epochs else None, piece_size)
        self._staging = None
        if data.stage_to:
            self._staging = _prepare_staging(data.stage_to, shards, shares, spec.ranks_per_host)
        if has_epochs:
            contents = [contents, samples]
            paths = [paths, samples]
        self._digest_of_paths = _digest(paths)
        return shares, {
            "ranks": spec.world_size,
            "workers per rank": len(shares),
            "rows in a piece": piece_size,
            "seed": spec.seed,
            "clap.data.shuffle_buffer": data.shuffle_buffer,
            "clap.data.resampled": data.resampled,
            "shards": _digest(contents),
        }

    def _restore(self, state: dict[str, Any], spec: BatchSpec) -> None:
        """Resume from `state`, in a new order if it can't be exact."""
        order = self._state["order"]
        before = dict(state.get("order", {}))
        if before.get("shards") == self._digest_of_paths:  # of an earlier version
            before["shards"] = order["shards"]
            state = {**state, "order": order}
        changed = [name for name, value in order.items() if before.get(name) != value]
        if not changed:
            self._state |= state
            return
        origin = state.get("origin", 0) + state.get("samples", 0) * before.get(
            "ranks", spec.world_size
        )
        self._state["origin"] = origin
        if spec.rank == 0:
            other = ", ".join(
                f"{name} (then {before.get(name)}, now {order[name]})" for name in changed
            )
            note(
                f"resuming after {origin:,} samples in a new order, because these changed: {other}"
            )

    def __next__(self) -> list[Batch]:
        """Return rows that are valid until the next call."""
        rows = []
        num_missing = self._micro_batch
        state = self._state
        while num_missing:
            piece, batch = self._piece = self._piece or self._receive()
            taken = state["rows_taken"]
            rows.append(batch.rows(taken, min(taken + num_missing, len(batch))))
            state["rows_taken"] += len(rows[-1])
            num_missing -= len(rows[-1])
            if state["rows_taken"] == len(batch):
                places = state["positions"]
                places = [*places[: piece.worker], piece.after, *places[piece.worker + 1 :]]
                state |= {
                    "positions": places,
                    "next_worker": (piece.worker + 1) % len(places),
                    "rows_taken": 0,
                }
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
            found = (
                f"{len(self._broken)} broken, the first: {examples}"
                if examples
                else "they contain no items"
            )
            raise ValueError(f"{FIELD}: {piece.failure}; {found}")
        ids, mask = map(torch.from_numpy, piece.captions)
        batch = Batch(self._memory[piece.worker, piece.place], ids, mask)
        self._made += len(batch) if piece.made_in_s else 0
        self._made_in_s += piece.made_in_s
        return piece, batch

    def throughput(self) -> LoaderThroughput | None:
        if not self._made_in_s:
            return None
        rate = max(self._num_workers, 1) * self._made / self._made_in_s
        return LoaderThroughput(rate, self._num_workers, self._kind)

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def statistics(self) -> dict[str, Any]:
        """Return statistics that count broken items and damaged tars once each; unknown numbers of
        samples are None."""
        broken = [asdict(broken) for broken in self._broken.values()]
        return {**self._described, "num_broken_items": len(broken), "broken_items": broken}

    def close(self) -> None:
        self._received.close()
