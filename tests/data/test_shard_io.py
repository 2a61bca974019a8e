import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.data.shard_io import open_ahead, open_shard
from tests.data.tars import put

SIZE = 5000


@pytest.fixture
def urls(shard_cache: Path) -> list[str]:
    return [put(f"memory://cache/{number}.tar", bytes([number]) * SIZE) for number in range(4)]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that each downloaded file's path is added to."""
    paths: list[str] = []
    get_file = MemoryFileSystem.get_file

    def get_and_list(self: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        paths.append(path)
        get_file(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_and_list)
    return paths


def content(shard: str, cache_bytes: float = 1e9) -> bytes:
    return open_shard(shard, cache_bytes).read(0, 10 * SIZE)


def test_least_recently_used_copies_make_room(urls, downloads, shard_cache):
    """Open shards stay readable."""
    opened = open_shard(urls[0], 2.5 * SIZE)
    for number in (0, 1, 0, 2, 0, 1):
        assert content(urls[number], 2.5 * SIZE) == bytes([number]) * SIZE
        assert len(list(shard_cache.glob("*.tar"))) <= 2
    assert downloads == [f"/cache/{number}.tar" for number in (0, 1, 2, 1)]
    assert content(urls[3], 0) == bytes([3]) * SIZE
    assert not list(shard_cache.glob("*.tar"))
    assert opened.read(0, SIZE) == bytes(SIZE)


def test_next_shard_is_downloaded_while_one_is_read(urls, downloads):
    shards = iter(open_ahead([urls[0], urls[1], "memory://cache/gone.tar"], open_shard))
    name, open_first = next(shards)
    assert name == urls[0]
    assert open_first().read(0, 1) == b"\0"
    while len(downloads) < 2:
        time.sleep(0.01)
    _, open_second = next(shards)
    assert open_second().read(0, 1) == b"\1"
    _, open_missing = next(shards)
    with pytest.raises(FileNotFoundError):
        open_missing()


def test_simultaneous_requests_download_once(urls, downloads):
    for _, open_file in list(open_ahead([urls[2]] * 5, open_shard)):
        assert open_file().read(0, 1) == b"\2"
    assert len(downloads) == 1
