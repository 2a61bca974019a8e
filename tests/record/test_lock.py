"""A folder has one writer: a living one is respected and named, a dead one's place is taken by one other."""

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
    for name, seconds in (("TOUCH_S", 0.02), ("WATCH_S", 0.1), ("LOOK_S", 0.01)):
        monkeypatch.setattr(lock, name, seconds)
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
    """A holder's file that nobody touches; unless changed, of another host and job."""
    left = {**lock._identity(), "host": "tux7", "kernel": "another", "job": "/jobs/9/0", "slurm_job": "9", **changes}
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def _ended() -> subprocess.Popen[bytes]:
    """A process that has ended and wasn't reaped."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_a_living_holder_is_named_and_one_that_is_done_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    with _held(folder) as first:
        found = rf"there is held by host {os.uname().nodename}, pid {os.getpid()}, user \S+, job 12, /jobs/12/1$"
        with pytest.raises(HeldError, match=found):
            FolderLock(folder, ATTEMPT).acquire()
        first.check()
        (folder / "writer.json").unlink()  # somebody has tidied up
        first.check()
        assert json.loads((folder / "writer.json").read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []
    assert capfd.readouterr().err == ""  # nobody had to watch


def test_one_that_touches_its_file_elsewhere_is_alive(
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
        ({"pid": "ended"}, True),  # of another machine
        ({"pid": "ended", "kernel": "this"}, False),
        ({"pid": "reaped", "kernel": "this"}, False),
        ({"started": 1, "kernel": "this"}, False),  # another process has got its number
    ],
)
def test_a_dead_holder_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], watched: bool
) -> None:
    process = _ended()
    if changes.get("pid") == "reaped":
        process.wait()
    known = {"pid": process.pid if "pid" in changes else os.getpid()}
    known |= {"kernel": lock._kernel()} if "kernel" in changes else {}
    _left_behind(tmp_path, **changes | known)
    with _held(tmp_path) as taken:
        taken.check()
    said = capfd.readouterr().err
    assert f"was left behind by host tux7, pid {known['pid']}" in said
    assert ("watching for " in said) == watched
    assert list(tmp_path.iterdir()) == []
    process.wait()


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


def test_of_many_that_find_one_dead_one_takes_its_place(tmp_path: Path) -> None:
    for turn in range(20):
        folder = tmp_path / str(turn)
        folder.mkdir()
        _left_behind(folder, job="/jobs/12/0")
        contenders = [FolderLock(folder, ATTEMPT) for _ in range(6)]
        ready = threading.Barrier(6, timeout=60)

        def attempt(mine: FolderLock, ready: threading.Barrier = ready) -> bool:
            ready.wait()
            try:
                mine.acquire()
            except HeldError:
                return False
            return True

        with ThreadPoolExecutor(6) as pool:
            (winner,) = [mine for mine, won in zip(contenders, pool.map(attempt, contenders), strict=True) if won]
        winner.check()
        winner.release()
        assert list(folder.iterdir()) == []


def test_one_taken_over_meanwhile_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with _held(tmp_path) as suspended:
        other = _left_behind(tmp_path)
        with pytest.raises(HeldError, match="was taken over by host tux7"):
            suspended.check()
    assert json.loads((tmp_path / "writer.json").read_text()) == other
    (tmp_path / f".writer.json.{other['token']}").write_text("")  # of one killed while it took the folder over
    with pytest.raises(HeldError, match=r"if there is none, delete .*\.writer\.json\."):
        FolderLock(tmp_path, ATTEMPT).acquire()


def test_a_folder_that_cant_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clap_ds.record.lock.json.dump", full)
    with pytest.raises(OSError, match="No space left"):
        FolderLock(tmp_path, ATTEMPT).acquire()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError):
        FolderLock(Path(sys.executable) / "folder").acquire()
