"""Track which samples of an epoch have been drawn, so that any number of ranks can read the rest.

`DrawnSamples` marks what the workers of one rank have drawn from their shares. A checkpoint stores
it for all ranks. `find_unfinished` returns what is left of every pass that has begun, and
`encode_unfinished` stores that in later checkpoints, until the pass ends.
"""

import base64
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from clap_ds.data.shard_assignment import EpochPartition, UnfinishedPass


class Draw(NamedTuple):
    """A sample that a worker drew, usable or not, for a row of its chunk."""

    row: int
    source: int
    pass_number: int
    # in the worker's share of the pass
    place: int


@dataclass(slots=True)
class ShareProgress:
    """The places of a share that were drawn in a worker's current pass, one bit each."""

    pass_number: int = 0
    drawn: bytearray = field(default_factory=bytearray)

    def add(self, draw: Draw) -> None:
        # A worker finishes its share of a pass before it begins the next.
        if draw.pass_number > self.pass_number:
            self.pass_number = draw.pass_number
            self.drawn = bytearray()
        index, bit = divmod(draw.place, 8)
        if index >= len(self.drawn):
            self.drawn.extend(bytes(index + 1 - len(self.drawn)))
        self.drawn[index] |= 1 << bit

    def copy(self) -> Self:
        return type(self)(self.pass_number, self.drawn[:])

    def undrawn(self, share_size: int) -> NDArray[np.bool_]:
        """Return which samples of the share are left."""
        # numpy pads an empty array with arbitrary bits.
        padded = self.drawn + bytes(share_size // 8 + 1)
        bits = np.unpackbits(np.frombuffer(padded, np.uint8), bitorder="little")[:share_size]
        return bits == 0


@dataclass(slots=True)
class DrawnSamples:
    """What the workers of one rank have drawn, by worker and source."""

    shares: dict[tuple[int, int], ShareProgress]

    @classmethod
    def none_yet(cls, num_workers: int, num_sources: int) -> Self:
        keys = itertools.product(range(num_workers), range(num_sources))
        return cls({key: ShareProgress() for key in keys})

    def add(self, worker: int, draws: Iterable[Draw]) -> None:
        for draw in draws:
            self.shares[worker, draw.source].add(draw)

    def of_source(self, source: int) -> list[ShareProgress]:
        """Return the progress of all workers."""
        return [share for (_, number), share in self.shares.items() if number == source]

    def copy(self) -> Self:
        return type(self)({key: share.copy() for key, share in self.shares.items()})

    def to_json(self) -> list[tuple[int, int, int, str]]:
        return [
            (*key, share.pass_number, _encode(share.drawn)) for key, share in self.shares.items()
        ]

    @classmethod
    def from_json(cls, content: list[tuple[int, int, int, str]]) -> Self:
        shares = {}
        for worker, source, pass_number, drawn in content:
            shares[worker, source] = ShareProgress(pass_number, bytearray(_decode(drawn)))
        return cls(shares)


def find_unfinished(
    partition: EpochPartition,
    progress: Sequence[ShareProgress],
    tar_order: Sequence[int],
    num_read: int,
) -> list[UnfinishedPass]:
    """Return what is left of each pass of a source that has begun.

    Args:
        partition: the division of the source.
        progress: of all readers.
        tar_order: the tars' order in the partition.
        num_read: samples that all readers have used since this partition began.
    """
    pass_numbers = [share.pass_number for share in progress]
    # Some of the unfinished passes may not have begun.
    stop = max(max(pass_numbers) + 1, len(partition.unfinished))
    unfinished_numbers = range(min(pass_numbers), stop)
    num_left_of_epoch = None
    if partition.is_counted:
        # All readers are in the same epoch, of which unreadable samples may be left.
        epoch, num_left_of_epoch = partition.epoch_at(num_read)
        unfinished_numbers = range(epoch, epoch + 1)
        if num_left_of_epoch == partition.epoch_samples:
            return []
    passes = []
    for number in unfinished_numbers:
        sample_ids = partition.sample_ids(number)
        bounds = partition.bounds(number)
        is_left = np.zeros(partition.epoch_samples, bool)
        for share, start, stop in zip(progress, bounds[:-1], bounds[1:], strict=True):
            share_ids = sample_ids[start:stop]
            if share.pass_number < number:
                is_left[share_ids] = True
            elif share.pass_number == number:
                is_left[share_ids] = share.undrawn(len(share_ids))
        if is_left.any():
            left_in_order = _split(is_left, partition.samples)
            left = [np.empty(0, np.int64)] * len(tar_order)
            for tar, numbers in zip(tar_order, left_in_order, strict=True):
                left[tar] = numbers
            # Samples that replace unusable ones count, too.
            num_samples = num_left_of_epoch or int(is_left.sum())
            passes.append(UnfinishedPass(left, num_samples))
    return passes


def _split(is_left: NDArray[np.bool_], samples: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return per tar the numbers of samples for which the flag is set."""
    return [np.flatnonzero(flags) for flags in np.split(is_left, np.cumsum(samples)[:-1])]


def encode_unfinished(
    unfinished: list[list[UnfinishedPass]], samples: list[list[int]]
) -> list[list[dict[str, Any]]]:
    """Return JSON of unfinished passes per source, given the samples per tar."""
    content = []
    for passes, tar_samples in zip(unfinished, samples, strict=True):
        firsts = np.cumsum([0, *tar_samples])
        of_source = []
        for left, num_samples in passes:
            is_left = np.zeros(firsts[-1], bool)
            for first, numbers in zip(firsts[:-1], left, strict=True):
                is_left[first + numbers] = True
            bits = np.packbits(is_left, bitorder="little")
            of_source.append({"samples": num_samples, "left": _encode(bits.tobytes())})
        content.append(of_source)
    return content


def decode_unfinished(
    content: list[list[dict[str, Any]]], samples: list[list[int]]
) -> list[list[UnfinishedPass]]:
    unfinished = []
    for passes, tar_samples in zip(content, samples, strict=True):
        of_source = []
        for entry in passes:
            bits = np.frombuffer(_decode(entry["left"]), np.uint8)
            is_left = np.unpackbits(bits, count=sum(tar_samples), bitorder="little") == 1
            of_source.append(UnfinishedPass(_split(is_left, tar_samples), entry["samples"]))
        unfinished.append(of_source)
    return unfinished


def _encode(content: bytes | bytearray) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
