"""Test that an epoch has each item once, for any shards, ranks and workers, and that whole shards
are assigned evenly."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.dataloader import BatchSource
from clap_ds.data.shard_assignment import Source, assign_shards
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from tests.data.conftest import OpenSource
from tests.data.tars import marked_item, marked_items, numbers_in, write_tar


def read_steps(
    open_source: OpenSource, shards: str, num_steps: int, world_size: int, **options: Any
) -> tuple[list[list[int]], list[BatchSource]]:
    """Return the items of all ranks per step, and the ranks' sources."""
    numbers_by_step: list[list[int]] = [[] for _ in range(num_steps)]
    sources = []
    for rank in range(world_size):
        with open_source(shards, rank=rank, world_size=world_size, **options) as source:
            for numbers in numbers_by_step:
                numbers += numbers_in(source, 1)
            sources.append(source)
    return numbers_by_step, sources


@pytest.mark.parametrize(
    ("sizes", "world_size", "num_workers", "micro_batch", "shuffle_buffer"),
    [
        ([7, 90, 1, 2], 3, 2, 16, 20),
        # fewer than a global batch and than workers
        ([5], 2, 3, 4, 0),
        # in chunks of 32
        ([33, 70, 0, 3], 1, 0, 40, 9),
    ],
)
def test_each_item_comes_once_an_epoch(
    tmp_path, open_source, sizes, world_size, num_workers, micro_batch, shuffle_buffer
):
    """After S samples, each of N items has occurred S/N times, rounded up or down, at every step of
    three epochs."""
    num_items = 0
    for tar, size in enumerate(sizes):
        items = marked_items(range(num_items, num_items + size))
        write_tar(tmp_path / f"{tar}.tar", items)
        num_items += size
    global_batch = world_size * micro_batch
    numbers_by_step, _ = read_steps(
        open_source,
        str(tmp_path / "*.tar"),
        -(-3 * num_items // global_batch),
        world_size,
        num_workers=num_workers,
        micro_batch=micro_batch,
        shuffle_buffer=shuffle_buffer,
    )
    counts = Counter[int]()
    for step, numbers in enumerate(numbers_by_step, 1):
        counts.update(numbers)
        num_epochs, num_ahead = divmod(step * global_batch, num_items)
        expected = [num_epochs] * (num_items - num_ahead) + [num_epochs + 1] * num_ahead
        assert sorted(counts[number] for number in range(num_items)) == expected


def test_broken_items_are_replaced_and_named_once(tmp_path, open_source, capfd):
    """Of 48 items 7 are unreadable and 6 are lost to truncation: ranks stay in step, and each epoch
    has all other items, and as many again as are broken."""
    broken = set(range(5, 42, 6))
    for tar in range(4):
        members = []
        for number in range(12 * tar, 12 * tar + 12):
            audio, text = marked_item(number)
            members += [(audio[0], b"no audio") if number in broken else audio, text]
        write_tar(tmp_path / f"{tar}.tar", members)
    whole = (tmp_path / "3.tar").read_bytes()
    (tmp_path / "3.tar").write_bytes(whole[: whole.index(b"0042.wav")])
    record = ShardRecord(12, 0, 0.0, "")
    write_manifest(tmp_path, ShardManifest({f"{tar}.tar": record for tar in range(4)}))
    numbers_by_step, sources = read_steps(
        open_source, str(tmp_path / "*.tar"), 18, 2, num_workers=2, shuffle_buffer=4
    )
    # An epoch has 6 steps of 8.
    for epoch in range(3):
        numbers = chain(*numbers_by_step[6 * epoch : 6 * epoch + 6])
        assert set(numbers) == set(range(42)) - broken
    for source in sources:
        # All workers are at the end of the third pass.
        assert [position["samples"] for position in source.state()["positions"]] == [36, 36]
        names = [item["name"] for item in source.statistics()["broken_items"]]
        assert len(names) == len(set(names)) == source.statistics()["num_broken_items"] > 0
    lines = capfd.readouterr().err.splitlines()
    for number in broken:
        assert f"{number:04d}: audio can't be decoded" in "".join(lines)


@pytest.mark.parametrize("num_shards", [13, 3])
def test_every_shard_is_assigned_to_one_worker(micro, num_shards):
    """If there are too few for all workers, each worker still has one."""
    source = Source([f"{number:02d}.tar" for number in range(num_shards)], 1.0)
    data = ShardData(source="webdataset", shards="", tokenizer="", num_workers=3)
    assigned: list[list[str]] = []
    for rank in range(2):
        for (of_worker,) in assign_shards([source], data, BatchSpec(micro, 12, 4, rank, 2)):
            assigned.append(of_worker.shards)
    assert sorted(set(chain(*assigned))) == source.shards
    sizes = [len(shards) for shards in assigned]
    assert max(sizes) - 1 <= min(sizes) >= 1
