import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from clap_ds.data import shard_files
from clap_ds.data.shard_files import open_shard
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
        for _ in range(1000):
            if len(asked) < 7:  # one given out, five waiting, one in the thread's hands
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
