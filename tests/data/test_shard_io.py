import threading
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.data.shard_io import open_ahead, open_shard
from tests.data.tars import put

SIZE = 5000


@pytest.fixture
def urls(shard_cache: Path) -> list[str]:
    return [put(f"memory://cache/{number}.tar", bytes([number]) * SIZE) for number in range(4)]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return a mock that is called with each remote file that is copied."""
    noted = Mock()
    get_file = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda *to, **options: (noted(to[1]), get_file(*to))
    )
    return noted


def content(shard: str, cache_bytes: float = 1e9) -> bytes:
    return open_shard(shard, cache_bytes).read(0, 10 * SIZE)


def test_each_is_fetched_once_until_the_least_recently_used_makes_room(
    urls: list[str], fetched: Mock, shard_cache: Path
) -> None:
    """Open shards stay readable. Changed ones are fetched again."""
    held = open_shard(urls[0], 2.5 * SIZE)
    for number in (0, 1, 0, 2, 0, 1):
        assert content(urls[number], 2.5 * SIZE) == bytes([number]) * SIZE
        assert len(list(shard_cache.glob("*.tar"))) <= 2
    assert fetched.mock_calls == [call(f"/cache/{number}.tar") for number in (0, 1, 2, 1)]
    assert content(urls[3], 0) == bytes([3]) * SIZE
    assert not list(shard_cache.glob("*.tar"))
    assert held.read(0, SIZE) == bytes(SIZE)
    assert content(urls[1]) == bytes([1]) * SIZE
    put(urls[1], b"other" * 1000)
    assert content(urls[1]) == b"other" * 1000


def test_what_breaks_off_is_no_copy(
    urls: list[str], shard_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            MemoryFileSystem,
            "get_file",
            lambda self, path, local, **options: Path(local).write_bytes(b"begun"),
        )
        with pytest.raises(OSError, match="stopped after 5 bytes"):
            open_shard(urls[1])
    assert not list(shard_cache.glob("*.tar"))
    assert content(urls[1]) == bytes([1]) * SIZE


def test_the_next_is_fetched_while_one_is_read(
    urls: list[str], fetched: Mock, tmp_path: Path
) -> None:
    (tmp_path / "local.tar").write_bytes(b"local")
    opened = open_ahead(
        [*urls[:2], str(tmp_path / "local.tar"), "memory://cache/gone.tar"], open_shard
    )
    name, first = next(opened)
    assert (name, first().read(0, 1)) == (urls[0], b"\0")
    (name, second), (_, local), (_, gone) = opened
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(0.5)
    assert fetched.call_count == 2, "before it is requested"
    assert [each().read(0, 1) for each in (second, local)] == [b"\1", b"l"]
    with pytest.raises(FileNotFoundError):
        gone()
    assert [
        open_file().read(0, 1) for _, open_file in list(open_ahead([urls[2]] * 5, open_shard))
    ] == [b"\2"] * 5
    assert fetched.call_count == 3, "simultaneous requests fetch it once"
