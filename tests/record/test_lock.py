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
from unittest.mock import Mock

import pytest

from clap_ds.record import lock
from clap_ds.record.lock import FolderLock, HeldError


@contextmanager
def held(folder: Path) -> Iterator[FolderLock]:
    """By the second attempt of a job."""
    lock = FolderLock(folder, Path("/jobs/12/1"))
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("TOUCH_S", 0.02), ("WATCH_S", 0.1), ("LOOK_S", 0.01)):
        monkeypatch.setattr(lock, name, seconds)
    monkeypatch.setenv("SLURM_JOB_ID", "12")


def _left_behind(folder: Path, **changes: Any) -> dict[str, Any]:
    """A holder's file that nobody touches; unless changed, of another host and job."""
    other = {"token": "t", "host": "tux7", "kernel": "another", "job": "/jobs/9/0", "slurm_job": "9"}
    left = FolderLock(folder)._own | other | changes
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def test_a_living_holder_is_named_and_one_that_is_done_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not" / "there"
    message = rf"there is held by host {os.uname().nodename}, pid {os.getpid()}, user \S+, job 12, /jobs/12/1"
    with held(folder) as first:
        with pytest.raises(HeldError, match=f"{message}$"), held(folder):
            pass
        first.check()
        (folder / "writer.json").unlink()  # somebody has tidied up
        first.check()
        assert json.loads((folder / "writer.json").read_text())["pid"] == os.getpid()
        assert capfd.readouterr().err == ""  # nobody had to watch
        monkeypatch.setattr(lock, "WATCH_S", 60.0)
        for where in ("_kernel", "_user"):
            with monkeypatch.context() as patch:
                patch.setattr(lock, where, lambda: "another's")
                with pytest.raises(HeldError, match=message), held(folder):  # its file is touched
                    pass
            assert "job 12, /jobs/12/1; watching for 60 s whether it is alive" in capfd.readouterr().err
    assert list(folder.iterdir()) == []


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
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if changes.get("pid") == "reaped":
        process.wait()
    known = {"pid": process.pid if "pid" in changes else os.getpid()}
    known |= {"kernel": lock._kernel()} if "kernel" in changes else {}
    _left_behind(tmp_path, **changes | known)
    with held(tmp_path) as taken:
        taken.check()
    said = capfd.readouterr().err
    assert f"was left behind by host tux7, pid {known['pid']}" in said
    assert ("watching for " in said) == watched
    assert list(tmp_path.iterdir()) == []
    process.wait()


def test_a_half_written_file_is_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "writer.json").write_text('{"token": ')
    with held(tmp_path) as taken:
        taken.check()
    assert "is held by host ?, pid ?, user ?, job (none); watching for" in capfd.readouterr().err


def test_of_many_that_find_one_dead_one_takes_its_place(tmp_path: Path) -> None:
    def take(contender: FolderLock) -> FolderLock | None:
        ready.wait()
        try:
            contender.acquire()
        except HeldError:
            return None
        return contender

    for _ in range(20):
        _left_behind(tmp_path, job="/jobs/12/0")
        contenders, ready = (
            [FolderLock(tmp_path, Path("/jobs/12/1")) for _ in range(6)],
            threading.Barrier(6, timeout=60),
        )
        with ThreadPoolExecutor(6) as pool:
            (winner,) = filter(None, pool.map(take, contenders))
        winner.check()
        winner.release()
        assert list(tmp_path.iterdir()) == []


def test_one_taken_over_meanwhile_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with held(tmp_path) as suspended:
        other = _left_behind(tmp_path)
        with pytest.raises(HeldError, match="was taken over by host tux7"):
            suspended.check()
    assert json.loads((tmp_path / "writer.json").read_text()) == other
    (tmp_path / ".writer.json.t").write_text("")  # of one killed while it took the folder over
    with pytest.raises(HeldError, match=r"if there is none, delete .*\.writer\.json\."):
        FolderLock(tmp_path).acquire()


def test_a_folder_that_cant_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clap_ds.record.lock.json.dump", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        FolderLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError):
        FolderLock(Path(sys.executable) / "folder").acquire()
