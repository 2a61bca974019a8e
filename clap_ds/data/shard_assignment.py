"""Assign the items of tars to the workers of each rank."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_manifest import expand_shards

_FEWEST_IN_A_PASS = (
    8  # fewest shards drawn with replacement per pass, after which the shuffle buffer is emptied
)

Part = tuple[str, int, int | None]
"""A tar, and the range of its samples to read: first, and end (exclusive; None: all)."""


@dataclass(frozen=True, slots=True)
class EpochPartition:
    """Assign each epoch's samples to workers.

    An epoch is the N samples of all tars in sequence. Ranks read equally many; a rank's workers
    take turns, piece by piece. This fixes each worker's number of a run's first E·N samples, in
    which each sample occurs E times.
    """

    samples: tuple[int, ...]  # per tar
    epoch_samples: int  # total
    world_size: int
    num_workers: int  # per rank
    piece_size: int
    own: int  # this worker's index among all ranks' workers

    def given(self, epochs: int, number: int | None = None) -> int:
        """Return how many samples of the first `epochs` epochs worker `number` (default: this one)
        reads."""
        rank, worker = divmod(self.own if number is None else number, self.num_workers)
        of_rank = (
            epochs * self.epoch_samples + rank
        ) // self.world_size  # sums over ranks to the total
        rounds, rest = divmod(of_rank, self.num_workers * self.piece_size)
        return rounds * self.piece_size + min(
            max(rest - worker * self.piece_size, 0), self.piece_size
        )

    def parts(self, shards: list[str], epoch: int) -> tuple[list[Part], list[Part]]:
        """Return this worker's parts of an epoch, and all others, starting after its own."""
        start = sum(
            self.given(epoch + 1, number) - self.given(epoch, number) for number in range(self.own)
        )
        end = start + self.given(epoch + 1) - self.given(epoch)
        return self._between(shards, start, end), self._between(shards, end) + self._between(
            shards, 0, start
        )

    def _between(self, shards: list[str], start: int, end: float = math.inf) -> list[Part]:
        """Return the parts with these samples of an epoch. Empty tars are assigned by their
        position."""
        parts: list[Part] = []
        before = 0
        last = self.epoch_samples - 1
        for shard, number in zip(shards, self.samples, strict=True):
            after = before + number
            if max(start, before) < min(end, after) or (
                number == 0 and start <= min(before, last) < end
            ):
                parts.append(
                    (shard, max(start - before, 0), int(end) - before if end < after else None)
                )
            before = after
        return parts


@dataclass(frozen=True, slots=True)
class Source:
    """Hold tars and their weight in a mixture; the weights of all sources sum to 1."""

    shards: list[str]
    weight: float
    shards_per_pass: int = 0  # drawn per worker with replacement; 0: each of `shards` once
    deal: EpochPartition | None = None  # the part of each pass to read; None: all

    def shards_read(self) -> list[str]:
        """Return the tars of a pass: a later pass may begin or end in the next one."""
        return (
            [shard for shard, _, _ in self.deal.parts(self.shards, 0)[0]]
            if self.deal
            else self.shards
        )


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """Find the tars of `clap.data.shards` and their weights. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    total = sum(shards.values())
    return [
        Source(expand_shards(name), weight / total) for name, weight in shards.items()
    ] or expand_sources([])


def assign_shards(
    sources: list[Source],
    data: ShardData,
    spec: BatchSpec,
    samples: list[int] | None = None,
    piece_size: int = 1,
) -> list[list[Source]]:
    """Assign to each worker of a rank its part of every source.

    With `samples`, the numbers in each tar of the only source, it is a part of every epoch, in an
    order of tars drawn once. Otherwise it is whole tars; if `data.resampled`, each worker draws
    from all tars.
    """
    workers = max(data.num_workers, 1)
    readers = spec.world_size * workers
    if samples:
        tars = list(zip(sources[0].shards, samples, strict=True))
        if data.shuffle_buffer:
            random.Random(f"seed {spec.seed}, tars").shuffle(tars)
        shards = [shard for shard, _ in tars]
        counts = tuple(count for _, count in tars)
        of_rank = range(spec.rank * workers, (spec.rank + 1) * workers)
        deals = [
            EpochPartition(counts, sum(counts), spec.world_size, workers, piece_size, own)
            for own in of_rank
        ]
        return [[replace(sources[0], shards=shards, deal=deal)] for deal in deals]
    if data.resampled:
        numbers = [
            max(_FEWEST_IN_A_PASS, math.ceil(len(source.shards) / readers)) for source in sources
        ]
        return [
            [replace(s, shards_per_pass=k) for s, k in zip(sources, numbers, strict=True)]
        ] * workers
    own = range(spec.rank, readers, spec.world_size)
    return [
        [replace(s, shards=s.shards[reader % len(s.shards) :: readers]) for s in sources]
        for reader in own
    ]
