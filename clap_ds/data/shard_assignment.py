"""Assign the items of tars to the workers of each rank."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_manifest import Item, expand_shards, samples_between

# Fewest shards drawn with replacement per pass. After a pass, the shuffle buffer is emptied.
_MIN_SHARDS_PER_PASS = 8
# The place of items that aren't in their reader's share of a pass: those that aren't samples, and
# samples that replace unusable ones.
OUTSIDE = -1
REPLACEMENT = -2


class TarPart(NamedTuple):
    """A tar's samples from `start` to before `stop` (None: its end), or only those in `left`."""

    tar: str
    start: int = 0
    stop: int | None = None
    # sorted numbers of samples in the tar
    left: NDArray[np.int64] | None = None
    # samples, by the manifest; an outdated one may tell fewer
    num_samples: int = 0
    # place of the first one in its reader's share; None: the part replaces unusable samples
    first_place: int | None = None

    def select(self, items: Iterator[Item]) -> Iterator[tuple[int, Item]]:
        """Yield the part's items with their places."""
        for sample, item in samples_between(items, self.start, self.stop):
            index = self._index_of(sample)
            if index is None:
                continue
            place = OUTSIDE
            if self.first_place is None:
                place = REPLACEMENT
            elif sample is not None and index < self.num_samples:
                place = self.first_place + index
            yield place, item

    def _index_of(self, sample: int | None) -> int | None:
        """Return which of the part's samples it is. It is None for those that aren't left."""
        if self.left is None:
            return 0 if sample is None else sample - self.start
        if sample is None:
            return None
        index = int(np.searchsorted(self.left, sample))
        is_left = index < len(self.left) and self.left[index] == sample
        return index if is_left else None


class UnfinishedPass(NamedTuple):
    """What is left of a source's pass that other readers began."""

    # per tar, sorted numbers of samples
    left: list[NDArray[np.int64]]
    # samples until the pass ends, counting those that replace unusable ones
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class EpochPartition:
    """The part of each epoch that one worker reads: its share.

    An epoch is the N samples of all tars in sequence. Ranks read equally many; a rank's workers
    take turns, chunk by chunk. This fixes each worker's number of a run's first E·N samples, in
    which each sample occurs E times. In a resumed run, the first epochs may be what is left of
    unfinished ones.

    A source of a mixture is divided in the same way, with each worker as a rank of its own. How
    many samples have been read then depends on the draws, so that workers finish an epoch at
    different times.
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
    unfinished: tuple[UnfinishedPass, ...] = ()
    # whether a worker's share ends after a number of samples, or with its last sample
    is_counted: bool = True

    def is_partial(self, epoch: int) -> bool:
        return epoch < len(self.unfinished)

    def epoch_at(self, num_samples: int) -> tuple[int, int]:
        """Return which epoch follows after some samples of all workers, and how many are left of
        it."""
        for epoch, unfinished in enumerate(self.unfinished):
            if num_samples < unfinished.num_samples:
                return epoch, unfinished.num_samples - num_samples
            num_samples -= unfinished.num_samples
        num_full, num_used = divmod(num_samples, self.epoch_samples)
        return len(self.unfinished) + num_full, self.epoch_samples - num_used

    def bounds(self, epoch: int) -> NDArray[np.int64]:
        """Return where every worker's share of an epoch begins, and the end of the last one."""
        sizes = self._samples_until(epoch + 1) - self._samples_until(epoch)
        return np.concatenate(([0], np.cumsum(sizes)))

    def _samples_until(self, epoch: int) -> NDArray[np.int64]:
        """Return how many samples each worker reads before `epoch`."""
        num_full = max(epoch - len(self.unfinished), 0)
        total = num_full * self.epoch_samples
        total += sum(unfinished.num_samples for unfinished in self.unfinished[:epoch])
        # Sums over ranks to the total.
        of_ranks = (total + np.arange(self.world_size)) // self.world_size
        rounds, remainders = np.divmod(of_ranks, self.num_workers * self.chunk_rows)
        # In the last round, workers before this one take whole chunks first.
        rows_before = np.arange(self.num_workers) * self.chunk_rows
        in_last_round = np.clip(remainders[:, None] - rows_before, 0, self.chunk_rows)
        return (rounds[:, None] * self.chunk_rows + in_last_round).ravel()

    def samples_until(self, epoch: int) -> float:
        """Return how many samples this worker reads before `epoch`; infinity if it isn't known."""
        if not self.is_counted:
            return math.inf
        return int(self._samples_until(epoch)[self.reader])

    def share_size(self, epoch: int) -> int:
        bounds = self.bounds(epoch)
        return int(bounds[self.reader + 1] - bounds[self.reader])

    def sample_ids(self, epoch: int) -> NDArray[np.int64]:
        """Return an epoch's samples in sequence, numbered through all tars."""
        if not self.is_partial(epoch):
            return np.arange(self.epoch_samples)
        firsts = np.cumsum([0, *self.samples[:-1]])
        left = self.unfinished[epoch].left
        return np.concatenate(
            [first + numbers for first, numbers in zip(firsts, left, strict=True)]
        )

    def parts(self, tars: list[str], epoch: int) -> tuple[list[TarPart], list[TarPart]]:
        """Return this worker's parts of an epoch, and those that replace its unusable samples: all
        others, which follow its end. In a mixture, the latter only replace a share without usable
        samples."""
        bounds = self.bounds(epoch)
        start = int(bounds[self.reader])
        stop = int(bounds[self.reader + 1])
        own_parts = self._parts_between(tars, epoch, start, stop)
        replacements = self._parts_between(tars, epoch, stop, math.inf)
        replacements += self._parts_between(tars, epoch, 0, start)
        return own_parts, [part._replace(first_place=None) for part in replacements]

    def _parts_between(self, tars: list[str], epoch: int, start: int, stop: float) -> list[TarPart]:
        """Return the parts with the samples from `start` to before `stop` of an epoch."""
        parts: list[TarPart] = []
        tar_start = 0
        for number, tar in enumerate(tars):
            left = self.unfinished[epoch].left[number] if self.is_partial(epoch) else None
            num_samples = self.samples[number] if left is None else len(left)
            tar_stop = tar_start + num_samples
            overlaps = max(start, tar_start) < min(stop, tar_stop)
            if self.samples[number] == 0 and left is None:
                # Someone reads an empty tar, too, so that damage is reported.
                overlaps = start <= min(tar_start, self.epoch_samples - 1) < stop
            if overlaps:
                first = max(start - tar_start, 0)
                last = int(min(stop, tar_stop)) - tar_start
                size = last - first
                first_place = max(tar_start - start, 0)
                # To the tar's end, as an outdated manifest may tell fewer samples.
                end_in_tar = last if stop < tar_stop else None
                part = TarPart(tar, first, end_in_tar, None, size, first_place)
                if left is not None:
                    numbers = left[first:last]
                    first_sample = int(numbers[0])
                    end = int(numbers[-1]) + 1
                    part = TarPart(tar, first_sample, end, numbers, size, first_place)
                parts.append(part)
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
        """Return the tars of a whole pass. A later pass may begin or end in the tar before or
        behind."""
        if self.partition is None:
            return self.shards
        own_parts, _ = self.partition.parts(self.shards, len(self.partition.unfinished))
        return [part.tar for part in own_parts]


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """Find the tars of `clap.data.shards` and their weights. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    if not shards:
        return expand_sources([])
    total = sum(shards.values())
    return [Source(expand_shards(name), weight / total) for name, weight in shards.items()]


class ReaderLayout(NamedTuple):
    """What determines every reader's share, beside the sizes of tars."""

    world_size: int
    # per rank
    num_workers: int
    chunk_rows: int
    seed: int
    shuffles_tars: bool

    @property
    def num_readers(self) -> int:
        return self.world_size * self.num_workers

    def tar_order(self, num_tars: int) -> list[int]:
        """Return the order of a source's tars, which is drawn once per run."""
        order = [*range(num_tars)]
        if self.shuffles_tars:
            random.Random(f"seed {self.seed}, tars").shuffle(order)
        return order

    def divide(
        self, samples: Sequence[int], unfinished: Sequence[UnfinishedPass], *, is_mixed: bool
    ) -> EpochPartition:
        """Divide a source of some `samples` per tar. Return the first reader's partition."""
        order = self.tar_order(len(samples))
        in_order = [
            UnfinishedPass([left[tar] for tar in order], num_samples)
            for left, num_samples in unfinished
        ]
        return EpochPartition(
            samples=tuple(samples[tar] for tar in order),
            epoch_samples=sum(samples),
            world_size=self.num_readers if is_mixed else self.world_size,
            num_workers=1 if is_mixed else self.num_workers,
            chunk_rows=self.chunk_rows,
            reader=0,
            unfinished=tuple(in_order),
            is_counted=not is_mixed,
        )


def assign_shares(
    sources: list[Source],
    samples: list[list[int]],
    layout: ReaderLayout,
    rank: int,
    unfinished: list[list[UnfinishedPass]],
) -> list[list[Source]]:
    """Assign to each worker of a rank its share of every pass of every source.

    Args:
        samples: per source, the number in each tar.
        unfinished: per source, passes that other readers began.
    """
    is_mixed = len(sources) > 1
    sources_by_worker: list[list[Source]] = [[] for _ in range(layout.num_workers)]
    for source, tar_samples, passes in zip(sources, samples, unfinished, strict=True):
        shards = [source.shards[tar] for tar in layout.tar_order(len(tar_samples))]
        first_partition = layout.divide(tar_samples, passes, is_mixed=is_mixed)
        for worker, of_worker in enumerate(sources_by_worker):
            reader = rank * layout.num_workers + worker
            partition = replace(first_partition, reader=reader)
            of_worker.append(replace(source, shards=shards, partition=partition))
    return sources_by_worker


def assign_shards(sources: list[Source], data: ShardData, spec: BatchSpec) -> list[list[Source]]:
    """Assign whole tars of every source to each worker of a rank. If `data.resampled`, each worker
    draws from all tars."""
    num_workers = max(data.num_workers, 1)
    num_readers = spec.world_size * num_workers
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
