import io
import threading
import time
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from clap_ds.data import shard_files
from clap_ds.data.shard_files import open_shard, problem_with
from clap_ds.data.shard_manifest import read_manifest
from clap_ds.data.tar_items import read_items
from tests.data.tars import put

CONTENT = bytes(range(256)) * 20000


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    return put("memory://files/a.tar", CONTENT)


def flaky(monkeypatch: pytest.MonkeyPatch, *, works: int, fails: int) -> list[int]:
    """Makes reads of remote files fail `fails` times in a row after each `works` that succeed. Returns positions asked for."""
    asked: list[int] = []
    read = MemoryFile.read

    def unreliable(self: Any, size: int = -1) -> bytes:
        asked.append(self.tell())
        if len(asked) % (works + fails) >= works:
            raise ConnectionResetError("connection reset by peer")
        return read(self, size)

    monkeypatch.setattr(MemoryFile, "read", unreliable)
    return asked


def test_reading_resumes_after_failures(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = flaky(monkeypatch, works=1, fails=3)
    with open_shard(remote) as stream:
        assert stream.read(len(CONTENT) + 1) == CONTENT
    assert len(asked) >= 8


def test_what_comes_next_is_read_ahead_up_to_a_bound(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_STREAM_BUFFER_BYTES", 1000)
    monkeypatch.setattr(shard_files, "_BUFFERS_AHEAD", 5)
    asked, before = flaky(monkeypatch, works=10**9, fails=0), threading.active_count()
    with open_shard(remote) as stream:
        assert stream.read(10) == CONTENT[:10]
        deadline = time.monotonic() + 60
        while len(asked) < 7 and time.monotonic() < deadline:  # one given out, five waiting, one in the thread's hands
            time.sleep(0.001)
        assert threading.active_count() == before + 1
        time.sleep(0.02)
        assert len(asked) == 7
        assert stream.read(20000) == CONTENT[10:20010]
    assert threading.active_count() == before


def test_lasting_failures_are_reported(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky(monkeypatch, works=1, fails=5)
    with open_shard(remote) as stream, pytest.raises(OSError, match=r"failed 5 times, .*connection reset"):
        stream.read()


def test_files_that_are_not_there_are_not_asked_for_again(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr(MemoryFileSystem, "_open", open_file)
    with open_shard(remote) as stream, pytest.raises(FileNotFoundError):
        stream.read(1)
    assert open_file.call_count == 1


class ClientConnectorError(OSError):
    __module__ = "aiohttp.client_exceptions"


class ClientResponseError(Exception):
    __module__ = "aiohttp.client_exceptions"

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message")
        self.status = status


class HttpFiles(fsspec.AbstractFileSystem):
    """As fsspec's own does with servers that know no ranges."""

    protocol = "http"
    cachable = False
    down: list[Exception]
    opened: list[int | None]

    def __init__(self, block_size: int | None = None, **_: Any) -> None:
        super().__init__()
        self.block_size = block_size

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self.down:
            raise FileNotFoundError(path) from self.down.pop()
        return {"name": path, "size": len(CONTENT), "type": "file"}

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        self.opened.append(self.block_size)
        return Stream(CONTENT) if self.block_size == 0 else Ranges(CONTENT)


class Ranges(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > len(CONTENT) // 2:
            raise ValueError("The HTTP server doesn't appear to support range requests")
        return super().read(size)


class Stream(io.BytesIO):
    def seek(self, *_: Any) -> int:
        raise ValueError("Cannot seek streaming HTTP file")

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 100_000))


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: HttpFiles)
    monkeypatch.setattr("fsspec.core.get_filesystem_class", lambda protocol: HttpFiles)
    monkeypatch.setattr("fsspec.core.filesystem", lambda protocol, **options: HttpFiles(**options))
    HttpFiles.down, HttpFiles.opened = [], []
    return "http://files.example/a.tar"


def test_servers_without_ranges_are_read_from_the_start(http: str) -> None:
    with open_shard(http) as stream:
        assert stream.read(len(CONTENT) + 1) == CONTENT
    assert HttpFiles.opened == [None, 0]
    with open_shard(http, any_order=True) as stream:
        for start in (len(CONTENT) - 5000, 100, 200_000):
            stream.seek(start)
            assert stream.read(1000) == CONTENT[start : start + 1000]
        assert HttpFiles.opened[2:] == [2**16, 0, 0]


def test_a_server_that_is_down_is_told_from_files_that_are_not_there(http: str) -> None:
    down = ClientConnectorError("Cannot connect to host files.example")
    HttpFiles.down = [down] * 4
    assert problem_with(http) is None
    HttpFiles.down = [down] * 5
    assert "can't be reached: OSError: failed 5 times, at last with ClientConnectorError: Cannot" in str(
        problem_with(http)
    )
    for status, problem in ((404, "is not there"), (403, "can't be reached: ClientResponseError: 403")):
        HttpFiles.down = [ClientResponseError(status)]
        assert str(problem_with(http)).startswith(problem)


def test_what_a_server_refuses_in_mid_run_costs_what_is_in_it_alone(http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a signed URL expires."""
    monkeypatch.setattr(Ranges, "read", Mock(side_effect=ClientResponseError(403)))
    told: list[str] = []
    assert list(read_items(http, lambda name, reason: told.append(reason))) == []
    assert told == ["tar can't be read: ClientResponseError: 403, message"]
    assert read_manifest("http://files.example").shards == {}
