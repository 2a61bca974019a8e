from __future__ import annotations

import tarfile
from itertools import chain
from pathlib import Path

import pytest

from clap_ds.data.shard_list import divide_shards, expand_shards
from tests.data.tars import marked_item, write_tar


@pytest.fixture
def three_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return [write_tar(tmp_path / f"a-{number:02d}.tar", marked_item(number)) for number in range(9, 12)]


@pytest.mark.parametrize(
    "shards",
    ["{root}/a-{{09..11}}.tar", ["{root}/a-09.tar", "{root}/a-{{10,11}}.tar"], "{root}/a-*.tar", "a-{{09..11}}.tar"],
)
def test_patterns_name_files_in_order(three_tars: list[Path], shards: str | list[str]) -> None:
    root = three_tars[0].parent
    filled = shards.format(root=root) if isinstance(shards, str) else [pattern.format(root=root) for pattern in shards]
    assert [path.resolve() for path in expand_shards(filled)] == three_tars


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("nowhere.tar", r"1 of the 1 .*nowhere\.tar"),
        ("a-{08..12}.tar", r"2 of the 5 files of 'a-\{08\.\.12\}\.tar' .*first: a-08\.tar"),
        ("b-*.tar", r"no file matches 'b-\*\.tar'"),
        ("a-{09..11.tar", "unbalanced braces"),
        (".", "1 of the 1"),
        ([], "empty list"),
        ("", "1 of the 1"),
    ],
)
@pytest.mark.usefixtures("three_tars")
def test_shards_that_are_not_there(shards: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{message}"):
        expand_shards(shards)


def test_empty_tars_are_refused(tmp_path: Path) -> None:
    no_members, no_bytes = write_tar(tmp_path / "no_members.tar", []), tmp_path / "no_bytes.tar"
    no_bytes.touch()
    assert tarfile.is_tarfile(no_members)
    for path in (no_members, no_bytes):
        with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{path.name} is an empty tar"):
            expand_shards(str(path))


@pytest.mark.parametrize(
    ("num_shards", "world_size", "num_workers"), [(12, 2, 3), (13, 2, 3), (7, 7, 1), (5, 2, 2), (9, 4, 0)]
)
def test_every_shard_goes_to_one_worker(num_shards: int, world_size: int, num_workers: int) -> None:
    shards = [Path(f"{number}.tar") for number in range(num_shards)]
    by_rank = [
        divide_shards(shards, rank=rank, world_size=world_size, num_workers=num_workers) for rank in range(world_size)
    ]
    assert [len(workers) for workers in by_rank] == [max(num_workers, 1)] * world_size
    given = [own for workers in by_rank for own in workers]
    assert sorted(chain(*given)) == sorted(shards)
    assert min(map(len, given)) >= 1


def test_few_shards_make_all_ranks_use_fewer_workers(capsys: pytest.CaptureFixture[str]) -> None:
    shards = [Path(f"{number}.tar") for number in range(7)]
    by_rank = [divide_shards(shards, rank=rank, world_size=3, num_workers=8) for rank in range(3)]
    assert [len(workers) for workers in by_rank] == [2, 2, 2]
    assert sorted(path for workers in by_rank for own in workers for path in own) == shards
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 1
    assert all(number in notes[0] for number in ("7 shards", "3 rank", "8 workers", "2 worker"))


@pytest.mark.parametrize("rank", [0, 3])
def test_fewer_shards_than_ranks_is_refused_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match=r"clap\.data\.shards: 3 shard\(s\) for 4 ranks.*at least 4, and 32"):
        divide_shards([Path("a"), Path("b"), Path("c")], rank=rank, world_size=4, num_workers=8)
