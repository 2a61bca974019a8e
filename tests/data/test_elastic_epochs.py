"""Test that an epoch has each sample once, if ranks, workers and other settings change within it."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from tests.data.conftest import OpenSource
from tests.data.tars import marked_item, marked_items, number_of, numbers_in, write_tar

States = list[dict[str, Any]]


def write_tars(folder: Path, sizes: Sequence[int], first: int = 0) -> str:
    """Write tars of marked items numbered from `first`. Return their pattern."""
    folder.mkdir(exist_ok=True)
    for tar, size in enumerate(sizes):
        write_tar(folder / f"{tar}.tar", marked_items(range(first, first + size)))
        first += size
    return str(folder / "*.tar")


def read(
    open_source: OpenSource,
    shards: Any,
    states: States,
    num_batches: int,
    world_size: int,
    **settings: Any,
) -> tuple[list[int], States]:
    """Return the items that all ranks read, and their states."""
    numbers = []
    new_states = []
    for rank in range(world_size):
        with open_source(shards, states, rank=rank, world_size=world_size, **settings) as source:
            numbers += numbers_in(source, num_batches)
            new_states.append(source.state())
    return numbers, new_states


def draw_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "world_size": rng.randint(1, 5),
        "num_workers": rng.choice([0, 0, 1, 2, 3]),
        "micro_batch": rng.randint(1, 7),
        "shuffle_buffer": rng.choice([0, 3, 30]),
        "seed": rng.randint(0, 1),
    }


@pytest.mark.parametrize("seed", range(6))
def test_changed_ranks_read_each_sample_once_an_epoch(tmp_path, open_source, seed):
    """After S samples of any sequence of settings, each of N items has occurred S/N times, rounded
    up or down."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 2, 7, 20, 41]) for _ in range(rng.randint(1, 6))] + [5]
    num_items = sum(sizes)
    pattern = write_tars(tmp_path / "shards", sizes)
    counts = Counter[int]()
    states: States = []
    for _ in range(12):
        settings = draw_settings(rng)
        # from a part of an epoch to more than one
        most = max(2, num_items // (settings["world_size"] * settings["micro_batch"]))
        numbers, states = read(open_source, pattern, states, rng.randint(0, most), **settings)
        counts.update(numbers)
        num_epochs, num_ahead = divmod(counts.total(), num_items)
        expected = [num_epochs] * (num_items - num_ahead) + [num_epochs + 1] * num_ahead
        assert sorted(counts[number] for number in range(num_items)) == expected, settings


def test_samples_behind_others_that_are_missing_are_read(tmp_path, open_source):
    """Of the first tar's 4 samples by the manifest, it has one. All of the second tar's come."""
    write_tars(tmp_path, [1])
    write_tar(tmp_path / "1.tar", marked_items(range(4, 10)))
    sizes = {"0.tar": ShardRecord(4, 0, 0.0, ""), "1.tar": ShardRecord(6, 0, 0.0, "")}
    write_manifest(tmp_path, ShardManifest(sizes))
    pattern = str(tmp_path / "*.tar")
    first, states = read(open_source, pattern, [], 1, world_size=4, micro_batch=1)
    second, _ = read(open_source, pattern, states, 3, world_size=2, micro_batch=1)
    assert {*first, *second} == {0, *range(4, 10)}


def test_epoch_ends_at_the_same_sample_after_broken_items(tmp_path, open_source):
    """Of 60 items, 9 are unreadable, one tar has 12 fewer than its manifest tells, and one member
    isn't a sample. The ranks change within each epoch: all other items come at least once."""
    broken = {1, 7, 13, 14, 25, 26, 27, 33, 40}
    for tar in range(4):
        members = [("notes.txt", b"no audio belongs to this")]
        for number in range(15 * tar, 15 * tar + 15):
            audio, text = marked_item(number)
            members += [(audio[0], b"no audio") if number in broken else audio, text]
        write_tar(tmp_path / f"{tar}.tar", members)
    whole = (tmp_path / "3.tar").read_bytes()
    (tmp_path / "3.tar").write_bytes(whole[: whole.index(b"0048.wav")])
    record = ShardRecord(15, 0, 0.0, "")
    write_manifest(tmp_path, ShardManifest({f"{tar}.tar": record for tar in range(4)}))
    states: States = []
    for _ in range(3):
        counts = Counter[int]()
        for world_size, num_workers, num_batches in [(2, 2, 2), (3, 0, 2), (1, 1, 5), (2, 0, 0)]:
            numbers, states = read(
                open_source,
                str(tmp_path / "*.tar"),
                states,
                num_batches,
                world_size,
                num_workers=num_workers,
                shuffle_buffer=5,
            )
            counts.update(numbers)
        assert counts.total() == 60
        assert set(counts) == set(range(48)) - broken


@pytest.mark.parametrize("seed", range(3))
def test_changed_ranks_read_each_sample_of_a_mixture_once_a_pass(tmp_path, open_source, seed):
    """A worker may be a pass ahead of others, and another begins it when what is left is dealt.
    Without that, the most frequent sample comes up to 12 times more often than the rarest."""
    rng = random.Random(seed)
    small = write_tars(tmp_path / "small", [3])
    large = write_tars(tmp_path / "large", [9, 40, 1, 30], first=3)
    counts = Counter[int]()
    states: States = []
    for _ in range(12):
        settings = draw_settings(rng)
        weights = {small: 1.0, large: 4.0}
        numbers, states = read(open_source, weights, states, rng.randint(0, 12), **settings)
        counts.update(numbers)
        of_large = [counts[number] for number in range(3, 83)]
        assert max(of_large) - min(of_large) <= 3, settings


def test_passes_that_no_worker_has_begun_stay_unfinished(tmp_path, open_source):
    """Two workers left two passes of the small source. A run without steps forgets none."""
    weights = {write_tars(tmp_path / "small", [4]): 1.0}
    weights[write_tars(tmp_path / "large", [40], first=4)] = 1.0
    options = {"world_size": 1, "micro_batch": 6}
    _, states = read(open_source, weights, [], 1, num_workers=2, **options)
    _, states = read(open_source, weights, states, 0, **options)
    unfinished, _ = states[0]["unfinished"]
    assert len(unfinished) > 1
    _, states = read(open_source, weights, states, 0, world_size=2, micro_batch=6)
    assert states[0]["unfinished"][0] == unfinished


def test_worker_of_a_mixture_with_broken_share_reads_others_samples(tmp_path, open_source):
    """Each of 4 workers has one sample of the small source."""
    small = tmp_path / "small"
    small.mkdir()
    audio, text = marked_item(1)
    write_tar(small / "0.tar", [*marked_items([0]), (audio[0], b"no audio"), text])
    write_tar(small / "1.tar", marked_items([2, 3]))
    weights = {f"{small}/*.tar": 1.0, write_tars(tmp_path / "large", [50], first=4): 1.0}
    numbers, _ = read(open_source, weights, [], 12, world_size=4)
    assert {0, 2, 3} < set(numbers)
    assert 1 not in numbers


@pytest.mark.parametrize("is_mixture", [False, True])
def test_run_after_a_change_resumes_exactly(tmp_path, open_source, is_mixture):
    """What is left of an epoch, and the epochs behind it, come in the same order."""
    pattern: Any = write_tars(tmp_path / "shards", [10, 31, 4])
    if is_mixture:
        pattern = {pattern: 2.0, write_tars(tmp_path / "others", [8, 9], first=45): 1.0}
    first = {"world_size": 3, "num_workers": 2, "shuffle_buffer": 7}
    second = {"world_size": 2, "num_workers": 0, "shuffle_buffer": 7}
    _, states = read(open_source, pattern, [], 2, **first)
    for rank in range(2):
        with open_source(pattern, states, rank=rank, **second) as source:
            numbers = []
            later_states = []
            for _ in range(12):
                numbers.append([number_of(row) for row in next(source).audio])
                later_states.append(source.state())
        for stop in (0, 2, 7):
            # Only the first rank's state has what both of them complete.
            resumed_from = [{}, {}]
            resumed_from[rank] = later_states[stop]
            if rank:
                _, both_states = read(open_source, pattern, states, stop + 1, **second)
                resumed_from[0] = both_states[0]
            with open_source(pattern, resumed_from, rank=rank, **second) as source:
                for expected in numbers[stop + 1 :]:
                    assert [number_of(row) for row in next(source).audio] == expected
                assert source.state() == later_states[-1]


def test_resuming_with_other_ranks_tells_what_is_left(tmp_path, open_source, capsys):
    pattern = write_tars(tmp_path, [10, 20, 30])
    _, states = read(open_source, pattern, [], 5, world_size=2, shuffle_buffer=9)
    changed = {"shuffle_buffer": 3, "num_workers": 2}
    read(open_source, pattern, states, 1, world_size=1, **changed)
    error = capsys.readouterr().err
    assert "resuming after 40 samples with the 20 samples that the unfinished epoch has" in error
    assert "ranks (then 2, now 1), workers per rank (then 1, now 2), clap.data.shuffle" in error


def test_mixture_with_another_source_begins_a_new_epoch(tmp_path, open_source, capsys):
    """Also if the checkpoint has unfinished epochs of the sources before."""
    weights = {write_tars(tmp_path / "first", [10, 20]): 1.0}
    weights[write_tars(tmp_path / "second", [15], first=30)] = 1.0
    _, states = read(open_source, weights, [], 1, world_size=2)
    _, states = read(open_source, weights, states, 1, world_size=1)
    assert "unfinished" in states[0]
    weights[write_tars(tmp_path / "third", [15], first=45)] = 1.0
    read(open_source, weights, states, 1, world_size=1)
    assert "12 samples with a new epoch in a new order" in capsys.readouterr().err


def test_checkpoint_without_drawn_samples_begins_a_new_epoch(tmp_path, open_source, capsys):
    """Earlier versions wrote none. The same ranks continue exactly, and still have none."""
    pattern = write_tars(tmp_path, [10, 20, 30])
    _, states = read(open_source, pattern, [], 5, world_size=1)
    del states[0]["drawn"]
    _, states = read(open_source, pattern, states, 1, world_size=1)
    assert "drawn" not in states[0]
    read(open_source, pattern, states, 1, world_size=2)
    assert "24 samples with a new epoch in a new order" in capsys.readouterr().err
