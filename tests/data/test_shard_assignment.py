import sys
from itertools import chain
from pathlib import Path

import pytest

from clap_ds.data.shard_assignment import Source, assign_shards, expand_sources
from clap_ds.data.shard_io import check_url
from clap_ds.data.shard_manifest import expand_shards
from tests.data.tars import marked_item, write_tar


@pytest.fixture
def three_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return [write_tar(tmp_path / f"a-{number:02d}.tar", marked_item(number)) for number in range(9, 12)]


@pytest.mark.parametrize("shards", ["a-{09..11}.tar", ["a-09.tar", "a-{10,11}.tar"], "a-*.tar"])
def test_patterns_name_files_in_order(three_tars: list[Path], shards: str | list[str]) -> None:
    assert [Path(path).resolve() for path in expand_shards(shards)] == three_tars


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("a-{08..12}.tar", r"a-08\.tar does not exist"),
        ("b-*.tar", "no file matches"),
        (".", "a folder"),
        ("memory://nowhere/*.tar", "no file matches"),
        ("gopher://host/a.tar", "gopher"),
        ("s3://bucket/a.tar", "s3fs"),
        ("s3://key:secret@bucket/a.tar", "s3 URL of bucket contains credentials"),
    ],
)
@pytest.mark.usefixtures("three_tars")
def test_shards_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, shards: str | list[str] | dict[str, float], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{message}") as error:
        expand_sources(shards)
    assert "secret" not in str(error.value)
    check_url("memory://container@account/a.tar")  # no credentials


def numbered(count: int) -> list[str]:
    return [f"{number:02d}.tar" for number in range(count)]


@pytest.mark.parametrize(
    ("num_shards", "world_size", "num_workers"), [(12, 2, 3), (13, 2, 3), (5, 2, 2), (9, 4, 0), (3, 2, 4)]
)
def test_every_shard_goes_to_one_worker(num_shards: int, world_size: int, num_workers: int) -> None:
    """If there are too few for all workers, each worker still has one."""
    sources, readers = [Source(numbered(num_shards), 1.0), Source(numbered(50), 3.0)], world_size * (num_workers or 1)
    shared = [assign_shards(sources, False, rank, world_size, num_workers) for rank in range(world_size)]
    assert [len(workers) for workers in shared] == [num_workers or 1] * world_size
    for source, given in zip(sources, zip(*chain(*shared), strict=True), strict=True):
        sizes = [len(each.shards) for each in given]
        assert max(sizes) - 1 <= min(sizes) >= 1
        assert sorted(set(chain(*(each.shards for each in given)))) == source.shards
        assert sum(sizes) == max(readers, len(source.shards))
