"""Real audio and captions from WebDataset tars, decoded in worker processes.

Each worker goes through its shards again and again, in a new order each time, and sends small pieces of a micro-batch with news
of the items it had to skip and of where it stands. A worker that finds nothing usable in a whole pass says so in its last
piece, for an exception would reach the main process as a traceback in a string. Which shards a worker has is left to
`shard_list`, what it does with them to `shard_reader`, putting pieces together on the device to `batch`.

Pieces rather than whole micro-batches: 616 ten-second clips are 1.2 GB, and each worker would hold several in shared memory.

`python -m benchmarks.loader_speed` is `benchmarks.loader_speed`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import Batch
from clap_ds.data.shard_list import expand_sources, note, share_out
from clap_ds.data.shard_manifest import epoch_samples
from clap_ds.data.shard_reader import NUM_EXAMPLES, START, Broken, Piece, Position, ShardReader
from clap_ds.data.workers import Loader
from clap_ds.model.tokenizer import load_tokenizer

__all__ = ["ShardPieces", "epoch_samples"]

PIECE_SIZE = 16


class ShardDataset(IterableDataset[Piece]):
    """Gives each DataLoader worker its own `ShardReader`; without workers, the first."""

    def __init__(self, readers: list[ShardReader]) -> None:
        self._readers = readers

    def __iter__(self) -> Iterator[Piece]:
        worker = get_worker_info()
        return self._readers[worker.id if worker else 0].pieces()


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
        state: dict[str, Any] | None = None,
    ) -> None:
        sources = expand_sources(data.shards)
        shares = share_out(
            sources, sampling=data.sampling, rank=rank, world_size=world_size, num_workers=data.num_workers
        )
        piece_size = min(micro_batch, PIECE_SIZE)
        self._micro_batch = micro_batch
        self._world_size = world_size
        self._num_shards = sum(len(source.shards) for source in sources)
        self._order = {
            "ranks": world_size,
            "workers per rank": len(shares),
            "rows in a piece": piece_size,
            "seed": seed,
            "clap.data.shuffle_buffer": data.shuffle_buffer,
            "clap.data.sampling": data.sampling,
            "shards": _fingerprint([[source.shards, source.weight] for source in sources]),
        }
        self._restore(state, len(shares), is_first=rank == 0)
        tokenizer = load_tokenizer(data.tokenizer, vocab_size=model.text.vocab_size)
        self._readers = [
            ShardReader(
                worker=worker,
                shares=own,
                tokenizer=tokenizer,
                text_tokens=text_tokens,
                sample_rate=model.audio.sample_rate,
                num_samples=model.audio.num_samples,
                piece_size=piece_size,
                shuffle_buffer=data.shuffle_buffer,
                as_int16=data.waveforms == "int16",
                seed=f"seed {seed}, after {self._origin}, rank {rank}, worker {worker}",
                start=self._positions[worker],
            )
            for worker, own in enumerate(shares)
        ]
        self._num_workers = len(shares) if data.num_workers else 0
        self._broken: list[Broken] = []
        self._num_broken = 0
        self.encoded_bytes = 0
        self._piece: Piece | None = None
        self._received = self._load(piece_size, pin)

    def _restore(self, state: dict[str, Any] | None, num_workers: int, *, is_first: bool) -> None:
        """Take up where `state` stood; where it can't be continued exactly, in a new order."""
        self._origin = 0  # samples of all ranks before this order began
        self._num_given = 0  # samples of this rank since
        self._positions: list[Position] = [START] * num_workers
        self._next_worker = 0
        self._num_taken = 0  # rows of the next piece that were given before
        if state is None:
            return
        before = state.get("order", {})
        changed = [name for name, value in self._order.items() if before.get(name) != value]
        if not changed:
            self._origin, self._num_given = state["origin"], state["samples"]
            self._positions = list(state["positions"])
            self._next_worker, self._num_taken = state["next_worker"], state["rows_taken"]
            return
        self._origin = state.get("origin", 0) + state.get("samples", 0) * before.get("ranks", self._world_size)
        if is_first:
            differences = ", ".join(
                name if name == "shards" else f"{name} (then {before.get(name)}, now {self._order[name]})"
                for name in changed
            )
            note(f"going on after {self._origin:,} samples in a new order, because of other {differences}")

    def _load(self, piece_size: int, pin: bool) -> Loader[Piece]:
        # Workers are asked in turn, so the one whose turn it is comes first.
        turn = self._readers[self._next_worker :] + self._readers[: self._next_worker]
        # Two micro-batches in all wait ahead of the one in use.
        prefetch = max(2, math.ceil(2 * self._micro_batch / (piece_size * len(turn)))) if self._num_workers else None
        return Loader(
            ShardDataset(turn),
            num_workers=self._num_workers,
            section="clap.data",
            batch_size=None,
            prefetch_factor=prefetch,
            pin_memory=pin,
        )

    def __next__(self) -> list[Batch]:
        rows, num_missing = [], self._micro_batch
        while num_missing:
            if self._piece is None:
                self._piece = self._receive()
            batch = self._piece.batch
            assert batch is not None
            rows.append(batch.rows(self._num_taken, min(self._num_taken + num_missing, len(batch))))
            self._num_taken += len(rows[-1])
            num_missing -= len(rows[-1])
            if self._num_taken == len(batch):
                self._positions[self._piece.worker] = self._piece.after
                self._next_worker = (self._piece.worker + 1) % len(self._positions)
                self._piece, self._num_taken = None, 0
        self._num_given += self._micro_batch
        return rows

    def _receive(self) -> Piece:
        piece = next(self._received)
        for broken in piece.broken:
            note(f"skipped {broken}")
        self._num_broken += len(piece.broken)
        self._broken += piece.broken[: NUM_EXAMPLES - len(self._broken)]
        self.encoded_bytes += piece.encoded_bytes
        if piece.batch is None:
            self.close()
            raise ValueError(piece.failure)
        return piece

    def state(self) -> dict[str, Any]:
        """Where this rank stands after the last micro-batch."""
        return {
            "source": "shards",
            "order": self._order,
            "origin": self._origin,
            "samples": self._num_given,
            "positions": list(self._positions),
            "next_worker": self._next_worker,
            "rows_taken": self._num_taken,
        }

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
        self._piece = None
        self._received.close()


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
