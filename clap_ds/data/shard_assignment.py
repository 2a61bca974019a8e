"""Which tars a run reads, and which of their items belong to each worker of each rank."""

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

_FEWEST_IN_A_PASS = 8  # shards drawn with replacement before the shuffle buffer is emptied

Part = tuple[str, int, int | None]
"""A tar, the number of the first of its samples that is read, and of the first that isn't: None where that is to its end."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Which samples of each epoch a worker gives.

    An epoch is the N samples of all tars, laid end to end. Ranks give equally many, a rank's workers one piece each in turn:
    that says how many of a run's first E·N samples each worker gives. So after E·N samples each has come E times.
    """

    samples: tuple[int, ...]  # of each tar
    epoch_samples: int  # of all of them
    world_size: int
    num_workers: int  # of a rank
    piece_size: int
    own: int  # this worker's number among those of all ranks

    def given(self, epochs: int, number: int | None = None) -> int:
        """Count the samples of the first epochs that this worker gives, or another one."""
        rank, worker = divmod(self.own if number is None else number, self.num_workers)
        of_rank = (epochs * self.epoch_samples + rank) // self.world_size  # which adds up to all of them over the ranks
        rounds, rest = divmod(of_rank, self.num_workers * self.piece_size)
        return rounds * self.piece_size + min(max(rest - worker * self.piece_size, 0), self.piece_size)

    def parts(self, shards: list[str], epoch: int) -> tuple[list[Part], list[Part]]:
        """Give this worker's parts of an epoch; and all others, beginning with what follows its own."""
        start = sum(self.given(epoch + 1, number) - self.given(epoch, number) for number in range(self.own))
        end = start + self.given(epoch + 1) - self.given(epoch)
        return self._between(shards, start, end), self._between(shards, end) + self._between(shards, 0, start)

    def _between(self, shards: list[str], start: int, end: float = math.inf) -> list[Part]:
        """Find what holds these samples of an epoch. A tar without any is opened by whoever has its place."""
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
    """Tars that are mixed with others by weight; weights of all sources add up to 1."""

    shards: list[str]
    weight: float
    shards_per_pass: int = 0  # drawn by a worker with replacement; 0: each of `shards` once
    deal: Deal | None = None  # the part of each pass over `shards` that is read; None: all of it


def expand_sources(shards: str | list[str] | Mapping[str, float]) -> list[Source]:
    """Find the tars that `clap.data.shards` names, with their weights. Errors: see `expand_shards`."""
    if not isinstance(shards, Mapping):
        return [Source(expand_shards(shards), 1.0)]
    total = sum(shards.values())
    return [Source(expand_shards(name), weight / total) for name, weight in shards.items()] or expand_sources([])


def expand_shards(shards: str | list[str]) -> list[str]:
    """Find the tar files a setting names, in order: paths or URLs, with braces and wildcards. ValueError for none."""
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
            what = "a folder; expected its tars, as in 'folder/*.tar'" if Path(name).is_dir() else "not there"
            raise ValueError(f"{FIELD}: {name} is {what} (working folder: {Path.cwd()})")
    return names


def _matches(name: str) -> list[str]:
    """Find what a name with wildcards stands for, in order; ValueError for nothing."""
    found = [name]
    if shard_io.is_remote(name):
        shard_io.check_url(name)
        if "*" in name or "[" in name:  # a ? in a web address begins its query
            fs, path = fsspec.url_to_fs(name)
            try:
                found = sorted(str(fs.unstrip_protocol(each)) for each in fs.glob(path))
            except Exception as error:  # whatever the file system's package raises
                raise ValueError(f"{name!r} can't be looked up: {type(error).__name__}: {error}") from None
    elif glob.has_magic(name) and not Path(name).exists():
        found = sorted(glob.glob(name))
    if not found:
        raise ValueError(f"no file matches {name!r} (working folder: {Path.cwd()})")
    return found


def share_out(
    sources: list[Source], resampled: bool, rank: int, world_size: int, num_workers: int
) -> list[list[Source]]:
    """Share out which whole tars each worker of a rank reads of every source; if `resampled` it draws from all of them."""
    readers = world_size * max(num_workers, 1)
    if resampled:
        numbers = [max(_FEWEST_IN_A_PASS, math.ceil(len(source.shards) / readers)) for source in sources]
        drawn = [replace(source, shards_per_pass=number) for source, number in zip(sources, numbers, strict=True)]
        return [drawn] * max(num_workers, 1)
    own = range(rank, readers, world_size)
    return [[replace(s, shards=s.shards[reader % len(s.shards) :: readers]) for s in sources] for reader in own]


def deal_out(
    source: Source, samples: list[int], spec: BatchSpec, num_workers: int, piece_size: int, *, shuffled: bool
) -> list[list[Source]]:
    """Deal out what each worker of a rank reads of a source whose tars have so many samples each, in an order drawn once."""
    tars = list(zip(source.shards, samples, strict=True))
    if shuffled:
        random.Random(f"seed {spec.seed}, tars").shuffle(tars)
    shards, counts = [shard for shard, _ in tars], tuple(count for _, count in tars)
    of_rank = range(spec.rank * num_workers, (spec.rank + 1) * num_workers)
    deals = [Deal(counts, sum(counts), spec.world_size, num_workers, piece_size, own) for own in of_rank]
    return [[replace(source, shards=shards, deal=deal)] for deal in deals]


def tokenizer_beside(shard: str) -> str:
    """Find what to read a tar's captions with: the folder `tokenizer` beside it, or RoBERTa's own."""
    beside = Path(shard).parent / "tokenizer"
    return str(beside) if beside.is_dir() else HUB_TOKENIZER


def note(text: str) -> None:
    print(f"{FIELD}: {printable(text)}", file=sys.stderr, flush=True)
