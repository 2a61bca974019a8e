"""Find the tars of a run and assign their items to the workers of each rank."""

from __future__ import annotations

import glob
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
from braceexpand import braceexpand

from clap_ds.config.errors import printable
from clap_ds.data import shard_io

if TYPE_CHECKING:
    from clap_ds.data.batch import BatchSpec

FIELD = "clap.data.shards"
HUB_TOKENIZER = "FacebookAI/roberta-base"

_FEWEST_IN_A_PASS = 8  # fewest shards drawn with replacement per pass, after which the shuffle buffer is emptied

Part = tuple[str, int, int | None]
"""A tar, and the range of its samples to read: first, and end (exclusive; None: all)."""


@dataclass(frozen=True, slots=True)
class EpochPartition:
    """Assign each epoch's samples to workers.

    An epoch is the N samples of all tars in sequence. Ranks read equally many; a rank's workers take turns, piece by
    piece. This fixes each worker's number of a run's first E·N samples, in which each sample occurs E times.
    """

    samples: tuple[int, ...]  # per tar
    epoch_samples: int  # total
    world_size: int
    num_workers: int  # per rank
    piece_size: int
    own: int  # this worker's index among all ranks' workers

    def given(self, epochs: int, number: int | None = None) -> int:
        """Return how many samples of the first `epochs` epochs worker `number` (default: this one) reads."""
        rank, worker = divmod(self.own if number is None else number, self.num_workers)
        of_rank = (epochs * self.epoch_samples + rank) // self.world_size  # sums over ranks to the total
        rounds, rest = divmod(of_rank, self.num_workers * self.piece_size)
        return rounds * self.piece_size + min(max(rest - worker * self.piece_size, 0), self.piece_size)

    def parts(self, shards: list[str], epoch: int) -> tuple[list[Part], list[Part]]:
        """Return this worker's parts of an epoch, and all others, starting after its own."""
        start = sum(self.given(epoch + 1, number) - self.given(epoch, number) for number in range(self.own))
        end = start + self.given(epoch + 1) - self.given(epoch)
        return self._between(shards, start, end), self._between(shards, end) + self._between(shards, 0, start)

    def _between(self, shards: list[str], start: int, end: float = math.inf) -> list[Part]:
        """Return the parts with these samples of an epoch. Empty tars are assigned by their position."""
        parts: list[Part] = []
        before, last = 0, self.epoch_samples - 1
        for shard, number in zip(shards, self.samples, strict=True):
            after = before + number
            if max(start, before) < min(end, after) or (number == 0 and start <= min(before, last) < end):
                parts.append((shard, max(start - before, 0), int(end) - before if end < after else None))
            before = after
        return parts


@dataclass(frozen=True, slots=True)
class Source:
    """Hold tars and their weight in a mixture; the weights of all sources sum to 1."""

    shards: list[str]
    weight: float
    shards_per_pass: int = 0  # drawn per worker with replacement; 0: each of `shards` once
    deal: EpochPartition | None = None  # the part of each pass to read; None: all


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """Find the tars of `clap.data.shards` and their weights. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    total = sum(shards.values())
    return [Source(expand_shards(name), weight / total) for name, weight in shards.items()] or expand_sources([])


def expand_shards(shards: str | list[str]) -> list[str]:
    """Expand paths or URLs with braces and wildcards to tar files, in order. Raises ValueError for none."""
    patterns = [shards] if isinstance(shards, str) else shards
    names: list[str] = []
    for pattern in patterns:
        try:
            for name in braceexpand(pattern.removeprefix("file://")):
                names += _matches(name)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {error}") from None
    if not names:
        raise ValueError(f"{FIELD}: expected at least one tar file, found an empty list")
    for name in names:
        if not (shard_io.is_remote(name) or Path(name).is_file()):
            what = "is a folder; expected its tars, as in 'folder/*.tar'" if Path(name).is_dir() else "does not exist"
            raise ValueError(f"{FIELD}: {name} {what} (working folder: {Path.cwd()})")
    return names


def _matches(name: str) -> list[str]:
    """Expand wildcards, in order. Raises ValueError for no match."""
    found = [name]
    if shard_io.is_remote(name):
        shard_io.check_url(name)
        if "*" in name or "[" in name:  # not ?, which starts a URL's query
            fs, path = fsspec.url_to_fs(name)
            try:
                found = sorted(str(fs.unstrip_protocol(each)) for each in fs.glob(path))
            except Exception as error:  # any error of the file system package
                raise ValueError(f"{name!r} can't be listed: {type(error).__name__}: {error}") from None
    elif glob.has_magic(name) and not Path(name).exists():
        found = sorted(glob.glob(name))
    if not found:
        raise ValueError(f"no file matches {name!r} (working folder: {Path.cwd()})")
    return found


def assign_shards(
    sources: list[Source], resampled: bool, rank: int, world_size: int, num_workers: int
) -> list[list[Source]]:
    """Assign whole tars of every source to each worker of a rank; if `resampled`, each worker draws from all tars."""
    readers = world_size * max(num_workers, 1)
    if resampled:
        numbers = [max(_FEWEST_IN_A_PASS, math.ceil(len(source.shards) / readers)) for source in sources]
        drawn = [replace(source, shards_per_pass=number) for source, number in zip(sources, numbers, strict=True)]
        return [drawn] * max(num_workers, 1)
    own = range(rank, readers, world_size)
    return [[replace(s, shards=s.shards[reader % len(s.shards) :: readers]) for s in sources] for reader in own]


def split_by_worker(
    source: Source, samples: list[int], spec: BatchSpec, num_workers: int, piece_size: int, *, shuffled: bool
) -> list[list[Source]]:
    """Assign to each worker of a rank its samples of a source (`samples` per tar), in an order drawn once."""
    tars = list(zip(source.shards, samples, strict=True))
    if shuffled:
        random.Random(f"seed {spec.seed}, tars").shuffle(tars)
    shards, counts = [shard for shard, _ in tars], tuple(count for _, count in tars)
    of_rank = range(spec.rank * num_workers, (spec.rank + 1) * num_workers)
    deals = [EpochPartition(counts, sum(counts), spec.world_size, num_workers, piece_size, own) for own in of_rank]
    return [[replace(source, shards=shards, deal=deal)] for deal in deals]


def tokenizer_beside(shard: str) -> str:
    """Return the tokenizer for a tar's captions: the folder `tokenizer` next to it, or RoBERTa's."""
    beside = Path(shard).parent / "tokenizer"
    return str(beside) if beside.is_dir() else HUB_TOKENIZER


def note(text: str) -> None:
    print(f"{FIELD}: {printable(text)}", file=sys.stderr, flush=True)
