from __future__ import annotations

import sys
import tarfile
from itertools import chain
from pathlib import Path

import fsspec
import pytest

from clap_ds.data.shard_list import Source, expand_shards, expand_sources, share_out
from tests.data.tars import marked_item, write_tar


def divide_shards(shards, **k):
    return [[o.shards for o in w][0] for w in share_out([Source(shards, 1.0)], sampling='epochs', **k)]


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
    assert [Path(path).resolve() for path in expand_shards(filled)] == three_tars


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
    shards = [f"{number}.tar" for number in range(num_shards)]
    by_rank = [
        divide_shards(shards, rank=rank, world_size=world_size, num_workers=num_workers) for rank in range(world_size)
    ]
    assert [len(workers) for workers in by_rank] == [max(num_workers, 1)] * world_size
    given = [own for workers in by_rank for own in workers]
    assert sorted(chain(*given)) == sorted(shards)
    assert min(map(len, given)) >= 1


def test_few_shards_make_all_ranks_use_fewer_workers(capsys: pytest.CaptureFixture[str]) -> None:
    shards = [f"{number}.tar" for number in range(7)]
    by_rank = [divide_shards(shards, rank=rank, world_size=3, num_workers=8) for rank in range(3)]
    assert [len(workers) for workers in by_rank] == [2, 2, 2]
    assert sorted(path for workers in by_rank for own in workers for path in own) == shards
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 1
    assert all(number in notes[0] for number in ("7 shards", "3 rank", "8 workers", "2 worker"))


@pytest.mark.parametrize("rank", [0, 3])
def test_fewer_shards_than_ranks_is_refused_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match=r"clap\.data\.shards: 3 shard\(s\) for 4 ranks.*at least 4, and 32"):
        divide_shards(["a", "b", "c"], rank=rank, world_size=4, num_workers=8)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("memory://nowhere/a-{0..3}.tar", r"memory://nowhere/a-0\.tar is not there"),
        ("memory://nowhere/*.tar", r"no file matches 'memory://nowhere/\*\.tar'"),
        ("memory://listed/empty.tar", r"memory://listed/empty\.tar is empty"),
        ("gopher://host/a.tar", "no protocol 'gopher'"),
        ("s3://key:secret@bucket/a.tar", "s3 URL of bucket carries credentials"),
        ("https://somebody@host/a.tar", "https URL of host carries credentials"),
        ({}, "empty list"),
        ({"memory://listed/a.tar": 1.0, "nowhere.tar": 1.0}, r"nowhere\.tar"),
    ],
)
def test_remote_shards_that_are_not_there(shards: str | dict[str, float], message: str) -> None:
    for name, content in (("a", b"x" * 20000), ("empty", b"")):
        with fsspec.open(f"memory://listed/{name}.tar", "wb") as file:
            file.write(content)
    with pytest.raises(ValueError, match=rf"clap\.data\.shards: .*{message}") as error:
        expand_sources(shards)
    assert "secret" not in str(error.value)


def test_unreachable_hosts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    from clap_ds.data import shard_files

    def fail(self: object, path: str, **options: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    with pytest.raises(ValueError, match=r"memory://a\.tar can't be reached: OSError: failed 5 times, .*no answer"):
        expand_shards("memory://a.tar")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"the package for s3:// is not installed: .*s3fs"):
        expand_shards("s3://bucket/a.tar")


def test_mixtures_use_as_many_workers_as_the_smallest_source_feeds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number in range(12):
        write_tar(tmp_path / f"a{number:02d}.tar", marked_item(number))
        if number < 4:
            write_tar(tmp_path / f"b{number}.tar", marked_item(number))
    sources = expand_sources({str(tmp_path / "a*.tar"): 1, str(tmp_path / "b*.tar"): 3})
    assert [source.weight for source in sources] == [0.25, 0.75]
    shared = [share_out(sources, sampling="epochs", rank=rank, world_size=2, num_workers=4) for rank in range(2)]
    assert [len(workers) for workers in shared] == [2, 2]
    for number, source in enumerate(sources):
        given = [shard for workers in shared for shares in workers for shard in shares[number].shards]
        assert sorted(given) == source.shards
    assert "4 shards for 2 rank(s) × 4 workers: using 2 worker(s)" in capsys.readouterr().err
    assert len(share_out(sources, sampling="replacement", rank=5, world_size=99, num_workers=4)) == 4
    with pytest.raises(ValueError, match=r"4 shard\(s\) for 5 ranks"):
        share_out(sources, sampling="epochs", rank=0, world_size=5, num_workers=1)
