import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.data.shard_files import open_ahead, open_shard, problem_with
from tests.data.tars import put

SIZE = 5000


@pytest.fixture
def urls(shard_cache: Path) -> list[str]:
    return [put(f"memory://cache/{number}.tar", bytes([number]) * SIZE) for number in range(4)]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Is called with each remote file that is copied."""
    noted, get_file = Mock(), MemoryFileSystem.get_file
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *to: (noted(to[1]), get_file(*to)))
    return noted


def content(shard: str, cache_bytes: float = 1e9) -> bytes:
    return open_shard(shard, cache_bytes).read(0, 10 * SIZE)


def test_each_is_fetched_once_until_the_least_recently_used_makes_room(
    urls: list[str], fetched: Mock, shard_cache: Path
) -> None:
    """What is open stays readable. One that has changed is fetched anew."""
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


def test_what_breaks_off_is_no_copy(urls: list[str], shard_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", lambda self, path, local: Path(local).write_bytes(b"begun"))
        with pytest.raises(OSError, match="5 of 5,000 bytes came"):
            open_shard(urls[1])
    assert not list(shard_cache.glob("*.[tp]ar*"))
    assert content(urls[1]) == bytes([1]) * SIZE


def test_the_next_is_fetched_while_one_is_read(urls: list[str], fetched: Mock, tmp_path: Path) -> None:
    (tmp_path / "local.tar").write_bytes(b"local")
    opened = open_ahead([*urls[:2], str(tmp_path / "local.tar"), "memory://cache/gone.tar"], 1e9)
    name, first = next(opened)
    assert (name, first().read(0, 1)) == (urls[0], b"\0")
    (name, second), (_, local), (_, gone) = opened
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(0.5)
    assert fetched.call_count == 2, "before it is asked for"
    assert [each().read(0, 1) for each in (second, local)] == [b"\1", b"l"]
    with pytest.raises(FileNotFoundError):
        gone()
    assert [open_file().read(0, 1) for _, open_file in list(open_ahead([urls[2]] * 5, 1e9))] == [b"\2"] * 5
    assert fetched.call_count == 3, "the same wanted at once is fetched once"


class ClientConnectorError(OSError):
    pass


class ClientResponseError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message")
        self.status = status


class HttpFiles(fsspec.AbstractFileSystem):
    protocol = "http"
    cachable = False
    failures: list[Exception] = []  # noqa: RUF012

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self.failures:
            raise FileNotFoundError(path) from self.failures.pop()
        return {"name": path, "size": None, "type": "file"}

    def get_file(self, path: str, local: str, **_: Any) -> None:
        Path(local).write_bytes(path.encode())


DOWN = ClientConnectorError("Cannot connect to host files.example")


@pytest.mark.parametrize(
    ("failures", "problem"),
    [
        ([DOWN] * 4, None),
        ([DOWN] * 5, "can't be reached: failed 5 times"),
        ([ClientResponseError(503)] * 4, None),
        ([ClientResponseError(404)], "is not there"),
        ([ClientResponseError(403)], "can't be reached: ClientResponseError: 403"),
    ],
)
@pytest.mark.usefixtures("shard_cache")
def test_failures_are_tried_again_and_told_from_files_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], problem: str | None
) -> None:
    """Of a server that states no sizes, too. What another attempt wouldn't change isn't tried again."""
    monkeypatch.setattr("fsspec.core.get_filesystem_class", lambda protocol: HttpFiles)
    monkeypatch.setattr("fsspec.core.filesystem", lambda protocol, **options: HttpFiles(**options))
    assert content("http://files.example/a.tar") == b"files.example/a.tar"
    HttpFiles.failures[:] = failures
    found = problem_with("http://files.example/a.tar")
    assert found == problem or (problem and str(found).startswith(problem))
    assert not HttpFiles.failures
