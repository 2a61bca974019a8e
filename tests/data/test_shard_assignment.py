"""Test that an epoch has each item once, for any shards, ranks and workers, and that whole shards
are assigned evenly."""

from collections import Counter
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_assignment import EpochPartition, Source, TarPart, assign_shards
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from tests.data.conftest import OpenSource
from tests.data.tars import marked_item, marked_items, numbers_in, write_tar

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@settings(deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.integers(1, 33), st.integers(0, 9))
def test_the_parts_of_all_workers_are_an_epoch(
    sizes: list[int], world_size: int, num_workers: int, piece_size: int, epoch: int
) -> None:
    """Each reads all its samples, and every tar is opened, so that damage is reported."""
    sizes_by_tar = {f"{number}.tar": size for number, size in enumerate(sizes)}
    everything = Counter(
        (tar, number) for tar, size in sizes_by_tar.items() for number in range(size)
    )

    def samples_in(parts: list[TarPart]) -> Counter[Any]:
        return Counter(
            (tar, i)
            for tar, first, end in parts
            for i in range(*slice(first, end).indices(sizes_by_tar[tar]))
        )

    read = Counter[Any]()
    opened = set[str]()
    for number in range(world_size * num_workers):
        partition = EpochPartition(
            tuple(sizes), sum(sizes), world_size, num_workers, piece_size, number
        )
        own, others = partition.parts([*sizes_by_tar], epoch)
        assert samples_in(own).total() == partition.samples_in(epoch, number)
        assert samples_in(own) + samples_in(others) == everything
        read += samples_in(own)
        opened |= {tar for tar, _, _ in own}
    assert (read, opened) == (everything, set(sizes_by_tar))


def _given(
    open_source: OpenSource, shards: str, steps: int, world_size: int, **options: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return the items of all ranks per step, and the workers' final positions."""
    by_step: list[list[int]] = [[] for _ in range(steps)]
    ends = []
    for rank in range(world_size):
        with open_source(shards, rank=rank, world_size=world_size, **options) as source:
            for numbers in by_step:
                numbers += numbers_in(source, 1)
            ends += source.state()["positions"]
    return by_step, ends


@pytest.mark.parametrize(
    ("sizes", "world_size", "num_workers", "micro_batch", "shuffle_buffer"),
    [
        ([7, 90, 1, 2], 3, 2, 16, 20),
        ([5], 2, 3, 4, 0),  # fewer than a global batch and than workers
        ([33, 70, 3], 1, 0, 40, 9),  # in pieces of 32
    ],
)
def test_each_item_comes_once_an_epoch(
    tmp_path: Path, open_source: OpenSource,
    sizes: list[int], world_size: int, num_workers: int, micro_batch: int, shuffle_buffer: int,
) -> None:  # fmt: skip
    """After S samples, each of N items has occurred S/N times, rounded up or down, at every step of
    three epochs."""
    total = sum(sizes)
    seen = Counter(range(sum(sizes)))
    for tar, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        write_tar(tmp_path / f"{tar}.tar", marked_items(range(end - size, end)))
    options = {
        "num_workers": num_workers,
        "micro_batch": micro_batch,
        "shuffle_buffer": shuffle_buffer,
    }
    steps = -(-3 * total // (world_size * micro_batch))
    by_step, _ = _given(open_source, str(tmp_path / "*.tar"), steps, world_size, **options)
    for step, numbers in enumerate(by_step, 1):
        seen.update(numbers)
        epochs, rest = divmod(step * world_size * micro_batch, total)
        assert Counter(count - 1 - epochs for count in seen.values()) == +Counter(
            {0: total - rest, 1: rest}
        )


def test_others_stand_in_for_broken_items(tmp_path: Path, open_source: OpenSource) -> None:
    """Of 48 items 7 are unreadable and 6 are lost to truncation: ranks stay in step, and each epoch
    has all others, and as many again as are broken."""
    broken = set(range(5, 42, 6))
    seen = Counter[int]()
    items = [(f"{n:04d}.wav", b"no audio") if n in broken else marked_item(n)[0] for n in range(48)]
    for tar in range(4):
        numbers = range(12 * tar, 12 * tar + 12)
        write_tar(
            tmp_path / f"{tar}.tar",
            [member for n in numbers for member in (items[n], marked_item(n)[1])],
        )
    whole = (tmp_path / "3.tar").read_bytes()
    (tmp_path / "3.tar").write_bytes(whole[: whole.index(b"0042.wav")])
    write_manifest(
        tmp_path, ShardManifest({f"{tar}.tar": ShardRecord(12, 0, 0.0, "") for tar in range(4)})
    )
    by_step, ends = _given(
        open_source, str(tmp_path / "*.tar"), 18, 2, num_workers=2, shuffle_buffer=4
    )
    for step, numbers in enumerate(by_step, 1):
        seen.update(numbers)
        assert step % 6 or (
            set(seen) == set(range(42)) - broken and min(seen.values()) >= step // 6
        )
    assert [(end["samples"], end["passes"][0][0]) for end in ends] == [
        (36, 2)
    ] * 4  # at the end of the third pass


def numbered(count: int) -> list[str]:
    return [f"{number:02d}.tar" for number in range(count)]


@pytest.mark.parametrize(
    ("num_shards", "world_size", "num_workers"),
    [(12, 2, 3), (13, 2, 3), (5, 2, 2), (9, 4, 0), (3, 2, 4)],
)
def test_every_shard_goes_to_one_worker(
    micro: ClapConfig, num_shards: int, world_size: int, num_workers: int
) -> None:
    """If there are too few for all workers, each worker still has one."""
    sources = [Source(numbered(num_shards), 1.0), Source(numbered(50), 3.0)]
    readers = world_size * (num_workers or 1)
    data = ShardData(source="webdataset", shards="", tokenizer="", num_workers=num_workers)
    specs = [BatchSpec(micro, 12, 4, rank, world_size) for rank in range(world_size)]
    shared = [assign_shards(sources, data, spec) for spec in specs]
    assert [len(workers) for workers in shared] == [num_workers or 1] * world_size
    for source, assigned in zip(sources, zip(*chain(*shared), strict=True), strict=True):
        sizes = [len(each.shards) for each in assigned]
        assert max(sizes) - 1 <= min(sizes) >= 1
        assert sorted(set(chain(*(each.shards for each in assigned)))) == source.shards
        assert sum(sizes) == max(readers, len(source.shards))
