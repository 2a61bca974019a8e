import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import IO

import pytest
from fsspec.implementations.memory import MemoryFile

from clap_ds.data import shard_cache, shard_files
from clap_ds.data.shard_cache import ShardCache
from tests.data.tars import put

SIZE = 5000


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    return [put(f"memory://cache/{number}.tar", bytes([number]) * SIZE) for number in range(4)]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, told: list[str]) -> ShardCache:
    return ShardCache(2.5 * SIZE, told.append, tmp_path / "shards")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which remote files were fetched."""
    names: list[str] = []
    open_shard = shard_cache.open_shard
    monkeypatch.setattr(shard_cache, "open_shard", lambda url: names.append(url) or open_shard(url))
    return names


def content(cache: ShardCache, url: str) -> bytes:
    file = cache.open(url)
    assert file is not None
    with file:
        return file.read()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_each_is_fetched_once_until_the_least_recently_used_makes_room(
    cache: ShardCache, urls: list[str], opened: list[str], told: list[str], tmp_path: Path
) -> None:
    for number in (0, 1, 0, 2, 0, 1):
        assert content(cache, urls[number]) == bytes([number]) * SIZE
        assert size_of(tmp_path / "shards") <= 2.5 * SIZE
    assert opened == [urls[number] for number in (0, 1, 2, 1)]
    assert not told


def test_a_copy_that_is_open_stays_and_others_are_streamed(
    cache: ShardCache, urls: list[str], told: list[str], tmp_path: Path
) -> None:
    held = [cache.open(url) for url in urls]
    assert [file is not None for file in held] == [True, True, False, False]
    assert size_of(tmp_path / "shards") == 2 * SIZE
    assert len(told) == 1
    assert "memory://cache/2.tar is streamed" in told[0]
    assert "in use" in told[0]
    duplicate = os.dup(held[0].fileno())  # as content that is left in a tar has
    for file in held[:2]:
        file.close()
    assert cache.open(urls[2]) is not None  # instead of 1
    os.close(duplicate)
    assert content(cache, urls[3]) == bytes([3]) * SIZE


def test_a_shard_that_has_changed_is_fetched_anew(cache: ShardCache, urls: list[str]) -> None:
    content(cache, urls[0])
    put(urls[0], b"other" * 1000)
    assert content(cache, urls[0]) == b"other" * 1000


def test_larger_shards_are_streamed_and_said_once(cache: ShardCache, urls: list[str], told: list[str]) -> None:
    large = put("memory://cache/large.tar", b"x" * 3 * SIZE)
    assert [cache.open(large), cache.open(large)] == [None, None]
    assert len(told) == 1
    assert "larger than" in told[0]


def test_a_full_disk_means_streaming(
    cache: ShardCache, urls: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert [cache.open(url) for url in urls] == [None] * 4
    assert len(told) == 1
    assert "No space left" in told[0]
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["lock"]


def test_what_breaks_off_is_no_copy(
    cache: ShardCache, urls: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFile, "read", lambda self, size=-1: b"")
        assert cache.open(urls[1]) is None
    assert "0 of 5,000 bytes" in told[0]
    assert content(cache, urls[1]) == bytes([1]) * SIZE


def test_what_a_killed_process_left_makes_room(cache: ShardCache, urls: list[str], tmp_path: Path) -> None:
    content(cache, urls[0])
    left = tmp_path / "shards" / "0123.part"
    left.write_bytes(bytes(2 * SIZE))
    os.utime(left, (0, 0))
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache.open(urls[1]) is None  # somebody still writes it
    assert content(cache, urls[1]) == bytes([1]) * SIZE
    assert not left.exists()


def test_the_next_is_fetched_while_one_is_read(
    cache: ShardCache, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_next_asked_for = threading.Event()
    open_shard = shard_cache.open_shard

    def noted(url: str) -> IO[bytes]:
        if url == urls[1]:
            is_next_asked_for.set()
        return open_shard(url)

    monkeypatch.setattr(shard_cache, "open_shard", noted)
    found = cache.copies([*urls[:2], "/local.tar", "memory://cache/gone.tar"])
    name, copy = next(found)
    assert is_next_asked_for.wait(timeout=60)
    assert (name, copy and copy.read()) == (urls[0], bytes(SIZE))
    rest = [(name, file and file.read(1)) for name, file in found]
    assert rest == [(urls[1], b"\1"), ("/local.tar", None), ("memory://cache/gone.tar", None)]


def test_the_same_fetched_twice_at_once_leaves_one_copy(cache: ShardCache, urls: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    found = [file for _, file in cache.copies([urls[0]] * 5)]
    assert all(file is not None and file.read() == bytes(SIZE) for file in found)
    assert len(list(folder.glob("*.tar"))) == 1
    assert not list(folder.glob("*.part"))
