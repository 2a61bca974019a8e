"""Assign the items of tars to the workers of each rank."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_manifest import expand_shards

# Fewest shards drawn with replacement per pass. After a pass, the shuffle buffer is emptied.
_MIN_SHARDS_PER_PASS = 8


class TarPart(NamedTuple):
    """A tar's samples from `start` to before `stop` (None: its end)."""

    tar: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class EpochPartition:
    """The part of each epoch that one worker reads.

    An epoch is the N samples of all tars in sequence. Ranks read equally many; a rank's workers
    take turns, chunk by chunk. This fixes each worker's number of a run's first E·N samples, in
    which each sample occurs E times.
    """

    # per tar
    samples: tuple[int, ...]
    # N, their sum
    epoch_samples: int
    world_size: int
    # per rank
    num_workers: int
    chunk_rows: int
    # this worker's index among all ranks' workers
    reader: int

    def samples_until(self, epoch: int, reader: int | None = None) -> int:
        """Return how many samples a worker (default: this one) reads before `epoch`."""
        rank, worker = divmod(self.reader if reader is None else reader, self.num_workers)
        # Sums over ranks to the total.
        of_rank = (epoch * self.epoch_samples + rank) // self.world_size
        rounds, remainder = divmod(of_rank, self.num_workers * self.chunk_rows)
        # In the last round, workers before this one take whole chunks first.
        in_last_round = min(max(remainder - worker * self.chunk_rows, 0), self.chunk_rows)
        return rounds * self.chunk_rows + in_last_round

    def samples_in(self, epoch: int, reader: int) -> int:
        return self.samples_until(epoch + 1, reader) - self.samples_until(epoch, reader)

    def parts(self, tars: list[str], epoch: int) -> tuple[list[TarPart], list[TarPart]]:
        """Return this worker's parts of an epoch, and all other parts, which follow its end."""
        start = sum(self.samples_in(epoch, reader) for reader in range(self.reader))
        stop = start + self.samples_in(epoch, self.reader)
        behind = self._parts_between(tars, stop, math.inf)
        return self._parts_between(tars, start, stop), behind + self._parts_between(tars, 0, start)

    def _parts_between(self, tars: list[str], start: int, stop: float) -> list[TarPart]:
        """Return the parts with the samples from `start` to before `stop` of an epoch."""
        parts: list[TarPart] = []
        tar_start = 0
        for tar, num_samples in zip(tars, self.samples, strict=True):
            tar_stop = tar_start + num_samples
            overlaps = max(start, tar_start) < min(stop, tar_stop)
            if num_samples == 0:
                # Someone reads an empty tar, too, so that damage is reported.
                overlaps = start <= min(tar_start, self.epoch_samples - 1) < stop
            if overlaps:
                part_stop = int(stop) - tar_start if stop < tar_stop else None
                parts.append(TarPart(tar, max(start - tar_start, 0), part_stop))
            tar_start = tar_stop
        return parts


@dataclass(frozen=True, slots=True)
class Source:
    """Tars and their weight in a mixture, in which the weights of all sources sum to 1."""

    shards: list[str]
    weight: float
    # drawn per worker with replacement; 0: each of `shards` once
    shards_per_pass: int = 0
    # the part of each pass to read; None: all
    partition: EpochPartition | None = None

    def shards_read(self) -> list[str]:
        """Return the tars of a pass. A later pass may begin or end in the tar before or behind."""
        if self.partition is None:
            return self.shards
        own_parts, _ = self.partition.parts(self.shards, 0)
        return [part.tar for part in own_parts]


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """Find the tars of `clap.data.shards` and their weights. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    if not shards:
        return expand_sources([])
    total = sum(shards.values())
    return [Source(expand_shards(name), weight / total) for name, weight in shards.items()]


def assign_shards(
    sources: list[Source],
    data: ShardData,
    spec: BatchSpec,
    samples: list[int] | None = None,
    chunk_rows: int = 1,
) -> list[list[Source]]:
    """Assign to each worker of a rank its part of every source.

    With `samples`, the numbers in each tar of the only source, it is a part of every epoch, in an
    order of tars drawn once. Otherwise it is whole tars; if `data.resampled`, each worker draws
    from all tars.
    """
    num_workers = max(data.num_workers, 1)
    num_readers = spec.world_size * num_workers
    if samples:
        tars = list(zip(sources[0].shards, samples, strict=True))
        if data.shuffle_buffer:
            random.Random(f"seed {spec.seed}, tars").shuffle(tars)
        shards = [tar for tar, _ in tars]
        counts = tuple(count for _, count in tars)
        whole = EpochPartition(counts, sum(counts), spec.world_size, num_workers, chunk_rows, 0)
        source = replace(sources[0], shards=shards)
        first_reader = spec.rank * num_workers
        partitions = [replace(whole, reader=first_reader + i) for i in range(num_workers)]
        return [[replace(source, partition=partition)] for partition in partitions]
    if data.resampled:
        drawn_sources = []
        for source in sources:
            per_reader = math.ceil(len(source.shards) / num_readers)
            shards_per_pass = max(_MIN_SHARDS_PER_PASS, per_reader)
            drawn_sources.append(replace(source, shards_per_pass=shards_per_pass))
        return [drawn_sources] * num_workers
    # Readers of different ranks alternate, so that ranks have equally many tars.
    sources_by_worker = []
    for reader in range(spec.rank, num_readers, spec.world_size):
        of_worker = []
        for source in sources:
            # If there are fewer tars than readers, several readers share one.
            shards = source.shards[reader % len(source.shards) :: num_readers]
            of_worker.append(replace(source, shards=shards))
        sources_by_worker.append(of_worker)
    return sources_by_worker
