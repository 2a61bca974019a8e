"""A folder has one writer: a living one is respected and named, a dead one's place is taken by one other."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clap_ds.record import lock
from clap_ds.record.lock import FolderLock, HeldError

ATTEMPT = Path("/jobs/12/1")


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_S", 0.05)
    monkeypatch.setattr(lock, "WATCH_S", 0.1)
    monkeypatch.setattr(lock, "LOOK_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "12")


@contextmanager
def _held(folder: Path) -> Iterator[FolderLock]:
    held = FolderLock(folder, ATTEMPT)
    held.acquire()
    try:
        yield held
    finally:
        held.release()


def _left_behind(folder: Path, **changes: Any) -> dict[str, Any]:
    """A holder's file that nobody renews; unless changed, of another host and job."""
    left = {**lock._identity(), "host": "tux7", "kernel": "another", "job": "/jobs/9/0", "slurm_job": "9", "beat": 5}
    left |= changes
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def _holder(folder: Path) -> dict[str, Any]:
    holder = json.loads((folder / "writer.json").read_text())
    assert isinstance(holder, dict)
    return holder


def _dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_living_holder_is_named_and_one_that_is_done_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    with _held(folder) as first:
        first.check()
        found = rf"there is held by host {os.uname().nodename}, pid {os.getpid()}, user \S+, job 12, /jobs/12/1$"
        with pytest.raises(HeldError, match=found):
            FolderLock(folder, ATTEMPT).acquire()
        first.check()
        assert len((folder / "writer.json").read_bytes()) == 1024
    assert list(folder.iterdir()) == []
    with _held(folder):
        pass
    assert capfd.readouterr().err == ""  # nobody had to watch


def test_one_that_is_renewed_from_elsewhere_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with _held(tmp_path):
        monkeypatch.setattr(lock, "_kernel", lambda: "another host's")
        monkeypatch.setattr(lock, "WATCH_S", 60.0)
        with pytest.raises(HeldError, match="is held by host"):
            FolderLock(tmp_path, ATTEMPT).acquire()
    assert "job 12, /jobs/12/1; watching for 60 s whether it is alive" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "watched"),
    [
        ({}, True),  # of a host that is gone
        ({"job": "/jobs/12/0"}, False),  # an earlier attempt of this run
        ({"job": "/jobs/12/1"}, True),
        ({"job": ""}, True),
        ({"pid": "dead"}, True),  # of another machine
        ({"pid": "dead", "kernel": "this"}, False),
        ({"started": 1, "kernel": "this"}, False),  # another process has got its number
    ],
)
def test_a_dead_holder_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], watched: bool
) -> None:
    changes = {
        "pid": _dead_pid() if changes.get("pid") else os.getpid(),
        **{k: v for k, v in changes.items() if k != "pid"},
    }
    _left_behind(tmp_path, **changes | ({"kernel": lock._kernel()} if "kernel" in changes else {}))
    with _held(tmp_path) as taken:
        taken.check()
        assert (_holder(tmp_path)["host"], _holder(tmp_path)["pid"]) == (os.uname().nodename, os.getpid())
    said = capfd.readouterr().err
    assert f"was left behind by host tux7, pid {changes['pid']}" in said
    assert ("watching for " in said) == watched
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_is_watched_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "writer.json").write_text("")
    with _held(tmp_path):
        pass
    monkeypatch.setattr(lock, "WATCH_S", 60.0)
    (tmp_path / "writer.json").write_text("{")
    whole = threading.Timer(0.2, lambda: _left_behind(tmp_path, job="/jobs/12/0"))
    whole.start()
    with _held(tmp_path) as taken:
        assert not whole.is_alive()
        taken.check()


def test_of_many_that_find_one_dead_one_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(20):
        folder = tmp_path / str(turn)
        folder.mkdir()
        _left_behind(folder, job="/jobs/12/0")
        ready = threading.Barrier(6, timeout=60)

        def attempt(number: int, folder: Path = folder, ready: threading.Barrier = ready) -> FolderLock | None:
            mine = FolderLock(folder, ATTEMPT)
            ready.wait()
            try:
                mine.acquire()
            except HeldError:
                return None
            return mine

        with ThreadPoolExecutor(6) as pool:
            winners = [winner for winner in pool.map(attempt, range(6)) if winner is not None]
        assert len(winners) == 1
        winners[0].check()
        winners[0].release()
        assert list(folder.iterdir()) == []


def test_one_taken_over_meanwhile_is_told_and_renews_no_other(tmp_path: Path) -> None:
    with _held(tmp_path) as suspended:
        (tmp_path / "writer.json").rename(tmp_path / "aside")
        (tmp_path / "aside").unlink()
        other = _left_behind(tmp_path)
        with pytest.raises(HeldError, match="was taken over by host tux7"):
            suspended.check()
        suspended._write(suspended._file or 0)
    assert _holder(tmp_path) == other
    (tmp_path / "writer.json").unlink()


def test_a_file_that_somebody_deleted_is_made_again(tmp_path: Path) -> None:
    with _held(tmp_path) as held:
        (tmp_path / "writer.json").unlink()
        held.check()
        assert _holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_was_left_behind_is_named(tmp_path: Path) -> None:
    left = _left_behind(tmp_path, job="/jobs/12/0")
    claim = tmp_path / f".writer.json.{left['token']}"
    claim.write_text("")
    with pytest.raises(HeldError, match=f"{claim} was left by a run that broke off .* delete it"):
        FolderLock(tmp_path, ATTEMPT).acquire()


def test_a_folder_that_cant_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            FolderLock(tmp_path, ATTEMPT).acquire()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError):
        FolderLock(Path(sys.executable) / "folder").acquire()


def test_a_process_that_ended_and_was_not_reaped_is_dead() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert lock._start_time(process.pid) == -1
    process.wait()
    assert lock._start_time(process.pid) is None
